"""What the pages of docs/ tell a person to write is taken as it stands."""

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

from infra.serving.config import FollowConfig
from models.config.recipe import as_recipe
from models.config.target_settings import LAYER_FIELDS

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^( *)```yaml\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
BLOCKS = [
    pytest.param(dedent(block), id=f"{page.name}-{number}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    for number, (_, block) in enumerate(BLOCK.findall(page.read_text()))
]


def test_the_pages_show_settings() -> None:
    assert len(BLOCKS) >= 6


@pytest.mark.parametrize("block", BLOCKS)
def test_settings_of_a_page_are_valid(block: str) -> None:
    shown = yaml.safe_load(block)
    if "servers" in shown:
        FollowConfig.model_validate(shown)
    else:
        as_recipe(beside_tiny(shown), "the page")


def beside_tiny(shown: dict[str, Any]) -> dict[str, Any]:
    """A recipe with these settings, whose target is on this machine."""
    tiny = yaml.safe_load((ROOT / "recipes" / "tiny.yaml").read_text())
    target = shown.get("target", {}) | {name: tiny["target"][name] for name in ("source", "name")}
    data = {"source": "conversations.jsonl"} | shown.get("data", {})
    tree = {key: tiny[key] for key in ("name", "draft")} | shown | {"target": tiny["target"] | target, "data": data}
    if tree["draft"]["method"] == "mtp":  # the page's target has such a layer
        tree["draft"] |= {"family": "mimo"} | {size: tiny["draft"][size] for size in LAYER_FIELDS}
    return tree
