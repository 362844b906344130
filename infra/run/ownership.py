"""Ownership of a run: one owner at a time, and none of its processes outlives it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from infra.config import TransportConfig
from infra.files.locks import Lock, LockHeldError, hold, own_folder, sweep
from infra.files.run_folder import RunFolder
from infra.ledger.database import set_aside_if_damaged
from infra.processes.process import Owner
from infra.quantities import duration
from infra.records.sharing import alternates
from infra.refusal import Refusal
from infra.settings import shared_memory_folder
from infra.transport.budget import budget_of
from infra.transport.choice import objects_folder, shortage

LAST_PROCESSES_S = 60.0
LOOK_S = 1.0
"""Somebody who only looks whether the run is owned holds its lock for a moment."""


@contextmanager
def hold_run(folder: RunFolder, say: Callable[[str], None], wait_s: float = 0.0) -> Iterator[Lock]:
    """Hold the run's locks, so that nobody else runs it, and set a damaged ledger aside.

    `wait_s`: how long to wait for a process that owns the run.

    Yields the lock that supervisors inherit. Raises Refusal where another process owns the run.
    """
    with ExitStack() as stack:
        try:
            try:
                stack.enter_context(hold(folder.run_lock, wait_s=LOOK_S))
            except LockHeldError:
                if not wait_s:
                    raise
                say(f"another process still runs {folder.name}: waiting until it ends, {duration(wait_s)} at most")
                stack.enter_context(hold(folder.run_lock, wait_s=wait_s))
            # The supervisors of a killed owner hold this one until they have stopped its processes.
            processes = stack.enter_context(hold(folder.processes_lock, wait_s=LAST_PROCESSES_S))
        except LockHeldError as error:
            raise _owned_elsewhere(folder, error) from error
        if aside := set_aside_if_damaged(folder.ledger_file):
            say(f"the ledger was damaged; it is now {aside}, and is rebuilt from the newest checkpoint")
        yield processes


def _owned_elsewhere(folder: RunFolder, error: LockHeldError) -> Refusal:
    return Refusal(f"run {folder.name} is owned by another process ({error} is locked): wait until it ends, or stop it")


@contextmanager
def own_run(
    folder: RunFolder, transport: TransportConfig, say: Callable[[str], None], wait_s: float = 0.0
) -> Iterator[Owner]:
    """Hold the run's locks and its place in shared memory, and remove what dead runs left there.

    `wait_s`: how long to wait for a process that owns the run.

    Raises Refusal where another process owns the run.
    """
    with ExitStack() as stack:
        locks = [stack.enter_context(hold_run(folder, say, wait_s))]
        try:
            for gone in sweep(shared_memory_folder()):
                say(f"removed {gone}, whose owner is gone")
            folders = []
            objects = objects_folder(transport, folder).parent
            if objects == folder.path and transport.kind != "stored" and not alternates(folder):
                why = shortage(transport, budget_of(transport, folder))
                say(f"objects are kept in {objects}, which is slower than shared memory: {why}")
            if objects != folder.path:
                locks.append(stack.enter_context(own_folder(objects)))
                folders.append(objects)
        except LockHeldError as error:
            raise _owned_elsewhere(folder, error) from error
        yield Owner(folder.name, folder.logs, tuple(folders), tuple(lock.descriptor for lock in locks))


def is_owned(folder: RunFolder, wait_s: float | None = None) -> bool:
    """Whether a process runs this run now; waits LAST_PROCESSES_S for those of a dead owner, and makes no file.

    Raises Refusal for a run of another user that is not shared with this one.
    """
    try:
        for lock in (folder.run_lock, folder.processes_lock):
            if lock.exists():
                with hold(lock, wait_s=LAST_PROCESSES_S if wait_s is None else wait_s):
                    pass
    except LockHeldError:
        return True
    except PermissionError as error:
        raise Refusal(
            f"run {folder.name} belongs to user {folder.path.stat().st_uid}, and {error.filename} cannot be opened: "
            "let all users of a runs folder have one group, `chmod g+s` the folder, and run with umask 002"
        ) from error
    return False
