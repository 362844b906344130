"""What is old goes, what is in use stays, and a log that is cut keeps its writer."""

import os
import sys
import time
from pathlib import Path

from infra.files.cached_folder import build_once
from infra.files.locks import hold
from infra.files.private import keep_private, mark, mark_of
from infra.processes.process import Owner, start
from infra.run.retention import bound_logs, remove_old_prompts, remove_unused_cache


def make_old(path: Path, days: float) -> Path:
    then = time.time() - days * 86_400
    os.utime(path, (then, then))
    return path


def build(folder: Path, days: float) -> Path:
    build_once(folder, lambda aside: (aside / "data").write_text("x") and None)
    return make_old(folder, days)


def test_cached_folders_go_when_nobody_used_them_for_long(tmp_path: Path) -> None:
    unused, used, held = (build(tmp_path / "samples" / name, 61) for name in ("unused", "used", "held"))
    young = build(tmp_path / "targets" / "young", 59)
    answers = tmp_path / "regenerated" / "answers.jsonl"
    answers.parent.mkdir()
    make_old(answers.touch() or answers, 61)
    assert not build_once(used, lambda _aside: None)  # a run uses it
    with hold(held.with_name(".held.lock")):
        assert remove_unused_cache(tmp_path, 60) == [unused, answers]
    assert not unused.exists()
    assert used.exists()
    assert young.exists()
    assert remove_unused_cache(tmp_path, 60) == [held]


def test_an_interrupted_removal_is_finished(tmp_path: Path) -> None:
    (tmp_path / "sources" / ".old.removed").mkdir(parents=True)
    assert remove_unused_cache(tmp_path, 60) == []
    assert list((tmp_path / "sources").iterdir()) == []


def test_old_prompts_of_users_go_and_the_record_stays(tmp_path: Path) -> None:
    folder = tmp_path / "draft-a"
    folder.mkdir()
    old, new, record = (folder / name for name in ("prompts-1.jsonl", "prompts-2.jsonl", "prompts.json"))
    for file, days in ((old, 61), (new, 59), (record, 99)):
        make_old(file.touch() or file, days)
    assert remove_old_prompts(tmp_path, tmp_path / "cache", 60) == [old]
    assert sorted(folder.iterdir()) == [new, record]


def test_what_was_made_of_old_prompts_goes_with_them_however_recently_it_was_used(tmp_path: Path) -> None:
    old, young = (time.time() - days * 86_400 for days in (61, 59))
    made = {"samples/old": old, "sources/old": old, "samples/young": young, "samples/others": None}
    for name, since in made.items():
        build_once(tmp_path / name, lambda aside: (aside / "data").write_text("x") and None, private_since=since)
    for killed in (tmp_path / "samples" / ".old.parts", tmp_path / "samples" / ".other.building"):
        killed.mkdir()
        keep_private(killed, old)
    answers = tmp_path / "regenerated"
    answers.mkdir()
    for name, since in (("old", old), ("held", old), ("young", young)):
        mark(mark_of(answers / f"{name}.jsonl"), since)
        for suffix in ("jsonl", "refused.jsonl", "part"):
            (answers / f"{name}.{suffix}").touch()
    with hold(answers / "held.lock"):  # being generated
        gone = remove_old_prompts(tmp_path / "drift", tmp_path, 60)
    shown = sorted(str(path.relative_to(tmp_path)) for path in gone)
    assert shown == [
        "regenerated/old.jsonl",
        "samples/.old.parts",
        "samples/.other.building",
        "samples/old",
        "sources/old",
    ]
    assert {path.name for path in (tmp_path / "samples").iterdir() if path.suffix != ".lock"} == {"young", "others"}
    assert [path.name for path in answers.glob("old.*")] == ["old.lock"]
    assert len(list(answers.glob("young.*"))) == 4
    assert remove_old_prompts(tmp_path / "drift", tmp_path, 60) == [answers / "held.jsonl"]


def test_a_log_is_cut_while_its_process_writes_and_is_read(tmp_path: Path) -> None:
    """The writer goes on in the same file, and whoever follows the log sees its new lines."""
    script = "import sys\nprint('a' * 5000)\nsys.stdout.flush()\nopen(sys.argv[1] + '/ready', 'w').close()\n"
    script += "import os, time\nwhile not os.path.exists(sys.argv[1] + '/cut'): time.sleep(0.01)\nprint('after')\n"
    process = start("talker", [sys.executable, "-c", script, str(tmp_path)], Owner("test", tmp_path / "logs"))
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert process.new_lines() == ["a" * 5000]
        assert bound_logs([process.log], 1000) == [process.log]
        assert process.log.with_name("talker.log.1").read_text() == "a" * 999 + "\n"
        (tmp_path / "cut").touch()
        process.wait(120)
        assert process.new_lines() == ["after"]
        assert process.log.read_text() == "after\n"
        assert bound_logs([process.log], 1000) == []
    finally:
        process.stop()
