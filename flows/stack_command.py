"""`draftsmith ui`, `up` and `down`: servers on loopback, the two with web pages or a whole stack with workers.

Everything runs under supervisors of the command's process: stopped, killed or crashed, it leaves nothing behind.
"""

import os
import platform
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from infra.files.atomic import write_atomically
from infra.files.folders import owner_of
from infra.files.locks import LockHeldError, hold
from infra.network.health import public, trouble
from infra.network.ports import HOST, free_port, is_free
from infra.processes.exit import told_to_stop
from infra.processes.process import Owner
from infra.records.data_path import Record
from infra.refusal import Refusal
from infra.servers.local import ANSWER_S, MLFLOW_PORT, PREFECT_PORT
from infra.settings import prefect_api_url, runs_folder, tracking_uri

if TYPE_CHECKING:
    from infra.servers.stack import Stack

POLL_S = 0.3
START_S = 600.0
GONE_S = 30.0
"""A killed command's servers are gone after their grace."""
STOP_S = 120.0
PrefectPort = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Default: 4200, or the next free; `up` keeps its port.")
]
MlflowPort = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Default: 5000, or the next free; `up` keeps its port.")
]


class StackPorts(Record):
    """Where the pages of a stack are, the same after each restart."""

    prefect: int
    mlflow: int


def ui(prefect_port: PrefectPort = None, mlflow_port: MlflowPort = None) -> None:
    """Serve Prefect's and MLflow's pages on loopback until Ctrl-C."""
    from infra.servers.stack import start_pages

    url, uri = None if prefect_port else prefect_api_url(), tracking_uri()
    # Flows may be pointed to a Prefect server of this machine that has ended: that one is started.
    prefect = _prefect_elsewhere(url)
    mlflow = _tracking_elsewhere(uri) if uri.startswith(("http://", "https://")) else None
    if prefect and mlflow:
        print(_where(prefect, mlflow))
        return
    taken: set[int] = set()

    def start(stack: "Stack") -> tuple[str, Mapping[str, str]]:
        usual = urlsplit(url or "").port or PREFECT_PORT
        prefect_here = None if prefect else _port("Prefect", prefect_port, usual, taken)
        mlflow_here = None if mlflow else _port("MLflow", mlflow_port, MLFLOW_PORT, taken)
        for log in stack.owner.logs.glob("*.log"):
            log.unlink()
        environment = start_pages(stack, prefect_here, mlflow_here)
        return _where(prefect or _local(prefect_here), mlflow or _local(mlflow_here)), environment

    serve(f"ui-{os.getuid()}", start, restarts=0)  # several users may share the runs


def up(
    background: Annotated[
        bool, typer.Option("--background", metavar="", help="Return once everything answers.")
    ] = False,
    prefect_port: PrefectPort = None,
    mlflow_port: MlflowPort = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", metavar="", help="Replace prefect.yaml's deployments of another folder.")
    ] = False,
) -> None:
    """Start Prefect, MLflow, PostgreSQL, S3 and workers on this machine, with the deployments of prefect.yaml."""
    from infra.servers.stack import RESTARTS, start_everything

    if not Path("prefect.yaml").is_file():
        raise Refusal(
            f"there is no prefect.yaml in {Path.cwd()}: run this in a checkout of the project; `draftsmith ui` and "
            "`draftsmith retrain RECIPE` need none"
        )
    _check_owner(_folder("stack"))
    check_host(_folder("stack"))
    if background:
        _start_in_background(_folder("stack"), prefect_port, mlflow_port, take_over)
        return

    def start(stack: "Stack") -> tuple[str, Mapping[str, str]]:
        ports = kept_ports(stack.folder, prefect_port, mlflow_port)
        return _where(*map(_local, ports)), start_everything(stack, *ports, take_over)

    serve("stack", start, RESTARTS)


def down() -> None:
    """Stop what `draftsmith up` started. Data stay, and interrupted runs resume with the next `up`."""
    folder = _folder("stack")
    if not folder.is_dir():
        print(f"nothing is up: there is no {folder}")
        return
    check_host(folder)
    try:
        with hold(folder / "lock"):
            _host_file(folder).unlink(missing_ok=True)
            print("nothing is up")
            return
    except LockHeldError:
        (folder / "stop").touch()
    try:
        with hold(folder / "lock", wait_s=STOP_S):
            print("everything is down")
    except LockHeldError:
        raise Refusal(f"it did not stop within {STOP_S:g} s: look at {folder / 'logs'}") from None


def serve(name: str, start: Callable[["Stack"], tuple[str, Mapping[str, str]]], restarts: int) -> None:
    """Start a stack, the only one of its name for these runs, and tend it until Ctrl-C or `down`.

    `start` returns the addresses, as they are shown, and the environment of those who use them.
    """
    from infra.servers.stack import Stack, write_environment

    folder = _folder(name)
    try:
        with told_to_stop() as stop, hold(folder / "lock", wait_s=GONE_S) as lock:
            for note in ("stop", "addresses"):
                (folder / note).unlink(missing_ok=True)
            owner = Owner(name, folder / "logs", locks=(lock.descriptor,))
            with (
                _host_noted(folder),
                closing(Stack(folder, owner, stop, restarts)) as stack,
                _set_by(folder / "stop", stop),
            ):
                print("starting: a minute the first time", flush=True)
                addresses, environment = start(stack)
                if not stop.is_set():
                    write_environment(folder / "environment", environment)
                    write_atomically(folder / "addresses", addresses)
                    usage = _how_to_use(folder) if environment else ""
                    print(f"{addresses}\n\n{usage}\nCtrl-C stops it.", flush=True)
                while not stop.wait(POLL_S):
                    stack.tend(_say)
                print("stopping", flush=True)
            (folder / "stop").unlink(missing_ok=True)
    except LockHeldError:
        raise _up_already(folder) from None


@contextmanager
def _host_noted(folder: Path) -> Iterator[None]:
    """Note on which machine the stack is. The note stays when this process is killed."""
    write_atomically(_host_file(folder), platform.node())
    try:
        yield
    finally:
        _host_file(folder).unlink(missing_ok=True)


def _host_file(folder: Path) -> Path:
    return folder / "host"


def _other_host(folder: Path) -> str | None:
    """The other machine on which the stack was started, and has not ended as far as is noted."""
    with suppress(FileNotFoundError):
        host = _host_file(folder).read_text()
        return None if host == platform.node() else host
    return None


def check_host(folder: Path, mounts: Path = Path("/proc/mounts")) -> None:
    """Raise Refusal where a stack may live on another machine although its lock is free.

    Locks of a network file system may hold on one machine alone, and two PostgreSQL servers would destroy their data.
    On a local disk another name is this machine's earlier one, as that of a container.
    """
    from infra.ledger.database import refuse_network_file_system

    host, file = _other_host(folder), _host_file(folder)
    if host is None:
        return
    try:
        refuse_network_file_system(file, mounts)
    except Refusal:
        with suppress(LockHeldError), hold(folder / "lock"):
            raise Refusal(
                f"the stack in {folder} was started on {host}, and nothing says that it ended there: run `draftsmith "
                f"down` there; where that machine or container is gone, delete {file}"
            ) from None


@contextmanager
def _set_by(file: Path, stop: threading.Event) -> Iterator[None]:
    """Set `stop` once there is a file."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(POLL_S):
            if file.exists():
                stop.set()

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()


def _prefect_elsewhere(url: str | None) -> str | None:
    """The page of the Prefect server that is set and answers; None if one has to be started.

    A silent one on loopback is started. Raises Refusal for another silent one.
    """
    if url is None:
        return None
    why = trouble(f"{url.rstrip('/')}/health", ANSWER_S)
    if why is None:
        return _running(url.rstrip("/").removesuffix("/api"))
    if urlsplit(url).hostname in (HOST, "localhost"):
        return None
    raise Refusal(f"PREFECT_API_URL names {public(url)}, but {why}: start that server, or unset PREFECT_API_URL")


def _tracking_elsewhere(uri: str) -> str:
    """The page of the MLflow server that is set. Raises Refusal if it does not answer."""
    from infra.tracking.client import why_silent

    if why := why_silent(uri, ANSWER_S):
        raise Refusal(f"MLFLOW_TRACKING_URI names {public(uri)}, but {why}: start that server, or unset it")
    return _running(uri)


def _running(url: str) -> str:
    return f"{public(url).rstrip('/')} (was running already)"


def _start_in_background(folder: Path, prefect_port: int | None, mlflow_port: int | None, take_over: bool) -> None:
    """Start `draftsmith up` in its own session, and wait until it prints the addresses."""
    command = [sys.executable, "-c", "from flows.command_line import main; main()", "up"]
    for option, port in (("--prefect-port", prefect_port), ("--mlflow-port", mlflow_port)):
        command += [option, str(port)] if port else []
    command += ["--take-over"] if take_over else []
    try:
        with hold(folder / "lock"):
            pass
    except LockHeldError as error:
        if not _ends(folder):
            raise _up_already(folder) from error
    log, addresses = folder / "up.log", folder / "addresses"
    before = addresses.stat().st_mtime_ns if addresses.is_file() else 0
    with log.open("ab") as output:
        earlier = output.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    deadline = time.monotonic() + START_S
    while not addresses.is_file() or addresses.stat().st_mtime_ns == before:
        if process.poll() == 0:
            raise Refusal("it was told to stop while it started: give `draftsmith up` again")
        if process.poll() is not None:
            said = log.read_bytes()[earlier:].decode(errors="replace").strip().rpartition("error: ")[2]
            raise Refusal(said)
        if time.monotonic() > deadline:
            raise Refusal(f"it is not up after {START_S:g} s: look at {log}")
        time.sleep(POLL_S)
    print(f"{addresses.read_text()}\n\n{_how_to_use(folder)}\n`draftsmith down` stops it.")


def _ends(folder: Path) -> bool:
    """Whether a stack that still holds its lock ends soon, as the supervisors of a killed one do."""
    _say(f"it is up, or was killed: waiting {GONE_S:g} s for its end")
    try:
        with hold(folder / "lock", wait_s=GONE_S):
            return True
    except LockHeldError:
        return False


def _folder(name: str) -> Path:
    return runs_folder() / f".{name}"


def _port(name: str, wanted: int | None, usual: int, taken: set[int]) -> int:
    port, note = free_port(f"--{name.lower()}-port", wanted, usual, taken)
    if note:
        _say(f"{name} {note}")
    return port


def kept_ports(folder: Path, prefect: int | None, mlflow: int | None) -> tuple[int, int]:
    """The ports of a stack's two pages: the wanted ones, or those of its earlier start, or free ones; they are kept.

    Raises Refusal when one of them is taken.
    """
    file, taken = folder / "ports.json", set[int]()
    if file.is_file():
        kept = StackPorts.read(file)
        prefect, mlflow = prefect or _kept("Prefect", kept.prefect), mlflow or _kept("MLflow", kept.mlflow)
    if prefect and prefect == mlflow:
        raise Refusal(
            f"Prefect and MLflow cannot both have port {prefect}: give another one by --prefect-port or --mlflow-port"
        )
    ports = StackPorts(
        prefect=_port("Prefect", prefect, PREFECT_PORT, taken), mlflow=_port("MLflow", mlflow, MLFLOW_PORT, taken)
    )
    write_atomically(file, ports)
    return ports.prefect, ports.mlflow


def _kept(name: str, port: int) -> int:
    if not is_free(port):
        raise Refusal(
            f"{name}'s port {port} is taken by another program: end that, or choose another port by "
            f"--{name.lower()}-port, which is kept from then on (shells and services have the old address)"
        )
    return port


def _check_owner(folder: Path) -> None:
    """Raise Refusal where the stack is another user's."""
    for file in (folder / "lock", folder / "prefect-credential"):
        try:
            file.open("r+").close()
        except FileNotFoundError:
            continue
        except PermissionError:
            raise Refusal(
                f"{folder} belongs to {owner_of(folder)}, and a stack has one owner: have it started by that user, or "
                "set $DRAFTSMITH_RUNS to a folder of your own"
            ) from None


def _local(port: int | None) -> str:
    return f"http://{HOST}:{port}"


def _where(prefect: str, mlflow: str) -> str:
    return f"Prefect  {prefect}\nMLflow   {mlflow}"


def _up_already(folder: Path) -> Refusal:
    try:
        shown = ", ".join((folder / "addresses").read_text().splitlines())
    except FileNotFoundError:
        shown = "it is still starting"
    if host := _other_host(folder):
        return Refusal(
            f"it is up already on {host}: {shown}; look at it there, or end it there by Ctrl-C or `draftsmith down`"
        )
    return Refusal(f"it is up already: {shown}; stop it by Ctrl-C, or what `up` started by `draftsmith down`")


def _how_to_use(folder: Path) -> str:
    return (
        f"Prefect's page asks once for a credential: it is in {folder / 'prefect-credential'}\n"
        'MLflow\'s shows curves (Experiments) and drafts (Model registry) after "Model training"\n'
        f"Commands take credential and addresses after\n  . {shlex.quote(str(folder / 'environment'))}"
    )


def _say(what: str) -> None:
    print(what, flush=True)
