"""Every setting has a description, and docs/settings.md shows all of them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from infra.drift.config import WatchConfig
from infra.refusal import Refusal
from infra.serving.config import FollowConfig
from models.config.draft import METHODS
from models.config.recipe import RunConfig, as_recipe
from models.config.reference import settings_page

CONFIGS = (RunConfig, WatchConfig, FollowConfig)
PAGE = Path(__file__).parents[3] / "docs" / "settings.md"


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def fields(config: type[BaseModel]) -> Iterator[tuple[str, str | None]]:
    for name, field in config.model_fields.items():
        yield f"{config.__name__}.{name}", field.description
        for section in models_in(field.annotation):
            yield from fields(section)


@pytest.mark.parametrize("config", CONFIGS)
def test_every_setting_has_a_description(config: type[BaseModel]) -> None:
    described = dict(fields(config))
    assert len(described) > 15
    assert not [name for name, description in described.items() if not description]


def test_the_page_of_settings_is_up_to_date() -> None:
    """`python -m models.config.reference > docs/settings.md` writes it."""
    assert PAGE.read_text() == settings_page()


def test_what_is_marked_as_required_has_to_be_written() -> None:
    recipe = {"name": "a", "target": {"source": "tiny", "name": "tiny"}}
    for method in METHODS:
        if method != "mtp":  # which the tiny target does not have
            as_recipe(recipe | {"draft": {"method": method}}, "here")
    as_recipe(recipe, "here")
    assert _marked("Recipe") == {"name": "required", "target": "required", "draft": "by the target"}
    assert _marked("`target`") == {"name": "required", "aux_layer_ids": "by the target"}
    assert not [method for method in METHODS if "required" in _marked(f"`draft (method: {method})`").values()]
    for missing in ("name", "target"):
        with pytest.raises(Refusal, match=missing):
            as_recipe({key: value for key, value in recipe.items() if key != missing}, "here")


def _marked(title: str) -> dict[str, str]:
    """The settings of a section that have no default, and what the page says in its place."""
    section = settings_page().split(f"\n## {title}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \|.*\| \*(required|by the target)\* \|", section, re.MULTILINE))


def test_the_page_shows_every_setting() -> None:
    shown = set(re.findall(r"^\| `(\w+)` \|", settings_page(), re.MULTILINE))
    names = {name.partition(".")[2] for config in CONFIGS for name, _ in fields(config)}
    assert shown == names
