"""Sampling as a target's generation_config.json says."""

import json
from pathlib import Path

import pytest

from models.benchmark.conditions import sampled_law
from models.config.benchmark import BenchmarkConfig
from models.drafts.sampling import Sampling
from models.targets.recommended import left_out, recommended_sampling


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, Sampling(0.6, 0.95, top_k=20)),
        ({"temperature": 0.6, "top_p": 0.9}, Sampling(0.6, 0.9)),
        ({"do_sample": False, "eos_token_id": 1}, Sampling(1.0)),
        ({"temperature": 0.0, "top_k": -1, "top_p": None}, Sampling(1.0)),
        (None, Sampling(1.0)),
    ],
)
def test_what_the_file_does_not_name_leaves_nothing_out(tmp_path: Path, found: dict | None, expected: Sampling) -> None:
    if found is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(found))
    assert recommended_sampling(tmp_path) == expected


@pytest.mark.parametrize(
    ("found", "named"),
    [
        ({"repetition_penalty": 1.05, "min_p": 0.1}, True),
        ({"repetition_penalty": 1.0, "min_p": 0.1}, False),
        ({}, False),
    ],
)
def test_a_repetition_penalty_is_told_of(tmp_path: Path, found: dict, named: bool) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(found))
    assert ("1.05" in (left_out(tmp_path) or "")) == named


def test_a_recipe_s_own_figures_come_first() -> None:
    makers = Sampling(0.6, 0.95, top_k=20)
    assert sampled_law(BenchmarkConfig(), makers) == makers
    changed = BenchmarkConfig(sampled_temperature=1.0, sampled_top_k=0)
    assert sampled_law(changed, makers) == Sampling(1.0, 0.95)
    assert sampled_law(BenchmarkConfig(sampled_top_p=1.0), makers) == Sampling(0.6, 1.0, top_k=20)
