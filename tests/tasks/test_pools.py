"""The queue for a machine's GPUs."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from uuid import uuid4

import pytest
from httpx import HTTPStatusError, Request, Response
from prefect import flow
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.logging import disable_run_logger
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.testing.utilities import prefect_test_harness

from infra.files.run_folder import RunFolder
from infra.pools.base import PoolSpec
from infra.pools.local import LocalPools
from infra.processes.process import Owner
from models.config.recipe import load_recipe
from tasks import pools
from tasks.run import OpenRun

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.yaml"


class PrefectServer(ThreadingHTTPServer):
    """Answers what `occupy` asks Prefect's server; as often as `failing` says each kind of request fails first."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.failing = {"GET": 0, "increment": 0, "decrement": 0}
        self.released = 0


class Answers(BaseHTTPRequestHandler):
    server: PrefectServer

    def answer(self, status: int, body: object = None) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def fails(self, kind: str) -> bool:
        self.server.failing[kind] -= 1
        if self.server.failing[kind] >= 0:
            self.answer(500)
        return self.server.failing[kind] >= 0

    def do_GET(self) -> None:
        if "csrf" in self.path:
            self.answer(404)  # as servers that have none
        elif not self.fails("GET"):
            now = "2026-01-01T00:00:00Z"
            limit = {"id": str(uuid4()), "name": "gpus", "limit": 4, "active": True, "active_slots": 0}
            self.answer(200, limit | {"slot_decay_per_second": 0, "created": now, "updated": now})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        kind = next((kind for kind in self.server.failing if kind in self.path), None)
        if kind and self.fails(kind):
            return
        self.server.released += kind == "decrement"
        limits = [{"id": str(uuid4()), "name": "gpus", "limit": 4}]
        self.answer(200, {"lease_id": str(uuid4()), "limits": limits})

    def log_message(self, *_arguments: object) -> None:
        """Quiet."""


@pytest.fixture
def prefect_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[PrefectServer]:
    """Limits need names of their own: Prefect keeps a client for each of them."""
    monkeypatch.setattr(pools, "LOOK_AGAIN_S", 0.05)
    with PrefectServer() as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/api"
        with temporary_settings({PREFECT_API_URL: address}), disable_run_logger():
            yield server
        server.shutdown()


@pytest.mark.parametrize("kind", ["GET", "increment"])
def test_a_server_that_is_away_is_waited_for(prefect_server: PrefectServer, kind: str) -> None:
    prefect_server.failing[kind] = 2
    with pools.occupy(f"gpus-{uuid4()}", 2, 4, wait_s=10):
        assert prefect_server.failing[kind] < 0
    assert prefect_server.released == 1


def test_a_server_that_stays_away_ends_the_wait_at_its_deadline(prefect_server: PrefectServer) -> None:
    prefect_server.failing["GET"] = 10**6
    with pytest.raises(HTTPStatusError, match="500"), pools.occupy("gpus", 2, 4, wait_s=0.5):
        raise AssertionError("no slot was given")


@pytest.mark.parametrize("body", [None, KeyError("of the body")])
def test_slots_that_cannot_be_given_back_do_not_fail_what_is_done(
    prefect_server: PrefectServer, body: Exception | None
) -> None:
    raised = None
    try:
        with pools.occupy(f"gpus-{uuid4()}", 2, 4, wait_s=10):
            prefect_server.shutdown()
            prefect_server.server_close()  # from now on connections are refused
            if body:
                raise body
    except KeyError as error:
        raised = error
    assert raised is body


COMMANDS = {
    "sinfo": 'echo "n1|16|gpu:4"',
    "sbatch": "touch {folder}/job; echo 17",
    "squeue": """[ ! -e {folder}/away ] || {{ echo 'error: Unable to contact slurm controller' >&2; exit 1; }}
[ ! -e {folder}/job ] || case "$*" in *--jobs=17*) echo 'RUNNING|None' ;; *) echo RUNNING ;; esac""",
    "scancel": "rm {folder}/job",
    "scontrol": "printf 'JobId=17\\n     Nodes=n1 CPU_IDs=0-3 Mem=0 GRES=gpu:1(IDX:2)\\n'",
}


@pytest.mark.slow
def test_a_controller_that_is_away_at_the_end_of_a_lease_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name, script in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script.format(folder=tmp_path)}\n")
        (tmp_path / name).chmod(0o755)
    folder = RunFolder(tmp_path / "run")
    folder.logs.mkdir(parents=True)
    config = load_recipe(
        RECIPE, ["pools.kind=slurm", "pools.inference_gpus=1", "pools.training_gpus=1", "transport.kind=mooncake"]
    )
    opened = OpenRun(config, folder, Owner("run", folder.logs))

    @flow
    def run() -> list[str]:
        with pools.lease(opened, "inference") as (pool,):
            (tmp_path / "away").touch()
        return list(pool.gpus)

    with prefect_test_harness(server_startup_timeout=120):
        assert run() == ["n1:2"]


def test_generators_get_no_more_of_a_shared_pool_than_the_recipe_gives_them(tmp_path: Path) -> None:
    specs = [PoolSpec("inference", 1), PoolSpec("training", 3)]
    (shared,) = LocalPools(("a", "b", "c"), tmp_path).acquire(specs[1:], Owner("run", tmp_path))
    with pools.pools_of_roles([shared], specs) as (inference, training):
        assert (inference.gpus, training.gpus) == (("a",), ("a", "b", "c"))
        process = inference.launch("generator", ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES; sleep 600"], index=0)
        while not (printed := process.new_lines()):
            assert process.poll() is None
    assert printed == ["a"]
    assert process.poll() is not None, "it is stopped before its GPUs are given back"
    with pools.pools_of_roles([inference, training], specs) as apart:
        assert list(apart) == [inference, training]


def test_workers_that_divide_a_machine_have_queues_of_their_own() -> None:
    assert pools.gpu_queue(["GPU-a", "GPU-b"]) == pools.gpu_queue(["GPU-b", "GPU-a"])
    assert pools.gpu_queue(["GPU-a", "GPU-b"]) != pools.gpu_queue(["GPU-c"])


@pytest.mark.parametrize(("status", "times", "raises"), [(422, 2, False), (422, 99, True), (404, 1, True)])
def test_a_limit_that_was_lowered_meanwhile_is_set_and_asked_for_again(
    status: int, times: int, raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, limits = iter([status] * times), list[int]()

    @contextmanager
    def concurrency(*_arguments: object, **_options: object) -> Iterator[None]:
        if code := next(answers, None):
            request = Request("POST", "http://server")
            raise ConcurrencySlotAcquisitionError from HTTPStatusError(
                "", request=request, response=Response(code, request=request)
            )
        yield

    monkeypatch.setattr(pools, "concurrency", concurrency)
    monkeypatch.setattr(pools, "LOOK_AGAIN_S", 0.05)
    monkeypatch.setattr(pools, "_set_limit", lambda _name, of: limits.append(of))
    if raises:
        with pytest.raises(ConcurrencySlotAcquisitionError), pools.occupy("gpus", 2, 4, wait_s=0.2):
            pass
    else:
        with pools.occupy("gpus", 2, 4, wait_s=5):
            pass
        assert limits == [4, 4, 4]
