"""GPU-hours of a run: by role, over leases that overlap, and of a run that was killed."""

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.files.lines import read_objects, write_objects
from infra.files.run_folder import RunFolder
from infra.run.device_time import DeviceTime, device_time, end_leases, holding

HOUR = 3600.0


def lines(*changes: tuple[float, str, Mapping[str, int]]) -> list[dict[str, object]]:
    return [{"at": at * HOUR, "owner": owner, "gpus": dict(gpus)} for at, owner, gpus in changes]


def test_hours_by_role_of_leases_that_overlap(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    begun = lines((0, "run", {"inference": 2, "training": 4}), (1, "run-generator-2", {"inference": 1}))
    write_objects(folder.devices, begun + lines((3, "run-generator-2", {"inference": 0}), (4, "run", {})))
    assert device_time(folder).hours == pytest.approx({"inference": 10, "training": 16})
    assert device_time(folder, now=9 * HOUR).total == pytest.approx(26)


def test_a_lease_that_goes_on_counts_until_now(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    write_objects(folder.devices, lines((0, "run", {"training": 8})))
    assert device_time(folder, now=HOUR / 2).hours == pytest.approx({"training": 4})


@given(st.lists(st.tuples(st.floats(0, 5), st.sampled_from("abc"), st.integers(0, 4)), max_size=12))
def test_the_sum_is_that_of_every_moment(tmp_path_factory: pytest.TempPathFactory, steps: list) -> None:
    """Against a clock that adds up who holds what, change by change."""
    folder, at, held, total, changes = RunFolder(tmp_path_factory.mktemp("a")), 0.0, {}, 0.0, []
    for wait, owner, gpus in steps:
        total, at = total + wait * sum(held.values()), at + wait
        held[owner] = gpus
        changes.append((at, owner, {"inference": gpus}))
    write_objects(folder.devices, lines(*changes))
    assert device_time(folder, now=at * HOUR).total == pytest.approx(total, abs=1e-6)


def test_a_run_without_gpus_says_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with holding(folder, {"inference": 0, "training": 0}):
        pass
    assert device_time(folder).in_words() == ""
    assert device_time(RunFolder(tmp_path / "nothing")).hours == {}


def test_a_failure_ends_the_lease(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with pytest.raises(RuntimeError), holding(folder, {"training": 1}):
        raise RuntimeError
    assert read_objects(folder.devices)[-1]["gpus"] == {}


def test_a_killed_run_is_charged_until_its_last_sign_of_life(tmp_path: Path) -> None:
    folder, begun = RunFolder(tmp_path), time.time() - 10 * HOUR
    write_objects(folder.devices, [{"at": begun, "owner": "run", "gpus": {"training": 2}}])
    folder.logs.mkdir()
    (folder.logs / "trainer.log").write_text("step 1")
    os.utime(folder.logs / "trainer.log", (begun + 3 * HOUR, begun + 3 * HOUR))
    end_leases(folder)
    assert device_time(folder).total == pytest.approx(6)
    before = folder.devices.read_bytes()
    end_leases(folder)
    assert folder.devices.read_bytes() == before


def test_words_and_money() -> None:
    used = DeviceTime({"training": 2.1, "inference": 1.1}, 3.0)
    assert used.in_words() == "3.20 GPU-hours (inference 1.10, training 2.10), $9.60"
    assert used.in_words(0.12).endswith("$9.60, $0.80 for each per cent of the gain")
    half = replace(used, busy={"training": 0.93})
    assert half.in_words() == "3.20 GPU-hours (inference 1.10; training 2.10, 93% busy), $9.60"
    assert half.mean_busy == 0.93
    assert replace(used, busy={"training": 0.9, "inference": 0.5}).mean_busy == pytest.approx(
        (1.1 * 0.5 + 2.1 * 0.9) / 3.2
    )
    assert used.mean_busy is None
    assert used.in_words(-0.1) == used.in_words()
    assert DeviceTime({"training": 2.1}).in_words() == "2.10 GPU-hours (training 2.10)"
