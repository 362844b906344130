"""`python keeper.py FOLDER MODULE...`: imports once what the modules import, and forks for each that is to run.

A run of the tests starts such modules a thousand times, and importing torch, transformers and Lightning takes each some
five seconds of a core. A process that would do so (`ask_for`) stays what its starter sees, with its process id, parent,
streams and status, and does nothing but wait for its twin, which does the work. Signals to it are handed on; its death,
however it dies, is the twin's too, and the other way round. It goes on by itself where the twin would have other
surroundings than it: another user, namespace, limit, or variable that is read at import.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
READ_AT_IMPORT = (
    "HF_",
    "TRANSFORMERS_",
    "TORCH",
    "PYTORCH",
    "MKL_",
    "LD_",
    "LC_",
    "LANG",
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "HOME",
    "XDG_",
    "SSL_",
    "REQUESTS_",
    "AWS_CA",
)
THREADS = "OMP_NUM_THREADS"
NAMESPACES = ("net", "mnt", "user", "pid", "ipc", "uts")
LIMITS = (
    resource.RLIMIT_FSIZE,
    resource.RLIMIT_NOFILE,
    resource.RLIMIT_AS,
    resource.RLIMIT_DATA,
    resource.RLIMIT_STACK,
)
HIGH = 500
"""The keeper's own descriptors are above it, so that a twin has those of its process under the same numbers."""
F_SETSIG = 10
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def surroundings() -> dict[str, object]:
    """What must be the same in a process and the keeper."""
    return {
        "user": [os.getuid(), os.getgid(), *os.getgroups()],
        "namespaces": [os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES],
        "root": os.readlink("/proc/self/root"),
        "groups": Path("/proc/self/cgroup").read_text(),
        "limits": [list(resource.getrlimit(limit)) for limit in LIMITS],
        "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(READ_AT_IMPORT)},
        "python": [sys.executable, *sys.version_info],
    }


def ask_for(arguments: list[str]) -> None:
    """Be the process of a module whose twin does its work, if it can have one; else return."""
    place = Path(os.environ["DRAFTSMITH_TEST_KEEPER"])
    if not (place / "ready.json").exists():
        return
    ready = json.loads((place / "ready.json").read_text())
    mine = json.loads(json.dumps(surroundings()))
    for name, value in ready["set_at_import"].items():  # its starter has imported the same
        if mine["variables"].get(name) == value:
            mine["variables"].pop(name)
    if arguments[0] not in ready["modules"] or ready["surroundings"] != mine:
        return
    if Path("models").exists() and not ROOT.samefile("."):
        return  # another copy of the project
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(place / "socket"))
        except OSError:
            return  # it has ended
        _be_seen(connection, arguments)


def _be_seen(connection: socket.socket, arguments: list[str]) -> None:
    """Hand over everything, then signals; end as the twin does. Returns where the keeper dies first."""
    if "--parent" in arguments:  # as `die_with_parent`: the twin's is the keeper
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(arguments[arguments.index("--parent") + 1]):
            os._exit(1)
    own = connection.fileno()
    inherited = [number for number in map(int, os.listdir("/proc/self/fd")) if number != own and _is_open(number)]
    given = {
        "arguments": arguments,
        "variables": dict(os.environ),
        "folder": os.getcwd(),
        "descriptors": inherited,
        "parent": os.getppid(),
        "cores": sorted(os.sched_getaffinity(0)),
        "interrupted": signal.getsignal(signal.SIGINT) is not signal.SIG_IGN,
        "nice": os.nice(0),
        "umask": _umask(),
    }
    twin: list[int] = []
    waiting: list[int] = []

    def hand_on(number: int, _frame: object) -> None:
        if not twin:
            waiting.append(number)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(twin[0], number)

    before = {number: signal.getsignal(number) for number in HANDED_ON}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, hand_on)
    body, pid = json.dumps(given).encode(), b""
    with contextlib.suppress(OSError):
        socket.send_fds(connection, [len(body).to_bytes(8, "big")], inherited)
        connection.sendall(body)
        pid = connection.recv(16)
    if not pid:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in waiting:
            os.kill(os.getpid(), number)
        return
    twin.append(int(pid))
    for number in waiting:
        hand_on(number, None)
    said = connection.recv(16)  # empty: the keeper has died, and its children with it
    status = os.waitstatus_to_exitcode(int(said) if said else signal.SIGKILL)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False  # it was that of the listing itself
    return True


def keep(place: Path, modules: list[str]) -> None:
    """Serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test run's
    before, variables = surroundings(), dict(os.environ)
    _import_all(modules)
    set_at_import = {name: value for name, value in os.environ.items() if name not in variables}
    listener = socket.socket(socket.AF_UNIX)
    listener = socket.socket(fileno=_high(listener.detach()))
    listener.bind(str(place / "socket"))
    listener.listen(64)
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    read, write = _high(read), _high(write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    (place / "ready.new").write_text(
        json.dumps({"modules": modules, "surroundings": before, "set_at_import": set_at_import})
    )
    (place / "ready.new").rename(place / "ready.json")
    asked: dict[int, socket.socket] = {}
    while True:
        ready = select.select([listener, read, 0], [], [])[0]
        if 0 in ready:
            return
        if read in ready:
            os.read(read, 4096)
            _tell_ends(asked)
        if listener in ready:
            connection = listener.accept()[0]
            connection = socket.socket(fileno=_high(connection.detach()))
            if pid := os.fork():
                asked[pid] = connection
                continue
            _close([listener.detach(), read, write, *(one.detach() for one in asked.values())])
            _be_the_twin(connection, variables, set_at_import)
            return


def _import_all(modules: list[str]) -> None:
    sys.path.insert(0, str(ROOT))
    for name in modules:
        importlib.import_module(name)
    for name in modules:
        del sys.modules[name]  # each runs as `__main__`
    assert len(os.listdir("/proc/self/task")) == 1, "what has threads cannot be forked"
    gc.collect()
    gc.freeze()


def _high(number: int) -> int:
    moved = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, HIGH)
    os.close(number)
    return moved


def _close(numbers: list[int]) -> None:
    for number in numbers:
        os.close(number)


def _tell_ends(asked: dict[int, socket.socket]) -> None:
    """Tell processes how their twins ended, and kill what those left, as a supervisor does."""
    with contextlib.suppress(ChildProcessError):  # none is left
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            connection = asked.pop(ended[0], None)
            if connection is not None:
                with connection, contextlib.suppress(OSError):  # whoever asked may be dead
                    connection.sendall(str(ended[1]).encode())
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, parent = int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and pid not in asked:
                os.kill(pid, signal.SIGKILL)


def _be_the_twin(connection: socket.socket, set_before: dict[str, str], set_at_import: dict[str, str]) -> None:
    """Have the surroundings of the process that asked, die with it, and run its module."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, received, *_ = socket.recv_fds(connection, 8, 250)
    if not size:
        os._exit(0)  # whoever asked has died
    body = b""
    while len(body) < int.from_bytes(size, "big"):
        body += connection.recv(2**16)
    given = json.loads(body)
    connection.sendall(str(os.getpid()).encode().ljust(16))
    held = [_high(number) for number in received]
    for number, theirs in zip(given["descriptors"], held, strict=True):
        os.dup2(theirs, number)
    _close(held)
    signal.signal(signal.SIGINT, signal.SIG_DFL if given["interrupted"] else signal.SIG_IGN)
    # From here on the kernel kills this process when the other end closes.
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(connection, F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(connection, fcntl.F_SETFL, fcntl.fcntl(connection, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([connection], [], [], 0)[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    os.register_at_fork(after_in_child=connection.close)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what outlives this process is the keeper's to kill
    os.umask(given["umask"])
    os.environ.clear()
    os.environ.update(set_at_import | given["variables"])
    os.chdir(given["folder"])
    os.sched_setaffinity(0, given["cores"])
    os.nice(given["nice"] - os.nice(0))
    own, ask_kernel = os.getpid(), os.getppid
    os.getppid = lambda: given["parent"] if os.getpid() == own else ask_kernel()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]
    if (torch := sys.modules.get("torch")) and given["variables"].get(THREADS) != set_before.get(THREADS):
        torch.set_num_threads(int(given["variables"].get(THREADS, len(given["cores"]))))
    sys.argv, sys.orig_argv = given["arguments"], [sys.executable, "-m", *given["arguments"]]
    tempfile.tempdir = None
    sys.path[:2] = [given["folder"]]
    runpy.run_module(given["arguments"][0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    keep(Path(sys.argv[1]), sys.argv[2:])
