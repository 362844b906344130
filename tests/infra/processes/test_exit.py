"""People get one message; defects keep their traceback."""

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from typing import Any

import pytest

from infra.processes.exit import run_main
from infra.refusal import Refusal

MORTAL = "import sys, time; from infra.processes.exit import die_with_parent; die_with_parent(int(sys.argv[1])); {}"
PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_refusal_is_one_message_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise Refusal("data.source: no such file")

    with pytest.raises(SystemExit) as caught:
        run_main(main)
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: data.source: no such file\n"


@pytest.mark.parametrize("defect", [KeyError("defect"), ValueError("a torn line"), json.JSONDecodeError("torn", "", 0)])
def test_a_defect_keeps_its_traceback_and_is_no_refusal(defect: Exception) -> None:
    def main() -> None:
        raise defect

    with pytest.raises(type(defect)):
        run_main(main)


def test_a_process_collects_garbage_once_it_has_imported_and_an_importer_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import models

    seen: list[bool] = []
    monkeypatch.setattr(sys, "argv", ["-m", "run"])  # as while `python -m models.preflight run` looks its module up
    try:
        importlib.reload(models)
        seen.append(gc.isenabled())
        run_main(lambda: seen.append(gc.isenabled()))
        monkeypatch.setattr(sys, "argv", ["notebook.py"])
        importlib.reload(models)
        seen.append(gc.isenabled())
    finally:
        gc.enable()
    assert seen == [False, True, True]


def test_whoever_was_orphaned_before_it_could_say_so_ends() -> None:
    script = MORTAL.format("time.sleep(600)")
    orphan = subprocess.run([sys.executable, "-c", script, str(2**22)], timeout=120, check=False)
    assert orphan.returncode == 1


def test_a_parent_s_death_is_its_child_s() -> None:
    script = MORTAL.format("print('ready', flush=True); time.sleep(600)")
    with subprocess.Popen([sys.executable, "-c", PARENT, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        descriptor = os.pidfd_open(child)
        parent.kill()
    readable, _, _ = select.select([descriptor], [], [], 120)  # a process that has ended is
    assert readable
    os.close(descriptor)


def start(script: str, **options: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, **options)


def test_a_reader_that_has_gone_is_no_defect() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    script = "from infra.processes.exit import run_main; run_main(lambda: print('first'{}))"
    for flush in ("", ", flush=True"):
        with start(script.format(flush), stdout=writer) as process:
            assert (process.communicate(timeout=120)[1], process.returncode) == ("", 1)
    os.close(writer)


def test_another_broken_pipe_keeps_its_traceback() -> None:
    def main() -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_main(main)


@pytest.mark.parametrize("ready", ["import models; {}; run_main(time.sleep)", "import models; run_main(lambda: {})"])
def test_ctrl_c_ends_a_process_without_a_traceback(ready: str) -> None:
    """While it imports, and later."""
    wait = ready.format("(print('ready', flush=True), time.sleep(600))")
    script = f"import sys, time; sys.argv = ['-m']; from infra.processes.exit import run_main; {wait}"
    with start(script, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=120)[1] == ""
    assert process.returncode in (130, -signal.SIGINT)


def test_a_refusal_cannot_move_the_terminal_s_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise Refusal("line 3:\n\tthe text \x1b[2J")

    with pytest.raises(SystemExit):
        run_main(main)
    assert capsys.readouterr().err == "error: line 3:\n\tthe text \\x1b[2J\n"
