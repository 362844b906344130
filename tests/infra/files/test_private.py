"""Who may read what was made of users' prompts."""

from pathlib import Path

import pytest

from infra.files.private import MARK, keep_private


@pytest.mark.parametrize(("above", "before", "after"), [(0o755, 0o755, 0o700), (0o2775, 0o2775, 0o2770)])
def test_others_are_kept_out_and_a_group_that_shares_the_folders_is_not(
    tmp_path: Path, above: int, before: int, after: int
) -> None:
    folder = tmp_path / "above" / "folder"
    folder.mkdir(parents=True)
    folder.parent.chmod(above)
    folder.chmod(before)
    keep_private(folder, 1e6)
    keep_private(folder, 2e6)  # used again
    assert folder.stat().st_mode & 0o7777 == after
    assert (folder / MARK).stat().st_mtime == 1e6
