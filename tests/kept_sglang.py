"""`python -P kept_sglang.py SOCKET`, in SGLang's environment: imports SGLang once, and forks for every program.

Importing SGLang takes ten seconds of a CPU. `ask` is what stands in for that environment's `bin/python`: it hands over
its arguments, variables, folder and streams, and ends with the program's status. Ends when its standard input does.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from pathlib import Path


def ask(place: str) -> int:
    """Have a program run, whose arguments are this process's; its exit status."""
    given = {"arguments": sys.argv[1:], "variables": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(place)
        socket.send_fds(connection, [b"0"], [0, 1, 2])
        connection.sendall(json.dumps(given).encode())
        connection.shutdown(socket.SHUT_WR)
        return int(connection.recv(16) or 1)  # without an answer it has crashed


def keep(place: str) -> None:
    """Serve until standard input ends."""
    from sglang.srt.models.registry import ModelRegistry  # pyright: ignore[reportMissingImports]

    assert ModelRegistry.is_arch_supported("LlamaForCausalLM"), "all of its models are imported"
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()
        while sys.stdin not in (ready := select.select([listener, sys.stdin], [], [])[0]):
            assert ready
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    answer(connection)


def answer(connection: socket.socket) -> None:
    """Be the process of a program, and tell its status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, *_ = socket.recv_fds(connection, 1, 3)
    for stream, theirs in enumerate(streams):
        os.dup2(theirs, stream)
    given = json.loads(b"".join(iter(lambda: connection.recv(2**16), b"")))
    os.environ.clear()
    os.environ.update(given["variables"])
    os.chdir(given["folder"])
    status = 1
    try:
        run(given["arguments"])
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    finally:
        if sys.exc_info()[0]:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        connection.sendall(str(status).encode())
        os._exit(status)


def run(arguments: list[str]) -> None:
    """As Python's command line does."""
    sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if arguments[0] in ("-c", "-m"):
        sys.path.insert(0, os.getcwd())
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
    elif arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    keep(sys.argv[1])
