"""Processes are really started, and their starters really killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import psutil
import pytest

from infra.files.locks import LockHeldError, hold
from infra.processes.process import Owner, Process, ProcessFailedError, start

WAIT_S = 120.0

FAMILY = """
import os, subprocess, sys, time
if {stubborn}:
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
hidden = subprocess.Popen(["sleep", "600"], start_new_session=True)
plain = subprocess.Popen(["sleep", "600"])
print(os.getpid(), hidden.pid, plain.pid, flush=True)
time.sleep(600)
"""

STARTER = """
import sys, time
from pathlib import Path
from infra.files.locks import hold
from infra.processes.process import Owner, start
folder = Path(sys.argv[1])
with hold(folder / "lock") as lock:
    owner = Owner("test", folder / "logs", (folder / "owned",), (lock.descriptor,))
    process = start("family", [sys.executable, "-c", sys.argv[2]], owner, grace_s=1.0)
    print(process.pid, flush=True)
    time.sleep(600)
"""


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def family(log: Path) -> list[int]:
    """The process ids that the family printed, once it has."""
    until(lambda: log.exists() and log.read_text().endswith("\n"))
    return [int(pid) for pid in log.read_text().split()]


def run_shell(folder: Path, script: str, grace_s: float = 1.0) -> Process:
    return start("shell", ["sh", "-c", script], Owner("test", folder / "logs"), grace_s=grace_s)


def test_a_child_reaches_loopback_without_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever started us: a Prefect worker of the operator's does not come by our commands."""
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "intranet")
    lines: list[str] = []
    run_shell(tmp_path, 'echo "$no_proxy $NO_PROXY"').wait(WAIT_S, on_line=lines.append)
    assert lines == ["intranet,127.0.0.1,localhost,::1 intranet,127.0.0.1,localhost,::1"]


def test_a_good_end_forwards_every_line(tmp_path: Path) -> None:
    lines: list[str] = []
    run_shell(tmp_path, "echo one; echo two >&2; printf '10%%\\r90%%\\rthree\\r\\n'").wait(WAIT_S, on_line=lines.append)
    assert lines == ["one", "two", "three"]


def test_a_second_start_appends_and_forwards_only_its_own_lines(tmp_path: Path) -> None:
    run_shell(tmp_path, "echo first").wait(WAIT_S)
    lines: list[str] = []
    run_shell(tmp_path, "echo second").wait(WAIT_S, on_line=lines.append)
    assert lines == ["second"]
    assert (tmp_path / "logs" / "shell.log").read_text() == "first\nsecond\n"


def test_a_failure_names_role_code_log_and_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailedError) as caught:
        run_shell(tmp_path, "seq 1 50; exit 7").wait(WAIT_S)
    assert caught.value.exit_code == 7
    assert caught.value.tail == [str(number) for number in range(31, 51)]
    assert "shell ended with exit code 7" in str(caught.value)
    assert str(tmp_path / "logs" / "shell.log") in str(caught.value)


def test_a_death_by_signal_is_said(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailedError, match="killed by signal 9, as the kernel does where memory runs out"):
        run_shell(tmp_path, "kill -9 $$").wait(WAIT_S)


def test_an_exit_code_above_all_signals_is_no_signal(tmp_path: Path) -> None:
    with pytest.raises(ProcessFailedError, match="ended with exit code 255"):
        run_shell(tmp_path, "exit 255").wait(WAIT_S)


def test_waiting_has_an_end(tmp_path: Path) -> None:
    process = run_shell(tmp_path, "sleep 600")
    with pytest.raises(TimeoutError, match="did not end"):
        process.wait(0.1)
    process.stop()


def test_sigterm_reaches_the_command_which_may_end_well(tmp_path: Path) -> None:
    process = run_shell(tmp_path, "trap 'echo bye; exit 0' TERM; echo ready; while :; do sleep 0.05; done", WAIT_S)
    until(lambda: "ready" in (tmp_path / "logs" / "shell.log").read_text())
    process.stop()
    assert process.check()
    assert process.new_lines()[-1] == "bye"


@pytest.mark.parametrize("stubborn", [False, True])
def test_stopping_leaves_nothing_even_in_other_sessions(
    tmp_path: Path, stubborn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infra.processes.process.STOP_MARGIN_S", WAIT_S)  # a busy machine
    command = [sys.executable, "-c", FAMILY.format(stubborn=stubborn)]
    process = start("family", command, Owner("test", tmp_path), grace_s=0.5)
    pids = family(process.log)
    assert len(pids) == 3
    process.stop()
    process.stop()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_one_thread_may_stop_what_another_one_finds_ended(tmp_path: Path) -> None:
    """As a request's thread does that asks why its server does not answer."""
    with ThreadPoolExecutor(4) as threads:
        for _ in range(8):
            process, ended = run_shell(tmp_path, "exec sleep 600"), Event()

            def look(process: Process, ended: Event) -> None:
                while not ended.is_set() and process.poll() is None:
                    pass

            watching = [threads.submit(look, process, ended) for _ in range(2)]
            stopping = [threads.submit(process.stop) for _ in range(2)]
            try:
                for one in stopping:
                    one.result(timeout=WAIT_S)
            finally:
                ended.set()
            for one in watching:
                one.result(timeout=WAIT_S)
            assert process.poll() is not None


def test_a_crashed_command_leaves_no_orphans(tmp_path: Path) -> None:
    process = start("family", [sys.executable, "-c", FAMILY.format(stubborn=False)], Owner("test", tmp_path))
    pids = family(process.log)
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(ProcessFailedError):
        process.wait(WAIT_S)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


KILLED_BEFORE_ITS_COMMAND_BEGINS = """
import ctypes, os, signal, subprocess, sys, time
from infra.processes import supervisor
mine, libc = os.getpid(), ctypes.CDLL(None)

def begin():
    print(os.getpid(), flush=True)
    os.kill(mine, signal.SIGKILL)
    while os.getppid() == mine:
        time.sleep(0.01)
    supervisor._die_with(mine, libc)

subprocess.Popen(["sleep", "600"], preexec_fn=begin)
"""


def test_a_supervisor_that_is_killed_before_its_command_begins_leaves_nothing() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KILLED_BEFORE_ITS_COMMAND_BEGINS], stdout=subprocess.PIPE, timeout=WAIT_S, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    command = int(ended.stdout)
    until(lambda: gone(command))


def test_a_killed_supervisor_takes_its_command_along(tmp_path: Path) -> None:
    """At once; the command's own children when its starter notices."""
    process = run_shell(tmp_path, "sleep 600 & echo $$ $!; wait")
    pid, child = family(process.log)
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: gone(pid))
    assert not gone(child)
    with pytest.raises(ProcessFailedError, match="signal 9"):
        process.wait(WAIT_S)
    until(lambda: gone(child))


def test_a_process_id_that_was_given_to_somebody_else_is_left_alone(tmp_path: Path) -> None:
    """The kernel may give a supervisor's id to an unrelated session as soon as it is reaped."""
    process = run_shell(tmp_path, "true")
    process.wait(WAIT_S)
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as unrelated:
        process._supervisor.pid = unrelated.pid
        process.stop()
        process.stop()
        assert unrelated.poll() is None
        # A signal would have ended it before this one does.
        unrelated.send_signal(signal.SIGINT)
        assert unrelated.wait(WAIT_S) == -signal.SIGINT


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_killed_starter_takes_everything_along(tmp_path: Path, stubborn: bool) -> None:
    (tmp_path / "owned").mkdir()
    (tmp_path / "owned" / "object").write_text("bytes")
    (tmp_path / "kept").mkdir()
    command = [sys.executable, "-c", STARTER, str(tmp_path), FAMILY.format(stubborn=stubborn)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        supervisor = int(starter.stdout.readline())
        pids = [*family(tmp_path / "logs" / "family.log"), supervisor]
        assert all(psutil.pid_exists(pid) for pid in pids)
        with pytest.raises(LockHeldError), hold(tmp_path / "lock"):
            pass
        starter.kill()
    # The lock is free only when the supervisor has finished: whoever gets it finds nothing running.
    with hold(tmp_path / "lock", wait_s=WAIT_S):
        alive = [pid for pid in pids[:-1] if psutil.pid_exists(pid)]
        assert not alive
        assert not (tmp_path / "owned").exists()
    assert (tmp_path / "kept").exists()


def test_programs_of_a_commands_virtual_environment_are_found_by_name(tmp_path: Path) -> None:
    """SGLang starts ninja so, which lies beside its interpreter."""
    folder = tmp_path / "environment" / "bin"
    folder.mkdir(parents=True)
    (folder.parent / "pyvenv.cfg").touch()
    for name, text in (("python", "exec ninja-of-the-test"), ("ninja-of-the-test", "echo found $0")):
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    process = start("server", [str(folder / "python")], Owner("test", tmp_path / "logs"))
    process.wait(WAIT_S)
    assert process.log.read_text() == f"found {folder}/ninja-of-the-test\n"
    plain = run_shell(tmp_path, "echo $PATH")
    plain.wait(WAIT_S)
    assert plain.log.read_text().strip() == os.environ["PATH"]
