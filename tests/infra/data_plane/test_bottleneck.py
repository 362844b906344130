"""The slow side and the guilty side, in words, from a real ledger."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.postgres import kill
from infra.data_plane.bottleneck import in_words, side_rates, slow_side
from infra.data_plane.watch import RunWatch, StallError, blame
from infra.ledger import database
from infra.ledger.generators import Publication
from infra.ledger.ledger import Ledger
from infra.ledger.trainers import plan_step, resume_run
from infra.records.data_path import BufferRecord, CaptureRates, Lease, ObjectRecord, SampleSlot, SideRates
from infra.servers.postgres import PostgresServer


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.open(f"sqlite:///{tmp_path}/ledger.sqlite", "run") as ledger:
        ledger.create_run(budget_bytes=2**20, bytes_per_token=64, lease_seconds=60, max_attempts=3, order="strict")
        ledger.open_epoch(None, 0, [SampleSlot(ordinal=i, sample=i, tokens=10 + i) for i in range(4)])
        yield ledger


def publish(ledger: Ledger, lease: Lease, prefill_s: float = 0.5, put_s: float = 0.1) -> None:
    buffer = BufferRecord(name="aux", nbytes=lease.nbytes, xxh3="0")
    record = ObjectRecord(key=ledger.key(lease), location="nowhere", buffers=(buffer,))
    assert not ledger.publish(Publication(lease, record, prefill_s, put_s))


def test_nobody_captures(ledger: Ledger) -> None:
    said = blame(ledger)
    assert said.startswith(
        "inference is to blame: nobody captures epoch 0 ordinal 0 (10 tokens), 4 samples are pending"
    )


def test_a_generator_that_hangs(ledger: Ledger) -> None:
    ledger.lease("generator-1", 1)
    said = blame(ledger)
    assert said.startswith("inference is to blame: generator-1 has held epoch 0 ordinal 0 (10 tokens)")
    assert said.endswith("see logs/generator-1.log")


def test_a_trainer_that_hangs(ledger: Ledger) -> None:
    for lease in ledger.lease("generator-0", 3):
        publish(ledger, lease)
    assert "training is to blame: epoch 0 ordinal 0 (10 tokens) and 3 samples in all are ready" in blame(ledger)
    for lease in ledger.lease("generator-0", 3):
        publish(ledger, lease)
    resumed = resume_run(ledger, lambda _: True, lambda _: True)
    for step in range(1, 5):
        plan_step(ledger, resumed.incarnation, 0, step, ranks=1, micro_batches=1, samples_per_step=1)
    assert "training is to blame: every sample is captured and taken" in blame(ledger)


def test_rates_of_what_was_captured(ledger: Ledger) -> None:
    assert ledger.capture_rates() == CaptureRates(tokens=0, prefill_s=0, put_s=0, generators=0)
    first, second = ledger.lease("generator-0", 1), ledger.lease("generator-1", 2)
    publish(ledger, first[0], 1.0, 0.25)
    publish(ledger, second[0], 2.0, 0.5)
    found = ledger.capture_rates()
    assert (found.tokens, found.generators) == (10 + 11, 2)
    assert (found.prefill_s, found.put_s) == pytest.approx((3.0, 0.75))
    assert ledger.capture_rates(3600.0) == found
    last = ledger.last_capture()
    assert last is not None
    assert 0 <= last.ago_s < 3600


def test_a_watch_waits_for_the_first_sample_and_then_for_the_next(ledger: Ledger) -> None:
    watch = RunWatch(ledger, 0.0, 1.0)
    watch.check()
    watch.check()  # a target that is still loading is no stall
    publish(ledger, ledger.lease("generator-0", 1)[0])
    watch.check()
    with pytest.raises(StallError, match=r"no progress for .* s: training is to blame"):
        watch.check()


def test_a_machine_that_stood_still_is_no_stall(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm suspends jobs, Docker pauses containers: flow and processes wake at once."""
    times = iter((0.0, *(at for now in (10, 20, 30, 9_990, 10_000, 10_010) for at in (now, now))))
    monkeypatch.setattr("infra.data_plane.watch.time", SimpleNamespace(monotonic=lambda: next(times)))
    publish(ledger, ledger.lease("generator-0", 1)[0])
    watch = RunWatch(ledger, 40.0, 1.0)
    for _ in range(5):
        watch.check()
    with pytest.raises(StallError, match="no progress for 50 s"):
        watch.check()


def test_a_run_that_hangs_is_found_though_the_flow_looks_seldom(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow holds the flow up for four minutes between two looks."""
    times = iter((0.0, *(250.0 * look for look in range(1, 100) for _ in range(2))))
    monkeypatch.setattr("infra.data_plane.watch.time", SimpleNamespace(monotonic=lambda: next(times)))
    publish(ledger, ledger.lease("generator-0", 1)[0])
    watch = RunWatch(ledger, 600.0, 1.0)
    for _ in range(11):
        watch.check()
    with pytest.raises(StallError, match="no progress"):
        watch.check()


def test_a_watch_may_begin_before_the_run_is_in_the_ledger(tmp_path: Path) -> None:
    """The flow watches as soon as it has started the processes, of which the first enters the run."""
    with Ledger.open(f"sqlite:///{tmp_path}/empty.sqlite", "run") as ledger:
        watch = RunWatch(ledger, 0.0, 1.0)
        watch.check()
        watch.check()


def test_a_database_that_is_away_is_waited_for(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "SERVER_S", 1.0)
    with Ledger.open(postgres.make_database("away"), "run") as ledger:
        hasty, patient = RunWatch(ledger, 0.0, 1.0), RunWatch(ledger, 1e6, 1.0)
        patient._looked = float("-inf")
        kill(postgres)
        patient.check()
        with pytest.raises(StallError, match=r"the ledger has not answered for .* s: .*refused"):
            hasty.check()
        postgres.start()


@given(
    waited=st.floats(0, 100),
    prefill_s=st.floats(0.1, 1000),
    put_s=st.floats(0.001, 1000),
    fetch_s=st.floats(0, 1000),
    generators=st.integers(1, 64),
)
def test_the_slow_side_is_the_one_that_the_others_wait_for(
    waited: float, prefill_s: float, put_s: float, fetch_s: float, generators: int
) -> None:
    captured = CaptureRates(tokens=10_000, prefill_s=prefill_s, put_s=put_s, generators=generators)
    rates = side_rates(
        captured, trained_tokens=10_000, trained_s=100 + waited, waited_s=waited, fetch_s=fetch_s, ranks=1
    )
    assert rates.training == pytest.approx(100.0)
    assert rates.inference == pytest.approx(10_000 * generators / prefill_s)
    side = slow_side(rates)
    assert (side == "training") == (rates.data_wait_share < 0.05)
    if side != "training":
        assert rates.inference is not None
        assert rates.transport is not None
        assert (side == "inference") == (rates.inference <= rates.transport)
    words = in_words(rates)
    if (
        side != "training"
        and rates.inference
        and rates.transport
        and rates.inference * rates.transport >= 100 * (rates.inference + rates.transport)
    ):
        assert words.startswith("no side is the slow one: training could take 100 tokens/s (1 rank)")
        assert "would help" not in words
    else:
        assert words.startswith(f"{side} is the slow side: training could take 100 tokens/s (1 rank)")
        assert "would help" in words


def test_waiting_for_the_first_samples_asks_for_no_more_generators() -> None:
    """Of a short run, which captures four times as fast as it trains."""
    rates = SideRates(
        inference=9431.0, transport=155_247.0, training=2227.0, data_wait_share=0.051, generators=1, ranks=1
    )
    assert in_words(rates).endswith(
        "training waits for data 5% of the time although enough could be captured, as at "
        "the start of a run or while users of a live server send little"
    )
    assert "more generators" in in_words(rates.model_copy(update={"inference": 2000.0}))


def test_words_before_anything_was_trained() -> None:
    nothing = SideRates(inference=None, transport=None, training=None, data_wait_share=0.0, generators=0, ranks=1)
    assert in_words(nothing) == "nothing has been trained yet"
