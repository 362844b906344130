"""How a trainer takes over its run: from the ledger or, if that was lost, from the newest checkpoint's manifest."""

from infra.ledger.answers import Resume
from infra.ledger.ledger import Ledger
from infra.ledger.planning import unpack_ordinals
from infra.records.data_path import SampleSlot
from infra.transport.base import Transport
from infra.transport.sweep import sweep
from models import checkpoint as checkpoints
from models.run import PreparedRun, epoch_order


def take_over(run: PreparedRun, ledger: Ledger, transport: Transport) -> Resume:
    """Take the run over, and remove what no row of the ledger knows: objects, checkpoints, metrics of undone steps."""
    folder = run.folder
    _rebuild_if_lost(run, ledger)
    resume = ledger.resume(lambda record: checkpoints.is_whole(folder, record), transport.verify)
    for record in resume.dropped:
        print(f"checkpoint of step {record.step} ({record.path}) does not verify and is dropped", flush=True)
    sweep(transport, ledger)
    checkpoints.remove_uncommitted(folder, ledger)
    checkpoints.rewind_metrics(folder, resume.checkpoint.step if resume.checkpoint else 0)
    return resume


def epoch_slots(run: PreparedRun, epoch: int) -> list[SampleSlot]:
    """Every sample of an epoch in its order."""
    lengths = run.open_samples().lengths.tolist()
    order = epoch_order(run.config.seed, epoch, len(lengths))
    return [SampleSlot(ordinal=o, sample=s, tokens=lengths[s]) for o, s in enumerate(order)]


def _rebuild_if_lost(run: PreparedRun, ledger: Ledger) -> None:
    """Rebuild the ledger if it is empty although a whole checkpoint exists."""
    if ledger.progress().total or ledger.checkpoints():
        return
    for path in reversed(run.folder.checkpoint_folders()):
        record = checkpoints.record_of(run.folder, path)
        if record is None:
            continue
        manifest = checkpoints.Manifest.read(path / checkpoints.MANIFEST)
        ledger.rebuild(record, manifest.epoch, epoch_slots(run, manifest.epoch), unpack_ordinals(manifest.consumed))
        print(f"the ledger was lost; it is rebuilt from the checkpoint of step {record.step}", flush=True)
        return
