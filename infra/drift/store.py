"""Where the records of drafts' traffic are kept, with the samples of users' prompts that came with their alarms.

One JSON file per draft, in a folder or on S3, written whole: a reader sees the old record or the new one.
"""

import json
import stat
from fnmatch import fnmatch
from pathlib import Path

import fsspec

from infra.drift.traffic import DAY_S, TrafficRecord
from infra.files.atomic import write_atomically

PROMPTS = f"prompts-{'[0-9a-f]' * 12}.jsonl"
"""Names of samples of users' prompts: other files may be called `prompts-math.jsonl`."""
PRIVATE, SHARED = 0o600, 0o640


class TrafficStore:
    """A folder, or an address of S3, with traffic records and the prompts that came with their alarms."""

    def __init__(self, folder: str):
        self._files, root = fsspec.core.url_to_fs(folder)
        self._root = root.rstrip("/")
        self._local = "file" in self._files.protocol
        self._address = self._root if self._local else folder.rstrip("/")

    def read(self, draft: str) -> TrafficRecord:
        """The draft's record; empty if there is none yet."""
        # Another process may have written since this one listed the folder.
        self._files.invalidate_cache()
        try:
            return TrafficRecord.model_validate_json(self._files.cat_file(self._path(draft)))
        except FileNotFoundError:
            return TrafficRecord(draft=draft)

    def write(self, record: TrafficRecord) -> None:
        """Whole or not at all: a local file is renamed, an S3 object appears at its end."""
        data = json.dumps(record.model_dump(mode="json"), separators=(",", ":")).encode()
        if self._local:
            write_atomically(Path(self._path(record.draft)), data)
        else:
            self._files.pipe_file(self._path(record.draft), data)

    def keep_prompts(self, draft: str, sample: Path) -> str:
        """Move a sample of users' prompts beside the draft's record; its address, for a recipe's `data.source`.

        A local one is its owner's alone, and the group's to read where the folder hands its group on (`chmod g+s`).
        """
        name, data = sample.name, sample.read_bytes()
        if not self._local:
            self._files.pipe_file(f"{self._root}/{draft}/{name}", data)
            sample.unlink()
            return f"{self._address}/{draft}/{name}"
        kept = Path(self._root).absolute() / draft / name
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, data, SHARED if kept.parent.stat().st_mode & stat.S_ISGID else PRIVATE)
        if kept != sample.absolute():
            sample.unlink()
        return str(kept)

    def remove_prompts(self, draft: str, days: float, now: float) -> list[str]:
        """Remove the draft's samples of prompts that are older than `days`; their addresses."""
        self._files.invalidate_cache()
        gone = []
        for path in self._files.glob(f"{self._root}/{draft}/{PROMPTS}"):
            if now - self._files.modified(path).timestamp() > days * DAY_S:
                self._files.rm_file(path)
                gone.append(str(path))
        return gone

    def _path(self, draft: str) -> str:
        return f"{self._root}/{draft}/traffic.json"


def is_prompt_sample(source: str) -> bool:
    """Whether a recipe's `data.source` is a sample of users' prompts that came with an alarm, wherever it is kept."""
    return fnmatch(source.rpartition("/")[2], PROMPTS)


def prompts_are_gone(source: str) -> bool:
    """Whether a recipe's `data.source` is such a sample, and was removed since."""
    if not is_prompt_sample(source):
        return False
    files, path = fsspec.core.url_to_fs(source)
    return not files.exists(path)
