"""What the follower says of settings that are not there or wrong."""

from pathlib import Path

import pytest

from flows.follow_command import serve_follow
from infra.refusal import Refusal


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no follower's configuration at .*: give a YAML file, with draft, folder and servers"),
        ("draft: a\nsince: 2026-02-30\n", "is not valid YAML: correct it"),
        ("[" * 5000, "nested too deeply"),
        ("- draft", "is not valid; correct these settings"),
        ("draft: a\nfolder: f\n", "servers: Field required"),
    ],
)
def test_settings_that_are_wrong(tmp_path: Path, content: str | None, message: str) -> None:
    settings = tmp_path / "follower.yaml"
    if content is not None:
        settings.write_text(content)
    with pytest.raises(Refusal, match=message):
        serve_follow(settings)
