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


@pytest.mark.parametrize("folder", ["/sys/kernel", "/sys/drafts", "notes.txt", "notes.txt/drafts"])
def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").touch()
    settings = Path("follower.yaml")
    settings.write_text(f"draft: a\nfolder: {folder}\nservers: [{{url: 'http://127.0.0.1:1', command: sleep}}]\n")
    with pytest.raises(Refusal, match=rf"`folder` of follower.yaml is .*{folder}, and nothing can be written there"):
        serve_follow(settings)
