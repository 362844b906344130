"""What a server serves beside the draft: the target, its quantization, template and adapters.

A draft fits the target that it was trained for. When that changes under a draft, the draft is stale before any traffic
shows it. The registry cannot know; servers tell (`/server_info`, SGLang 0.5.23), and where the target's folder can be
read here, so do its files.
"""

import hashlib
import os.path
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from infra.records.data_path import Record

SAMPLED_BYTES, SAMPLES = 2**16, 16
"""Of each file of weights: its content is compared at some places, because all of it would take minutes."""
TEXTS = ("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json", "tokenizer_config.json")
NAMES = {
    "path": "target",
    "revision": "revision",
    "quantization": "quantization",
    "template": "chat template",
    "reasoning": "reasoning parser",
    "adapters": "adapters",
    "content": "files of the target",
}


class ReportedTarget(Record):
    """What a server told about its target at its start."""

    path: str
    revision: str = ""
    quantization: str = ""
    template: str = ""
    """The server's own: a name, or a file with its hash where it can be read."""
    reasoning: str = ""
    adapters: tuple[str, ...] = ()
    content: str = ""
    """Hash of the folder's texts and of samples of its weights; empty where it cannot be read here."""

    def changes_to(self, now: "ReportedTarget") -> str:
        """What is different now, in words; empty: nothing."""
        found = []
        for name, words in NAMES.items():
            before, after = getattr(self, name), getattr(now, name)
            if before == after or (name == "content" and not (before and after)):
                continue
            shown = [", ".join(one) if isinstance(one, tuple) else one for one in (before, after)]
            told = "changed" if name == "content" else f"{shown[0] or 'none'} -> {shown[1] or 'none'}"
            found.append(f"{words} {told}")
        return "; ".join(found)

    def is_another(self, other: "ReportedTarget") -> bool:
        """Whether a recipe that names one of them would not train for the other."""
        return (self.path, self.revision) != (other.path, other.revision)


def read_target(info: Mapping[str, Any]) -> ReportedTarget:
    """From the JSON of `/server_info`, without what only the folder tells."""
    adapters = info.get("lora_paths") or ()
    return ReportedTarget(
        path=str(info.get("model_path") or ""),
        revision=str(info.get("revision") or ""),
        quantization=str(info.get("quantization") or ""),
        template=_template(str(info.get("chat_template") or "")),
        reasoning=str(info.get("reasoning_parser") or ""),
        adapters=tuple(sorted(map(_adapter, adapters))),
    )


def _adapter(adapter: Any) -> str:
    """SGLang lists paths, NAME=PATH, or objects with both."""
    if isinstance(adapter, Mapping):
        return f"{adapter.get('lora_name')}={adapter.get('lora_path')}"
    return str(adapter)


def _template(name: str) -> str:
    file = Path(name)
    try:
        return f"{name} ({hashlib.sha256(file.read_bytes()).hexdigest()[:12]})" if name else ""
    except OSError:  # one of SGLang's own names, or a file of the server's machine
        return name


def with_content(target: ReportedTarget) -> ReportedTarget:
    """With the hash of the target's folder, if it can be read here."""
    folder = Path(target.path)
    if not target.path or not os.path.isdir(folder):  # Path.is_dir raises where this process may not enter
        return target
    try:
        return target.model_copy(update={"content": _sampled(folder)})
    except OSError:  # another user's files, or a folder that is being replaced
        return target


def _sampled(folder: Path) -> str:
    digest = hashlib.sha256()
    texts = (folder / name for name in TEXTS)
    for file in [*filter(Path.is_file, texts), *sorted(folder.glob("*.safetensors"))]:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            for sample in range(SAMPLES):
                content.seek(size * sample // SAMPLES)
                digest.update(content.read(SAMPLED_BYTES))
    return digest.hexdigest()[:16]
