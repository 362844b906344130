"""Locks on the GPUs of servers, the same that runs take: no run leases a GPU while its server is away.

A server that is being replaced, or waits after a crash, leaves its GPU empty, and a waiting run would lease it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from infra.files.locks import LockHeldError, hold
from infra.pools.gpus import named_gpus
from infra.pools.local import LOCKS
from infra.serving.config import ServerConfig


class ServerGpus:
    """The GPUs that servers name. A lock that is taken is held until this process ends, however it ends."""

    def __init__(self, servers: Sequence[ServerConfig], say: Callable[[str], None], locks: Path | None = None) -> None:
        self._say, self._locks, self._held = say, locks or LOCKS, ExitStack()
        self._missing = {server.url: tuple(map(str, server.gpus)) for server in servers if server.gpus}
        """What servers name and is not locked yet, by address."""
        self._mine: set[str] = set()
        """GPUs whose locks are held."""
        self._leased: dict[str, str] = {}
        """One GPU of each server that somebody else holds, by address."""
        self._said: set[str] = set()

    def take(self) -> None:
        """Lock the GPUs that are not locked yet, and say once which ones cannot be."""
        self._leased = {}
        missing = {url: tuple(self._not_taken(url, names)) for url, names in self._missing.items()}
        self._missing = {url: names for url, names in missing.items() if names}

    def can_start(self, url: str) -> bool:
        """Whether nobody else holds a GPU of this server; otherwise says once which one."""
        if url in self._leased:
            self._once(
                f"{url}: a run or another follower holds {self._leased[url]}: the server is started or replaced when "
                "that has ended"
            )
        return url not in self._leased

    def _not_taken(self, url: str, names: Sequence[str]) -> Iterator[str]:
        gpus = named_gpus(names)  # without those that may be hidden from this process
        for name in names:
            # A position that stands for itself is that of a lost GPU, or no driver answers.
            uuids = [gpu for gpu in gpus.get(name, ()) if not gpu.isdecimal()]
            if not uuids:
                self._once(
                    f"{url}: no GPU that this process sees answers to {name}, so none is kept from runs: correct "
                    "`gpus`, or see nvidia-smi"
                )
            taken = [uuid for uuid in uuids if self._lock(url, uuid)]
            if len(taken) < max(1, len(uuids)):
                yield name

    def _lock(self, url: str, uuid: str) -> bool:
        if uuid in self._mine:
            return True
        try:
            self._held.enter_context(hold(self._locks / f"{uuid}.lock", for_everybody=True))
        except LockHeldError:
            self._leased[url] = uuid
            return False
        except OSError as error:
            self._once(
                f"{url}: the lock of {uuid} cannot be taken ({error}), so a run may lease it: {self._locks} must be a "
                "folder that every user may write to (mode 1777), with files of mode 666"
            )
            return False
        self._mine.add(uuid)
        return True

    def _once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)
