"""Whether a dead run may be restarted without a person."""

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.ledger.ledger import Ledger
from infra.records.data_path import Record

ATTEMPTS = 3
"""Recoveries without a new checkpoint between them."""


class Recovery(Record):
    """One fresh start of a run."""

    flow_run: str
    """Who had died."""
    step: int
    """Step of the newest checkpoint at that time."""


class Recoveries(Record):
    """All fresh starts of a run, oldest first."""

    made: tuple[Recovery, ...] = ()


def newest_step(folder: RunFolder, ledger_url: str | None) -> int:
    """Step of the newest committed checkpoint; 0 without one."""
    if ledger_url is None and not folder.ledger_file.exists():
        return 0
    with Ledger.open(ledger_url or folder.ledger_url, folder.name) as ledger:
        return max((checkpoint.step for checkpoint in ledger.checkpoints()), default=0)


def note_recovery(folder: RunFolder, flow_run: str, step: int) -> bool:
    """Note that a run is about to be started again, `flow_run` having died; whether it may be.

    It may not after ATTEMPTS recoveries that came to no new checkpoint. Asking again for the same flow run changes
    nothing.
    """
    file = folder.recoveries
    made = Recoveries.read(file).made if file.is_file() else ()
    if any(one.flow_run == flow_run for one in made):
        return True
    if len(made) >= ATTEMPTS and all(one.step == step for one in made[-ATTEMPTS:]):
        return False
    write_atomically(file, Recoveries(made=(*made, Recovery(flow_run=flow_run, step=step))))
    return True
