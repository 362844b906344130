"""A process whose work its twin does (every_process/keeper.py) looks and ends as it would by itself."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

EVERY_PROCESS = Path(__file__).parent / "every_process"
MODULE = """
import os, signal, sys
if __name__ == "__main__":
    print(os.getpid(), sys.argv[1:], os.getcwd(), os.environ["MINE"], os.getppid(), flush=True)
    exec(sys.argv[1])
"""

Program = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """That of processes of a keeper which runs one small module."""
    folder = tmp_path_factory.mktemp("keeper")
    (folder / "kept_module.py").write_text(MODULE)
    inherited = {name: value for name, value in os.environ.items() if name != "DRAFTSMITH_TEST_KEEPER"}
    variables = inherited | {"PYTHONPATH": f"{EVERY_PROCESS}:{folder}"}
    command = [sys.executable, str(EVERY_PROCESS / "keeper.py"), str(folder), "kept_module"]
    keeper = subprocess.Popen(command, stdin=subprocess.PIPE, env={**variables, "MINE": "none"}, text=True)
    with keeper:
        while not (folder / "ready.json").exists():
            assert keeper.poll() is None
        yield variables | {"DRAFTSMITH_TEST_KEEPER": str(folder), "MINE": "own"}
        assert keeper.stdin
        keeper.stdin.close()
        assert keeper.wait(60) == 0


@pytest.fixture
def program(environment: dict[str, str], tmp_path: Path) -> Program:
    """Starts the module with a statement to execute."""

    def start(statement: str, **variables: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "kept_module", statement, "b"]
        return subprocess.Popen(
            command, env=environment | variables, cwd=tmp_path, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    return start


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("print(input())", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('so')", 1),
        ("1 / 0", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    ],
)
def test_a_twin_has_its_surroundings_and_its_end(program: Program, tmp_path: Path, end: str, status: int) -> None:
    process = program(end)
    said, error = process.communicate("given", timeout=120)
    pid, _, rest = said.partition(" ")
    assert int(pid) != process.pid, "it has worked by itself"
    asked = "given\n" if "input" in end else ""
    assert rest == f"{[end, 'b']} {tmp_path} own {os.getpid()}\n{asked}"
    assert process.returncode == status
    assert ("ZeroDivisionError" in error) == (end == "1 / 0")


def test_signals_reach_the_twin(program: Program) -> None:
    handler = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print('ready', flush=True)"
    process = program(f"import time; {handler}\nwhile True: time.sleep(0.1)")  # `pause` may begin after the signal
    assert process.stdout
    while process.stdout.readline() != "ready\n":
        assert process.poll() is None
    process.terminate()
    process.communicate(timeout=120)
    assert process.returncode == 7


def test_the_twin_of_a_killed_process_dies(program: Program) -> None:
    process = program("import time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: time.sleep(0.1)")
    assert process.stdout
    assert process.stdout.readline()
    process.kill()
    assert process.communicate(timeout=120)[0] == ""  # the end of a pipe that the twin held open too


def test_a_process_with_another_variable_works_by_itself(program: Program) -> None:
    process = program("pass", HF_HOME="/elsewhere")
    assert process.communicate(timeout=120)[0].startswith(f"{process.pid} ")
    assert process.returncode == 0


def test_what_a_twin_leaves_is_killed(program: Program) -> None:
    process = program("import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)")
    process.communicate(timeout=120)  # ends with the last that holds the pipe
    assert process.returncode == 0
