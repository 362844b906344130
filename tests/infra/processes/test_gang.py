"""Several processes that are one to whoever keeps them running. Real ones."""

import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from infra.processes.gang import Gang
from infra.processes.keep_running import KeptProcess
from infra.processes.process import Owner, ProcessFailedError, ProcessRefusedError, start

WAIT_S = 120.0


def gang(folder: Path, *scripts: str, led: bool = False) -> Gang:
    owner = Owner("gang", folder / "logs")
    members = [start(f"member-{i}", ["sh", "-c", script], owner, grace_s=1.0) for i, script in enumerate(scripts)]
    return Gang(members, led)


def end(kept: KeptProcess) -> list[str]:
    """Everything that was said until it has ended well, or for good."""
    said: list[str] = []
    deadline = time.monotonic() + WAIT_S
    while not kept.tend(said.append, said.append) and kept.failure is None:
        assert time.monotonic() < deadline, said
        time.sleep(0.02)
    return said


def test_it_ends_well_when_all_have_and_the_first_one_speaks(tmp_path: Path) -> None:
    with closing(KeptProcess(lambda: gang(tmp_path, "echo one", "echo two; sleep 0.3"))) as kept:
        assert end(kept) == ["one"]
    assert kept.failure is None


def test_one_that_fails_takes_the_others_along_and_all_are_started_again(tmp_path: Path) -> None:
    done, others = tmp_path / "done", tmp_path / "pids"
    scripts = (
        f"echo $$ >> {others}; [ -e {done} ] || sleep 600",
        f"[ -e {done} ] && exit; until [ -s {others} ]; do sleep 0.02; done; touch {done}; kill -9 $$",
    )
    with closing(KeptProcess(lambda: gang(tmp_path, *scripts), backoff_s=0.05)) as kept:
        assert end(kept) == ["member-1 was killed by signal 9; restart 1 of 5 in 0.05 s"]
    first, second = map(int, others.read_text().split())
    assert first != second
    assert not psutil.pid_exists(first)


@pytest.mark.parametrize("refusing", [0, 1])
def test_a_refusal_comes_before_what_failed_because_of_it(tmp_path: Path, refusing: int) -> None:
    scripts = ["exit 1", "exit 1"]
    scripts[refusing] = "echo 'error: mend it' >&2; exit 2"
    members = gang(tmp_path, *scripts)
    deadline = time.monotonic() + WAIT_S
    while None in (statuses := [member.poll() for member in members._members]):
        assert time.monotonic() < deadline, statuses
        time.sleep(0.02)
    with closing(KeptProcess(lambda: members)) as kept:
        end(kept)
        assert isinstance(kept.failure, ProcessRefusedError)
        assert str(kept.failure) == "mend it"


def test_who_failed_first_is_named(tmp_path: Path) -> None:
    members = gang(tmp_path, "sleep 600", "echo why; exit 3")
    deadline = time.monotonic() + WAIT_S
    while members.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    members.stop()
    failure = members.failure()
    assert isinstance(failure, ProcessFailedError)
    assert (failure.headline, failure.tail) == ("member-1 ended with exit code 3", ["why"])


def test_a_led_one_ends_with_its_first_member_and_the_others_are_stopped(tmp_path: Path) -> None:
    members, said = gang(tmp_path, "echo one; sleep 0.3; echo two", "sleep 600", led=True), []
    with closing(KeptProcess(lambda: members)) as kept:
        members.wait(WAIT_S, said.append)
        assert members._members[1].poll() is None
        assert kept.tend(said.append, said.append)
    assert said == ["one", "two"]
    assert members._members[1].poll() is not None


def test_a_leader_that_ends_well_when_stopped_does_not_hide_who_failed(tmp_path: Path) -> None:
    """As a server does that has nothing to do when a part of it on another machine dies."""
    ready = tmp_path / "ready"
    scripts = (
        f"trap 'kill $!; exit 0' TERM; touch {ready}; sleep 600 & wait",
        f"until [ -e {ready} ]; do sleep 0.02; done; exit 3",
    )
    with closing(KeptProcess(lambda: gang(tmp_path, *scripts, led=True), restarts=0)) as kept:
        end(kept)
    assert isinstance(kept.failure, ProcessFailedError)
    assert kept.failure.headline == "member-1 ended with exit code 3"
    assert isinstance(kept.process, Gang)
    assert [member.poll() for member in kept.process._members] == [0, 3]


def test_waiting_for_one_tells_who_failed_and_ends_in_time(tmp_path: Path) -> None:
    failing = gang(tmp_path, "sleep 600", "exit 3", led=True)
    with pytest.raises(ProcessFailedError, match="member-1 ended with exit code 3"):
        failing.wait(WAIT_S, print)
    failing.stop()
    slow = gang(tmp_path, "sleep 600", "sleep 600", led=True)
    with pytest.raises(TimeoutError, match=r"the member-0 did not end within 0\.3 s"):
        slow.wait(0.3, print)
    slow.stop()
