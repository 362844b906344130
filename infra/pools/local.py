"""Pools on this machine: its cores, and GPUs found by NVML bound by CUDA_VISIBLE_DEVICES.

One flock per GPU UUID keeps two runs off one GPU, whichever processes they belong to. A GPU that a stranger computes on
is left alone: it is neither free nor ours to wait for quietly.
"""

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from infra.files.locks import LockHeldError, hold
from infra.pools.base import LocalCommand, Pool, PoolBusyError, PoolSpec, in_words
from infra.pools.gpus import Gpus, named_gpus, read_gpus, visible_gpus
from infra.processes.control_groups import cores
from infra.processes.process import Owner
from infra.refusal import Refusal
from infra.settings import permitted_gpus, visible_devices

LOCKS = Path("/tmp/draftsmith-gpus")
"""The same for all users, whatever their $TMPDIR is: a GPU is locked for the whole machine."""


class LocalPool(Pool):
    """GPUs of this machine, or none of them, and its cores."""

    def __init__(self, owner: Owner, gpus: tuple[str, ...] = (), sharing: int = 1) -> None:
        """`sharing`: pools of one lease that compute on the cores at the same time, this one among them."""
        super().__init__(owner, gpus)
        self._sharing = sharing

    def _place(self, command: Sequence[str], processes: int, index: int | None) -> LocalCommand:
        gpus = self.gpus
        if gpus and index is not None:
            # Neighbours in PCI order are often those that NVLink bridges join, or that share a NUMA node.
            first, after = (len(gpus) * place // processes for place in (index, index + 1))
            gpus = gpus[first : max(first + 1, after)]
        return LocalCommand(command, max(1, cores() // self._sharing // processes), gpus)


class LocalPools:
    """Leases this machine's devices."""

    look_s = 0.0

    def __init__(self, gpus: tuple[str, ...] | None = None, locks: Path | None = None) -> None:
        self.gpus = _own_gpus() if gpus is None else gpus
        self._locks = locks or LOCKS
        self._held: dict[str, ExitStack] = {}

    def check(self, specs: Sequence[PoolSpec]) -> None:
        """Raises Refusal for more GPUs than this machine has, and for permitted ones that it does not have."""
        wanted = sum(spec.gpus for spec in specs)
        if wanted:
            refuse_unknown_gpus()
        if wanted > len(self.gpus):
            settings = " and ".join(f"pools.{spec.role}_gpus" for spec in specs)
            raise Refusal(
                f"{in_words(specs)} and this machine has {len(self.gpus)}{left_out()}: lower {settings}, "
                "or run where there are more"
            )

    def acquire(self, specs: Sequence[PoolSpec], owner: Owner) -> tuple[LocalPool, ...]:
        """Lock free GPUs. Raises Refusal or PoolBusyError, as the contract says."""
        assert owner.name not in self._held, f"{owner.name} already holds pools"
        self.check(specs)
        wanted = sum(spec.gpus for spec in specs)
        with ExitStack() as stack:
            foreign = _foreign(self.gpus) if wanted else {}
            locked = self._lock(wanted, stack, foreign)
            if len(locked) < wanted:
                runs = len(self.gpus) - len(locked) - len(foreign)
                strangers = "".join(f"; {gpu} {why}" for gpu, why in foreign.items())
                raise PoolBusyError(
                    f"{in_words(specs)}; of this machine's {len(self.gpus)}, {runs} are held by other runs or "
                    f"followers now{strangers}"
                )
            left, pools = iter(locked.items()), []
            on_cores = max(1, sum(not spec.gpus for spec in specs))
            for spec in specs:
                mine = dict(islice(left, spec.gpus))
                _refuse_several_slices(spec, mine)
                pools.append(LocalPool(replace(owner, locks=(*owner.locks, *mine.values())), tuple(mine), on_cores))
                stack.callback(pools[-1].stop)
            self._held[owner.name] = stack.pop_all()
        return tuple(pools)

    def _lock(self, count: int, stack: ExitStack, foreign: dict[str, str]) -> dict[str, int]:
        """Up to `count` GPUs, with the descriptors of their locks; GPUs that runs hold leave `foreign`."""
        locked: dict[str, int] = {}
        for gpu in self.gpus:
            if len(locked) == count:
                break
            try:
                with ExitStack() as one:
                    lock = one.enter_context(hold(self._locks / f"{gpu}.lock", for_everybody=True))
                    if gpu not in foreign:
                        locked[gpu] = lock.descriptor
                        stack.push(one.pop_all())
            except LockHeldError:
                foreign.pop(gpu, None)
            except OSError as error:
                raise Refusal(
                    f"the lock of {gpu} cannot be taken ({error}): {self._locks} must be a folder that every user may "
                    "write to (mode 1777), with files of mode 666; remove it while nobody trains"
                ) from error
        return locked

    def release(self, owner: str) -> None:
        """Stop the owner's processes, then unlock its GPUs."""
        stack = self._held.pop(owner, None)
        if stack:
            stack.close()


def _own_gpus() -> tuple[str, ...]:
    """The GPUs that this process may lease: of its allocation, and permitted."""
    names = permitted_gpus()
    if not names:
        return visible_gpus()
    permitted = tuple(dict.fromkeys(chain.from_iterable(named_gpus(names).values())))
    return permitted if visible_devices() is None else tuple(gpu for gpu in visible_gpus() if gpu in permitted)


def refuse_unknown_gpus() -> None:
    """Raise Refusal for names in $DRAFTSMITH_GPUS that belong to no GPU of this machine, or to several."""
    names = permitted_gpus()
    unknown = [name for name, gpus in named_gpus(names).items() if not gpus] if names else []
    if unknown:
        raise Refusal(
            f"$DRAFTSMITH_GPUS: {', '.join(unknown)}: no GPU of this machine has this name, or several do, or it has "
            "MIG and no slice: write UUIDs as `nvidia-smi -L` shows them"
        )


def check_left(gpus: Collection[str]) -> str:
    """Text to follow the number of `gpus`, which runs may lease: why they are not all of this machine's; else empty.

    Raises Refusal where none of them is left, unless $CUDA_VISIBLE_DEVICES says that none is to be used. Without a
    driver, that variable says nothing.
    """
    if visible_devices() == [] or (read_gpus() is None and not permitted_gpus()):
        return ""
    refuse_unknown_gpus()
    why = left_out()
    if why and not gpus:
        raise Refusal(
            f"this machine has 0 GPUs{why}: see `draftsmith doctor`, or compute on the CPU (CUDA_VISIBLE_DEVICES=)"
        )
    return why


def left_out() -> str:
    """After the number of GPUs that runs may lease: why there are no more; empty if these are all of the machine's.

    Raises Refusal where the driver or no GPU answers.
    """
    variables = {"CUDA_VISIBLE_DEVICES": visible_devices(), "DRAFTSMITH_GPUS": permitted_gpus() or None}
    left = [f"${variable}={','.join(names)}" for variable, names in variables.items() if names is not None]
    restricted = f" that {' and '.join(left)} leave{'s' if len(left) == 1 else ''}" if left else ""
    inventory = read_gpus() or Gpus((), "", 0)
    undivided = "".join(f"; {gpu.uuid} has MIG and no slice" for gpu in inventory.gpus if not gpu.offered)
    lost = "".join(f"; GPU {place} does not answer ({why})" for place, why in inventory.lost.items())
    return restricted + undivided + lost


def _refuse_several_slices(spec: PoolSpec, gpus: Collection[str]) -> None:
    """CUDA shows a process one MIG slice, however many it is given."""
    if len(gpus) > spec.parts and any(gpu.startswith("MIG-") for gpu in gpus):
        raise Refusal(
            f"pools.{spec.role}_gpus={spec.gpus}: a process can use one MIG slice only: set it to {spec.parts}, or "
            "switch MIG off (`nvidia-smi -mig 0`)"
        )


def _foreign(gpus: Collection[str]) -> dict[str, str]:
    """GPUs that cannot be leased, and why: a run that holds their locks uses them, or a stranger, or they are lost.

    Raises Refusal where none answers.
    """
    inventory = read_gpus()
    if inventory is None:
        return {}
    used = {
        gpu.uuid: f"is in use by {gpu.held}, stop them" for gpu in inventory.devices if gpu.uuid in gpus and gpu.held
    }
    used |= {
        gpu.uuid: "has the compute mode Prohibited, permit its use (`nvidia-smi -c DEFAULT`)"
        for gpu in inventory.devices
        if gpu.uuid in gpus and gpu.most_processes == 0
    }
    if not inventory.lost:
        return used
    # NVML does not tell the UUID of a lost GPU; $DRAFTSMITH_GPUS may name it.
    working = {gpu.uuid for gpu in inventory.devices}
    return used | {gpu: "does not answer, see what nvidia-smi says of it" for gpu in gpus if gpu not in working}
