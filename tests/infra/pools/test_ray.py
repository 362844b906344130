"""Ray clusters that do not answer, or that are of another version."""

import socket
from importlib.util import find_spec
from pathlib import Path

import pytest

from infra.config import PoolsConfig
from infra.pools.base import PoolSpec
from infra.pools.queued import QueuedPools
from infra.processes.process import Owner

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


def config(port: int) -> PoolsConfig:
    return PoolsConfig.model_validate({"kind": "ray", "ray": {"address": f"127.0.0.2:{port}"}})


def test_an_address_where_nobody_listens_is_refused_and_there_is_nothing_to_release(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.2", 0))
        port = taken.getsockname()[1]
        pools, owner = QueuedPools(config(port), 60.0), Owner("run", tmp_path)
        with pytest.raises(ValueError, match=rf"^pools.ray.address=127.0.0.2:{port}: nobody answers there"):
            pools.acquire([PoolSpec("training", 1)], owner)
        pools.release("run")


def test_a_cluster_of_another_version_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    from infra.pools import ray_engine

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with: Ray: 2.50.0")

    monkeypatch.setattr(ray_engine.ray, "init", refuse)
    with socket.create_server(("127.0.0.2", 0)) as head:
        engine = ray_engine.RayEngine(config(head.getsockname()[1]))
        with pytest.raises(ValueError, match=r"no Ray cluster takes this machine \(Version mismatch.*2\.50\.0"):
            engine.withdraw("run")
