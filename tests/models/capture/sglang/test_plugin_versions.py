"""Which of its hooks the plugin registers in which SGLang."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from models.capture.sglang.plugin import GEMMA3_LAYER, HOOKED, LOGITS, RUN_BATCH, SCHEDULER

REGISTRY = """
class HookType:
    AFTER = AROUND = None

class HookRegistry:
    @staticmethod
    def register(target, *_):
        print(target)
"""
REGISTER = "import sys; sys.path.insert(0, sys.argv[1]); from models.capture.sglang import plugin; plugin.register()"


@pytest.mark.parametrize(("version", "listens"), [(HOOKED, True), ("0.6.1", False)])
def test_a_server_of_another_version_serves_and_nothing_is_learned_from_it(
    tmp_path: Path, version: str, listens: bool
) -> None:
    for name, text in {
        "sglang/__init__.py": "",
        "sglang/srt/__init__.py": "",
        "sglang/srt/plugins/__init__.py": "",
        "sglang/srt/plugins/hook_registry.py": REGISTRY,
        f"sglang-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = os.environ | {"DRAFTSMITH_LIVE": str(tmp_path / "live.sock")}
    said = subprocess.run(
        [sys.executable, "-c", REGISTER, str(tmp_path)], env=environment,
        capture_output=True, text=True, check=True, timeout=300,
    ).stdout.splitlines()  # fmt: skip
    assert GEMMA3_LAYER in said
    assert {SCHEDULER, LOGITS, RUN_BATCH} & {*said} == ({SCHEDULER, LOGITS, RUN_BATCH} if listens else set())
    told = f"draftsmith: nothing is learned from this server: the plugin needs SGLang {HOOKED}, not {version}"
    assert (told in said) != listens
