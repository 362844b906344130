"""Commands that crash are really started again; those that refuse, or crash too often, are not."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from infra.processes.keep_running import Generators, KeptProcess, follow
from infra.processes.process import Owner, ProcessFailedError, start

WAIT_S = 120.0
CRASH_TWICE = 'echo "life $(ls lives | wc -l)"; n=$(ls lives | wc -l); touch lives/$n; [ $n -ge 2 ]'


@pytest.fixture
def keep(tmp_path: Path) -> Callable[..., KeptProcess]:
    (tmp_path / "lives").mkdir()

    def make(script: str, restarts: int = 3, role: str = "shell", endless: bool = False) -> KeptProcess:
        command = ["sh", "-c", f"cd {tmp_path}; {script}"]
        launch = partial(start, role, command, Owner("test", tmp_path / "logs"), grace_s=1.0)
        return KeptProcess(launch, restarts, backoff_s=0.01, endless=endless)

    return make


def tend(kept: KeptProcess) -> tuple[list[str], list[str]]:
    """Lines and events until the command has ended, well or for good."""
    lines: list[str] = []
    events: list[str] = []
    deadline = time.monotonic() + WAIT_S
    while not kept.tend(lines.append, events.append) and kept.failure is None:
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return lines, events


def test_a_crash_is_followed_by_a_restart(keep: Callable[..., KeptProcess]) -> None:
    kept = keep(CRASH_TWICE)
    lines, events = tend(kept)
    assert lines == ["life 0", "life 1", "life 2"]
    assert events == [
        "shell ended with exit code 1; restart 1 of 3 in 0.01 s",
        "shell ended with exit code 1; restart 2 of 3 in 0.02 s",
    ]
    assert kept.failure is None


def test_the_exception_that_ended_a_command_is_named(keep: Callable[..., KeptProcess]) -> None:
    traceback = "echo 'Traceback (most recent call last):'; echo 'builtins.OSError: [Errno 28] No space left on device'"
    _, events = tend(keep(f"{traceback}; echo 'and more'; exit 1", restarts=1))
    assert events == [
        "shell ended with exit code 1 (builtins.OSError: [Errno 28] No space left on device); restart 1 of 1 in 0.01 s"
    ]


def test_a_server_that_ends_well_is_restarted_too(keep: Callable[..., KeptProcess]) -> None:
    kept = keep("exit 0", restarts=1, endless=True)
    _, events = tend(kept)
    assert events == ["shell ended with exit code 0; restart 1 of 1 in 0.01 s"]
    assert kept.failure is not None
    assert kept.failure.headline == "shell ended with exit code 0"


def test_restarts_are_bounded(keep: Callable[..., KeptProcess]) -> None:
    kept = keep("echo no; kill -9 $$", restarts=2)
    lines, events = tend(kept)
    assert (lines, len(events)) == (["no"] * 3, 2)
    assert kept.failure is not None
    assert kept.failure.exit_code == 137
    assert not kept.tend(lines.append, events.append)


def test_a_refusal_is_not_repeated(keep: Callable[..., KeptProcess]) -> None:
    kept = keep("echo 'error: no such thing' >&2; exit 2")
    _, events = tend(kept)
    assert events == []
    assert kept.failure is not None
    assert str(kept.failure) == "no such thing"


def test_following_ends_with_the_trainer(keep: Callable[..., KeptProcess]) -> None:
    seen: list[str] = []
    polls: list[None] = []
    trainer = keep("sleep 0.3; echo trained", role="trainer")
    generator = keep("sleep 600", role="generator-0")
    follow(trainer, Generators([generator]), seen.append, seen.append, [lambda: polls.append(None)])
    assert seen == ["trained"]
    assert polls
    generator.close()


def test_others_go_on_without_a_generator_that_fails_for_good(keep: Callable[..., KeptProcess], tmp_path: Path) -> None:
    events: list[str] = []

    def on_event(event: str) -> None:
        events.append(event)
        (tmp_path / "said").touch()

    trainer = keep("until [ -e said ]; do sleep 0.05; done", role="trainer")
    good = keep("sleep 600", role="generator-0")
    follow(trainer, Generators([good, keep("exit 2", role="generator-1")]), on_event, on_event)
    assert events == ["generator-1 ended with exit code 2 and is left out; still going: 1"]
    good.close()


def test_the_last_generator_s_failure_is_the_runs(keep: Callable[..., KeptProcess]) -> None:
    trainer = keep("sleep 600", role="trainer")
    with pytest.raises(ProcessFailedError, match="generator-0 ended with exit code 2"):
        follow(trainer, Generators([keep("exit 2", role="generator-0")]), print, print)
    trainer.close()


def test_a_trainer_that_refuses_ends_the_run(keep: Callable[..., KeptProcess]) -> None:
    generator = keep("sleep 600", role="generator-0")
    with pytest.raises(ProcessFailedError, match="trainer ended with exit code 2"):
        follow(keep("exit 2", role="trainer"), Generators([generator]), print, print)
    generator.close()
