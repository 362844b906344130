"""The machine to which a sample's hidden states are put is the one whose ranks the ledger gives it to."""

from collections.abc import Callable

from infra.files.run_folder import RunFolder
from infra.ledger.generators import Publication
from infra.ledger.ledger import Ledger
from infra.ledger.trainers import EndOfEpoch, Wait, plan_step, resume_run
from infra.records.data_path import BufferRecord, Lease, ObjectRecord, StepPlan
from models.capture.readers import Readers
from models.run import PreparedRun

MACHINES, RANKS, EPOCHS = 2, 4, 2
POOLS = ("pools.kind=slurm", "transport.kind=mooncake", f"pools.training_machines={MACHINES}")
TRAINING = (f"training.ranks={RANKS}", "training.samples_per_step=16", "training.micro_batches=2")


def test_hidden_states_are_put_where_they_will_be_read(make_run: Callable[..., RunFolder]) -> None:
    run = PreparedRun.open(make_run("run", *POOLS, *TRAINING, "data.max_samples=200").path)
    readers, steps, machines = Readers(run), 0, set[int]()
    with run.open_ledger() as ledger:
        incarnation = resume_run(ledger, lambda _: True, lambda _: True).incarnation
        for epoch in range(EPOCHS):
            ledger.open_epoch(incarnation, epoch, run.epoch_slots(epoch))
            addresses = dict[int, str]()
            while not isinstance(plan := next_step(run, ledger, incarnation, epoch, steps + 1), EndOfEpoch):
                if isinstance(plan, Wait):
                    addresses |= capture(ledger, readers)
                    continue
                steps += 1
                for sample in plan.samples:
                    machine = sample.rank * MACHINES // RANKS
                    assert addresses[sample.ordinal] == f"{sample.object.key}@{machine}"
                    machines.add(machine)
                ledger.release(incarnation, epoch, *(sample.ordinal for sample in plan.samples))
    assert steps == EPOCHS * -(-run.samples.train_samples // 16)
    assert machines == set(range(MACHINES))


def next_step(
    run: PreparedRun, ledger: Ledger, incarnation: int, epoch: int, step: int
) -> StepPlan | Wait | EndOfEpoch:
    settings = run.config.training
    return plan_step(
        ledger,
        incarnation,
        epoch,
        step,
        ranks=settings.data_parallel_size,
        micro_batches=settings.micro_batches,
        samples_per_step=settings.samples_per_step,
    )


def capture(ledger: Ledger, readers: Readers) -> dict[int, str]:
    """Capture some samples; where each was put."""
    leases = ledger.lease("generator", 20)
    assert ledger.publish(*(Publication(lease, written(ledger, lease)) for lease in leases)) == []
    return {lease.ordinal: readers.address(ledger.key(lease), lease) for lease in leases}


def written(ledger: Ledger, lease: Lease) -> ObjectRecord:
    buffer = BufferRecord(name="aux", nbytes=lease.nbytes, xxh3="0" * 32)
    return ObjectRecord(key=ledger.key(lease), location="memory", buffers=(buffer,))


def test_one_machine_needs_no_address(make_run: Callable[..., RunFolder]) -> None:
    lease = Lease(epoch=0, ordinal=3, sample=1, tokens=9, attempt=1, nbytes=90)
    for settings in ((), ("transport.kind=mooncake",)):
        readers = Readers(PreparedRun.open(make_run(f"run-{len(settings)}", *settings).path))
        assert readers.address("run/0/3/1", lease) == "run/0/3/1"
