"""Programs of SGLang's environment that fork from one process have their own surroundings and end."""

import subprocess
from pathlib import Path

import pytest

from infra.sglang.command import sglang_python

PROGRAM = """
import os, sys
import sglang
print(sys.argv[1:], os.getcwd(), os.environ["MINE"], sys.stdin.read())
print("aloud", file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("sys.exit(3)", 3), ("sys.exit('so')", 1), ("1 / 0", 1), ("os.kill(os.getpid(), 9)", 1)],
)
def test_a_program_has_its_own_surroundings_and_end(
    end: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sglang_that_forks: None
) -> None:
    monkeypatch.setenv("MINE", "own")
    command = [sglang_python(), "-c", PROGRAM + "sys.stdout.flush()\n" + end, "a", "b"]
    done = subprocess.run(
        command, input="given", capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (status, f"['a', 'b'] {tmp_path} own given\n")
    assert "aloud" in done.stderr
    assert ("ZeroDivisionError" in done.stderr) == (end == "1 / 0")
