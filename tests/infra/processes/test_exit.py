"""People get one message; defects keep their traceback."""

import gc
import importlib
import json
import os
import select
import subprocess
import sys

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
