"""The pools of a run: its recipe's provider and specs, and pools of one generator each that come and go."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

from infra.config import PoolsConfig
from infra.pools.base import Pool, PoolProvider, PoolSpec, ReleaseError
from infra.pools.local import LocalPools
from infra.pools.queued import LOOK_S, QueuedPools
from infra.processes.process import Owner
from infra.refusal import Refusal


def pool_specs(config: PoolsConfig, generators: int) -> tuple[PoolSpec, PoolSpec]:
    """What a run wants: a part for each of a generator's machines, and for each that the trainer's ranks share."""
    inference = PoolSpec("inference", config.inference_gpus, parts=generators * config.machines_per_generator)
    return inference, PoolSpec("training", config.training_gpus, parts=config.training_machines)


def generator_spec(config: PoolsConfig, generators: int) -> PoolSpec:
    """What one generator more wants: as much as the largest share of those that the run begins with."""
    return PoolSpec("inference", -(-config.inference_gpus // generators), parts=config.machines_per_generator)


def pool_provider(config: PoolsConfig, look_s: float = LOOK_S) -> PoolProvider:
    """The provider that the recipe asks for. Raises Refusal where its engine is not installed here.

    `look_s`: how long one `acquire` may wait for an engine's answer.
    """
    if config.kind == "local":
        return LocalPools()
    if config.kind == "ray" and find_spec("ray") is None:
        raise Refusal("pools.kind=ray: Ray is not installed: pip install --editable '.[ray]' in the project's folder")
    if config.kind == "slurm" and shutil.which("sbatch") is None:
        raise Refusal(
            "pools.kind=slurm: there is no sbatch on this machine: start the run on a machine from which jobs are "
            "submitted (Debian: apt install slurm-client)"
        )
    return QueuedPools(config, look_s)


@contextmanager
def released_or_warned(warn: Callable[[str], object]) -> Iterator[None]:
    """Make an engine's failure to release devices a warning: what they were leased for is done by then."""
    try:
        yield
    except ReleaseError as error:
        warn(f"the devices are not given back: {error}")


@dataclass
class SinglePools:
    """Leases in the names of a run's generators. Nothing here waits longer than one look of the provider's."""

    provider: PoolProvider
    spec: PoolSpec
    owner: Owner
    queue: Callable[[], AbstractContextManager[object]] = nullcontext
    """A queue slot that is held with the devices; entering raises PoolBusyError if there is none now."""
    noted: Callable[[str, int], None] = lambda _owner, _gpus: None
    """Told who holds how many GPUs from now on."""
    warn: Callable[[str], object] = print
    """Told, at the end, what could not be given back."""
    _asked: dict[str, ExitStack] = field(default_factory=dict)

    def acquire(self, role: str) -> Pool:
        """Devices for the generator of that role.

        Raises PoolBusyError: ask again, or release, since an engine's queue keeps the request. Raises Refusal for
        what can never fit, and ProcessFailedError where the engine failed.
        """
        owner = self._owner(role)
        with ExitStack() as stack:
            stack.enter_context(self.queue())
            self._asked.setdefault(role, ExitStack())
            (pool,) = self.provider.acquire([self.spec], owner)
            self._asked[role] = stack.pop_all()
        self.noted(owner.name, self.spec.gpus)
        return pool

    def release(self, role: str) -> None:
        """Give back what the generator has, or asked for, if anything. Raises as the provider does."""
        stack = self._asked.get(role)
        if stack is not None:
            try:
                with stack:
                    self.provider.release(self._owner(role).name)
            finally:  # nothing runs on them any more, even if the engine did not take them
                self.noted(self._owner(role).name, 0)
            del self._asked[role]

    def close(self) -> None:
        """Give everything back; what the engine does not take now is a warning."""
        with ExitStack() as stack:
            for role in list(self._asked):
                stack.callback(self._release_or_warn, role)

    def _release_or_warn(self, role: str) -> None:
        with released_or_warned(self.warn):
            self.release(role)

    def _owner(self, role: str) -> Owner:
        return replace(self.owner, name=f"{self.owner.name}-{role}")
