"""Progress in a log, where there is no terminal."""

import re

import pytest

from models import progress_bars


def test_lines_estimate_what_is_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bars, "LINE_S", 0.0)
    with progress_bars.bars() as bar:
        advance = bar("documents", 100)
        advance(30)
        advance(70)
    assert re.fullmatch(r"documents: 30 of 100, about \d+\.\d s left\n", capsys.readouterr().out)
