"""How launchers of several machines meet, and what they refuse; threads stand for machines."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.data_plane.meeting import meet, open_meeting
from infra.files.run_folder import RunFolder
from infra.refusal import Refusal


def test_all_are_there_or_nobody_begins(tmp_path: Path) -> None:
    folder = open_meeting(RunFolder(tmp_path), "trainer")
    with ThreadPoolExecutor(3) as machines:
        met = list(machines.map(lambda index: meet(folder, "127.0.0.1", index, 3, 120.0), range(3)))
    assert [(one.index, one.machines, one.interface) for one in met] == [(index, 3, "lo") for index in range(3)]
    assert {one.store for one in met} == {str(folder / "store")}
    again = open_meeting(RunFolder(tmp_path), "trainer")
    assert [again] == list(folder.parent.iterdir())
    with pytest.raises(TimeoutError, match=rf"waited 0.2 s in {again} for the machines 0, 2"):
        meet(again, "127.0.0.1", 1, 3, 0.2)


def test_a_machine_that_does_not_see_the_run_folder_refuses(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=rf"{socket.gethostname()} does not see {tmp_path}/gone.*run folder.*share"):
        meet(tmp_path / "gone", "127.0.0.1", 0, 2)


def test_machines_do_not_meet_on_loopback(tmp_path: Path) -> None:
    folder = open_meeting(RunFolder(tmp_path), "trainer")
    (folder / "1").write_text("another-machine")
    with pytest.raises(Refusal, match=r"another-machine.* cannot meet on loopback: set transport\.address"):
        meet(folder, "127.0.0.1", 0, 2)


def test_an_address_that_is_not_reached_is_named(tmp_path: Path) -> None:
    folder = open_meeting(RunFolder(tmp_path), "trainer")
    with pytest.raises(Refusal, match=r"does not reach transport\.address=no\.such\.host\.invalid"):
        meet(folder, "no.such.host.invalid", 0, 2)
