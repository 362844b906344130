"""The arena: every byte belongs to at most one object, whoever dies, and whatever fits is placed."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from infra.transport.arena import ArenaTransport, Extent, Extents, create_extents
from infra.transport.base import TransferError

CAPACITY = 1000
LIVING = "living"


class ArenaMachine(RuleBasedStateMachine):
    """Random allocations and deletions against a plain list of who has which byte."""

    @initialize()
    def start(self) -> None:
        self.folder = Path(os.environ["ARENA_TEST_FOLDER"]) / os.urandom(8).hex()
        self.folder.mkdir()
        create_extents(self.folder / "extents", CAPACITY)
        self.extents = Extents(self.folder / "extents")
        self.owner: list[str | None] = [None] * CAPACITY
        self.writing: set[str] = set()
        self.doomed: set[str] = set()
        self.serial = 0

    @rule(nbytes=st.integers(1, 400))
    def allocate(self, nbytes: int) -> None:
        self.serial += 1
        key = str(self.serial)
        found = self.extents.allocate(key, nbytes, LIVING)
        assert (found is None) == (self.owner.count(None) < nbytes)
        if found is None:
            return
        assert sum(length for _, length in found) == nbytes
        for start, length in found:
            assert self.owner[start : start + length] == [None] * length
            self.owner[start : start + length] = [key] * length
        self.writing.add(key)

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.writing)))
        self.writing.discard(key)
        assert self.extents.finish(key) == (key not in self.doomed)
        if key in self.doomed:
            self._forget(key)

    @precondition(lambda self: any(self.owner))
    @rule(data=st.data(), dead=st.booleans())
    def free(self, data: st.DataObject, dead: bool) -> None:
        key = data.draw(st.sampled_from(sorted({key for key in self.owner if key})))
        self.extents.free(key, lambda _writer: not dead)
        if key in self.writing and not dead:
            self.doomed.add(key)
        else:
            self.writing.discard(key)
            self._forget(key)

    def _forget(self, key: str) -> None:
        self.doomed.discard(key)
        self.owner = [None if owner == key else owner for owner in self.owner]

    @invariant()
    def whole_objects_are_found_where_they_lie(self) -> None:
        if not hasattr(self, "extents"):
            return
        there = {key for key in self.owner if key}
        assert set(self.extents.keys()) == there
        for key in there:
            where = self.extents.find(key)
            bytes_of_it = [at for at, owner in enumerate(self.owner) if owner == key]
            expected = [] if key in self.writing else bytes_of_it
            assert [at for start, length in where for at in range(start, start + length)] == expected

    def teardown(self) -> None:
        if hasattr(self, "extents"):
            self.extents.close()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARENA_TEST_FOLDER", str(tmp_path))


def test_every_byte_has_one_owner() -> None:
    machine = ArenaMachine.TestCase()
    machine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
    machine.runTest()


def test_what_fits_into_the_free_bytes_fits(tmp_path: Path) -> None:
    """Every second object is deleted; one of the size of all the holes lies in all of them."""
    transport = ArenaTransport(tmp_path / "arena", 10 * 4096)
    for index in range(10):
        transport.put(f"run/0/{index}/1", {"aux": bytes([index]) * 4096})
    for index in range(0, 10, 2):
        transport.delete(f"run/0/{index}/1")
    data = os.urandom(5 * 4096)
    record = transport.put("run/0/10/1", {"aux": data[:7000], "last": data[7000:]})
    assert record.location.count("+") == 5
    aux, last = bytearray(7000), bytearray(len(data) - 7000)
    transport.get(record, {"aux": memoryview(aux), "last": memoryview(last)})
    assert bytes(aux + last) == data
    transport.close()


def test_a_full_store_makes_its_writer_wait(tmp_path: Path) -> None:
    transport = ArenaTransport(tmp_path / "arena", 100)
    transport.put("run/0/0/1", {"aux": bytes(80)})
    later = threading.Timer(0.3, transport.delete, ["run/0/0/1"])
    begun = time.monotonic()
    later.start()
    transport.put("run/0/1/1", {"aux": bytes(80)})
    assert time.monotonic() - begun >= 0.3
    later.join()
    transport.close()


def test_the_wait_for_room_ends(tmp_path: Path) -> None:
    transport = ArenaTransport(tmp_path / "arena", 100, room_s=0.1)
    transport.put("run/0/0/1", {"aux": bytes(80)})
    with pytest.raises(TransferError, match=r"no room for run/0/1/1 \(80 bytes\) in the arena of 100 bytes"):
        transport.put("run/0/1/1", {"aux": bytes(80)})
    assert list(transport.keys()) == ["run/0/0/1"]
    transport.close()


def test_bytes_are_not_given_away_under_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease expired while it was writing: whoever deletes the object leaves it its bytes until it has finished."""
    slow, other = (ArenaTransport(tmp_path / "arena", 100, room_s=0.1) for _ in range(2))
    write = ArenaTransport._write

    def deleted_meanwhile(writer: ArenaTransport, extents: tuple[Extent, ...], start: int, view: memoryview) -> str:
        other.delete("run/0/0/1")
        with pytest.raises(TransferError, match="no room"):
            other.put("run/0/1/1", {"aux": bytes(80)})
        return write(writer, extents, start, view)

    monkeypatch.setattr(ArenaTransport, "_write", deleted_meanwhile)
    with pytest.raises(TransferError, match="was deleted while it was written"):
        slow.put("run/0/0/1", {"aux": bytes(80)})
    monkeypatch.setattr(ArenaTransport, "_write", write)
    assert list(slow.keys()) == []
    assert other.put("run/0/1/1", {"aux": bytes(80)}).nbytes == 80
    slow.close()
    other.close()


def test_a_write_that_breaks_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transport = ArenaTransport(tmp_path / "arena", 100, room_s=0.1)
    with monkeypatch.context() as patch:
        patch.setattr(ArenaTransport, "_write", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            transport.put("run/0/0/1", {"aux": bytes(80)})
    assert list(transport.keys()) == []
    assert transport.put("run/0/1/1", {"aux": bytes(100)}).nbytes == 100
    transport.close()


KILLED = """
import os, sys
from pathlib import Path
from infra.transport import arena
transport = arena.ArenaTransport(Path(sys.argv[1]), 100)
arena.ArenaTransport._write = lambda *_: os.kill(os.getpid(), 9)
transport.put("run/0/0/1", {"aux": bytes(80)})
"""


def test_what_a_killed_writer_held_is_given_back_when_it_is_deleted(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "arena")], timeout=120, check=False)
    assert ended.returncode == -9
    transport = ArenaTransport(tmp_path / "arena", 100, room_s=0.1)
    assert list(transport.keys()) == ["run/0/0/1"]  # for the sweeper, which asks the ledger
    transport.delete("run/0/0/1")
    assert transport.put("run/0/1/1", {"aux": bytes(100)}).nbytes == 100
    transport.close()


@pytest.mark.parametrize("lost", ["arena", "extents"])
def test_a_deleted_arena_is_noticed_and_made_anew(tmp_path: Path, lost: str) -> None:
    folder = tmp_path / "objects"
    writer, reader = ArenaTransport(folder, 2**20), ArenaTransport(folder, 2**20)
    record = writer.put("run/0/0/1", {"aux": b"x" * 100})
    for path in folder.glob(f"{lost}*"):
        path.unlink()
    for use in (
        lambda: writer.put("run/0/1/1", {"aux": b"y" * 100}),
        lambda: reader.get(record, {"aux": memoryview(bytearray(100))}),
    ):
        with pytest.raises(TransferError, match="deleted"):
            use()
    assert not reader.verify(record)
    # Restarted processes meet in a new arena; the others keep refusing.
    again, other = ArenaTransport(folder, 2**20), ArenaTransport(folder, 2**20)
    record, copy = again.put("run/0/2/1", {"aux": b"z" * 100}), bytearray(100)
    other.get(record, {"aux": memoryview(copy)})
    assert copy == b"z" * 100
    with pytest.raises(TransferError, match="deleted"):
        writer.put("run/0/3/1", {"aux": b"y" * 100})
    for transport in (writer, reader, again, other):
        transport.close()
