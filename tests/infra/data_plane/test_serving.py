"""Which parts of a pool a generator's command lines go to."""

import json
from collections.abc import Sequence
from pathlib import Path

from infra.data_plane.serving import HERE, ServerSpan, launch_serving
from infra.files.run_folder import RunFolder
from infra.pools.base import LocalCommand, Pool
from infra.processes.gang import Gang
from infra.processes.process import Owner
from infra.records.servers import ServerMachines


class NotedPool(Pool):
    """Notes what is placed where, and starts something that ends at once."""

    def __init__(self, folder: Path):
        super().__init__(Owner("run", folder / "logs"))
        self.placed: list[tuple[list[str], int, int | None]] = []

    def _place(self, command: Sequence[str], processes: int, index: int | None) -> LocalCommand:
        self.placed.append(([str(part) for part in command], processes, index))
        return LocalCommand(["true"], 1)


def test_a_server_on_one_machine_is_one_process(tmp_path: Path) -> None:
    pool = NotedPool(tmp_path)
    launch_serving(pool, RunFolder(tmp_path), "generator-1", ["serve"], HERE, processes=2, index=1).stop()
    assert pool.placed == [(["serve"], 2, 1)]


def test_the_machines_of_a_server_have_parts_side_by_side(tmp_path: Path) -> None:
    pool, folder = NotedPool(tmp_path), RunFolder(tmp_path)
    gang = launch_serving(pool, folder, "generator-1", ["serve"], ServerSpan(3, "10.0.0.1"), processes=2, index=1)
    assert isinstance(gang, Gang)
    gang.stop()
    assert [place for _, *place in pool.placed] == [[6, 3], [6, 4], [6, 5]]
    (env, told, command), *members = [line for line, *_ in pool.placed]
    assert (env, command) == ("env", "serve")
    name, _, described = told.partition("=")
    met = ServerMachines.model_validate_json(described)
    assert (name, met.count, met.address) == ("DRAFTSMITH_SERVER_MACHINES", 3, "10.0.0.1")
    assert met.meeting.is_dir()
    for number, line in enumerate(members, 1):
        assert line[1:5] == ["-m", "infra.sglang.member", str(tmp_path), str(number)]
        assert json.loads(line[5]) == json.loads(described)
    # Of a pool of its own it takes the first ones; at every start machines meet anew.
    launch_serving(pool, folder, "generator-1", ["serve"], ServerSpan(2, "10.0.0.1")).stop()
    assert [place for _, *place in pool.placed[3:]] == [[2, 0], [2, 1]]
    assert not met.meeting.exists()
