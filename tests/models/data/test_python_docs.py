"""Python's own documentation as text: stable, without repeats, large enough to train on."""

import itertools

from models.data import python_docs


def test_documents_are_stable_distinct_and_many() -> None:
    first = dict(python_docs.documents())
    assert list(first.items())[:200] == list(itertools.islice(python_docs.documents(), 200))
    assert len(set(first.values())) > 1000
    assert sum(map(len, first.values())) > 1_500_000
    assert all(text.strip() for text in first.values())
    assert "topic booleans" in first
    text = "\n".join(first.values())
    assert "def json.dumps(obj, *, skipkeys=False" in text
    assert "class json.decoder.JSONDecodeError(ValueError)" in text


def test_tests_and_other_packages_are_left_out() -> None:
    parts = set(itertools.chain.from_iterable(path.parts for path in python_docs.standard_library()))
    assert not parts & {"site-packages", "test", "tests", "idlelib", "lib2to3"}
    assert {"json", "asyncio"} <= parts
    assert python_docs.source_hash() == python_docs.source_hash()
