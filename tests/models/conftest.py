"""The recipe of the tiny target and its samples, which later sessions take from the cache."""

from pathlib import Path

import pytest

from infra.records.data_path import SamplesRecord, TargetRecord
from models.config.recipe import RunConfig, load_recipe
from models.data.prepare import prepare_samples

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="session")
def tiny_config() -> RunConfig:
    return load_recipe(RECIPES / "tiny.yaml")


@pytest.fixture(scope="session")
def tiny_samples(tiny_config: RunConfig, tiny_target: TargetRecord) -> SamplesRecord:
    return prepare_samples(tiny_config.data, tiny_target, tiny_config.target.add_bos)
