"""Settings follow goodput, without gaps, and SGLang's own code takes them."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.files.run_folder import RunFolder
from infra.records.data_path import TargetRecord
from infra.records.goodput import ConfidenceFit, CostFit, GoodputTable, MeasuredGoodput, TreeGoodput
from infra.serving.versions import check_arguments
from infra.sglang.command import sglang_python
from models.config.dflash import DFlashConfig
from models.config.draft import parse_draft_config
from models.config.eagle3 import Eagle3Config
from models.config.medusa import MedusaConfig
from models.config.recipe import load_recipe
from models.decoding.goodput import FittedCosts, goodput_table, predict
from models.export.description import block_of
from models.export.serving_settings import (
    DRAFT_ATTENTION,
    DSPARK_CONFIDENCE,
    DSPARK_COSTS,
    NEAR,
    UNQUANTIZED_DRAFT,
    arguments_beside,
    dspark_confidence,
    dspark_costs,
    sglang,
    sglang_adaptive,
    spans,
    vllm,
    write_settings,
)
from models.run import RunWithTarget

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from scheduled_verification import ragged_seconds

RECIPES = Path(__file__).parents[3] / "recipes"
SHAPE = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "intermediate_size": 32}
EAGLE3, DFLASH = Eagle3Config(**SHAPE), DFlashConfig(block_size=4, **SHAPE)
MLA = Eagle3Config(num_heads=2, intermediate_size=32, mla={})
MTP = parse_draft_config({"method": "mtp", "family": "mimo", **SHAPE})
SGLANG = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams, resolve_candidate_steps_from_config

from sglang.srt.speculative.dspark_components.dspark_sps import load_sps_table_from_path
from sglang.srt.speculative.dspark_components.dspark_sts import load_sts_calibration_from_path

path, batches, commands = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
parsed = [vars(parser.parse_args(["--model-path", "target", *command])) for command in commands]
fields = ("algorithm", "num_steps", "eagle_topk", "num_draft_tokens", "adaptive", "draft_model_quantization")
fields += ("draft_attention_backend",)
params = AdaptiveSpeculativeParams(parsed[-1]["speculative_num_steps"], path)
table, sts = load_sps_table_from_path(sys.argv[4]), load_sts_calibration_from_path(sys.argv[5])
print(json.dumps({
    "steps": [table.step_time(num_reqs=batch, budget=3 * batch) for batch in (1, 4, 32)],
    "temperatures": sts.temperatures,
    "candidates": resolve_candidate_steps_from_config(path),
    "at": {batch: params._route(batch).candidate_steps for batch in batches},
    "parsed": [[each["speculative_" + field] for field in fields] for each in parsed],
}))
"""

amount = st.floats(1e-3, 1.0)
rate = st.floats(0.05, 0.95)


def costs(constant: float, per_token: float, knee: float = 0.0, beyond: float = 0.0) -> CostFit:
    return CostFit(
        constant=constant, per_text=0.0, per_token=per_token, knee=knee, per_token_beyond=beyond, several=0.0,
        several_per_text=0.0, together=0.002, per_position=0.0,
    )  # fmt: skip


def table(lookaheads=range(4), loads=(1, 4, 8, 32), rates=(0.6, 0.5, 0.4), draft=0.0) -> GoodputTable:
    """Beyond 16 tokens at once every token costs: by hand in `test_goodput`, 3 proposals up to 4 texts, then fewer."""
    fitted = FittedCosts(costs(1.0, 0.0, 16.0, 0.06), costs(0.0, draft))
    return goodput_table(fitted, rates, loads, tuple(lookaheads))


def run_of(folder: Path, *changes: str, dtype: str = "float32", **settings: object) -> RunWithTarget:
    """A run with an export that SGLang and vLLM serve; `settings`: of the target's `config.json`."""
    config = load_recipe(RECIPES / "tiny.yaml", list(changes))
    target = TargetRecord(
        name="t", path=str(folder / "target"), revision="rev", licence="none", hidden_size=8, num_layers=4,
        vocab_size=1024, model_type="qwen3",
    )  # fmt: skip
    run = RunWithTarget(RunFolder(folder), config, target)
    Path(target.path).mkdir()
    (Path(target.path) / "config.json").write_text(json.dumps(settings))
    block = block_of(config.draft, config.target.aux_layer_ids, 1024, served=True)
    run.folder.export.mkdir()
    exported = {"draftsmith": block, "dtype": dtype, "speculators_model_type": "eagle3"}
    (run.folder.export / "config.json").write_text(json.dumps(exported))
    return run


def measured(found: GoodputTable, main_load: int = 1) -> MeasuredGoodput:
    return MeasuredGoodput(
        main_load=main_load, draft=found, champion=None, target_times=(), draft_times=(), hardware="none"
    )


@given(
    fits=st.tuples(amount, amount, st.floats(1, 64), amount, amount),
    rates=st.lists(rate, min_size=1, max_size=6),
    loads=st.sets(st.integers(1, 40), min_size=1, max_size=4),
)
def test_every_number_of_texts_is_in_one_span_with_its_best_lookahead(fits, rates, loads):
    constant, per_token, knee, beyond, draft = fits
    fitted = FittedCosts(costs(constant, per_token, knee, beyond), costs(0.0, draft))
    found = goodput_table(fitted, rates, sorted(loads))
    held = spans(found)
    assert [batch for span in held for batch in range(span.first, span.last + 1)] == list(range(1, max(loads) + 1))
    for span in held:
        assert list(span.near) == sorted(set(span.near))
        assert span.best in span.near
        for batch in {span.first, span.last}:
            goodput = [predict(fitted, rates, batch, at).tokens_per_s for at in range(len(rates) + 1)]
            assert goodput[span.best] == max(goodput)
            assert all(goodput[at] >= (1 - NEAR) * max(goodput) for at in span.near)
    assert {batch: span.best for span in held for batch in loads if span.first <= batch <= span.last} == found.best
    told = vllm(found, "eagle3")
    assert (told is None) == (max(span.best for span in held) == 0)
    if told is not None:
        most = told["num_speculative_tokens"]
        ranges = told.get("num_speculative_tokens_per_batch_size", [[1, max(loads), most]])
        assert [first for first, _, _ in ranges] == [1, *(last + 1 for _, last, _ in ranges[:-1])]
        assert all(before[2] != after[2] for before, after in pairwise(ranges))
        assert most == max(lookahead for _, _, lookahead in ranges)


def test_vllm_by_hand():
    assert vllm(table(), "eagle3") == {
        "method": "eagle3",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 4, 3], [5, 6, 2], [7, 12, 1], [13, 32, 0]],
    }


def test_vllm_gets_no_table_where_one_number_is_best_everywhere():
    """For any table its first runner gives up full CUDA graphs."""
    assert vllm(table(loads=(1, 2)), "eagle3") == {"method": "eagle3", "num_speculative_tokens": 3}


def test_static_settings_are_for_the_main_load():
    first, high = (sglang(measured(table(), load), EAGLE3) for load in (1, 32))
    assert (first["load"], first["lookahead"], first["arguments"]) == (1, 3, EAGLE3.engine_arguments(3))
    assert (high["load"], high["lookahead"], high["arguments"]) == (32, 0, [])
    # SGLang has to begin with some proposals, and stops after the first steps.
    assert high["adaptive_arguments"] == [*EAGLE3.engine_arguments(1), "--speculative-adaptive"]


def test_trees_are_told_with_their_load_where_they_pay():
    """SGLang counts the last known token among the draft tokens."""
    at = {"depth": 4, "topk": 2, "tokens": 7, "tokens_per_step": 3.0, "step_s": 1.0}
    trees = (
        TreeGoodput(batch=1, tokens_per_s=3.0, without=2.5, **at),
        TreeGoodput(batch=4, tokens_per_s=9.0, without=10.0, **at),
    )
    found = measured(table()).model_copy(update={"trees": trees})
    (tree,) = sglang(found, EAGLE3)["trees"]
    assert (tree["load"], tree["gain"]) == (1, 0.2)
    assert tree["arguments"] == [
        "--speculative-algorithm", "EAGLE3", "--speculative-eagle-topk", "2",
        "--speculative-num-steps", "4", "--speculative-num-draft-tokens", "8",
    ]  # fmt: skip
    assert sglang(measured(table()), EAGLE3)["trees"] == []


def test_a_block_is_proposed_whole_or_not_at_all():
    found = table(DFLASH.lookaheads(7))
    assert found.best == {1: 3, 4: 3, 8: 3, 32: 0}
    told = sglang(measured(found), DFLASH)
    assert told["arguments"] == DFLASH.engine_arguments(3)
    assert DFLASH.dtype_arguments("bfloat16") == []
    other = sglang(measured(found), DFLASH, DFLASH.dtype_arguments("float16"))
    assert other["arguments"] == [*DFLASH.engine_arguments(3), "--dtype", "bfloat16"]
    assert told["adaptive_arguments"] is None
    assert sglang_adaptive(found, DFLASH) is None
    ranges = vllm(found, "dflash")["num_speculative_tokens_per_batch_size"]
    assert {lookahead for _, _, lookahead in ranges} == {0, 3}
    assert MedusaConfig(heads=3).lookaheads(7) == (0, 1, 2, 3)


def test_a_draft_that_never_pays_is_not_served():
    found = table(rates=(0.05, 0.05, 0.05), draft=0.5)
    assert set(found.best.values()) == {0}
    told = sglang(measured(found), EAGLE3)
    assert (told["arguments"], told["adaptive_arguments"]) == ([], None)
    assert vllm(found, "eagle3") is None


def test_sglangs_table_of_steps_is_what_our_scheduler_decides_by():
    target = CostFit(
        constant=1.0, per_text=0.02, per_token=0.03, knee=24.0, per_token_beyond=0.05, several=0.4,
        several_per_text=0.07, together=0.05, per_position=0.011,
    )  # fmt: skip
    fitted = FittedCosts(target, costs(0.3, 0.02))
    told = dspark_costs(measured(goodput_table(fitted, [0.6] * 7, (1, 4, 8), (0, 7))))
    for batch, of_batch in zip(told["bs_probes"], told["alpha_seconds"], strict=True):
        for total, of_tokens in zip(told["m_probes"], told["theta_seconds"], strict=True):
            ours = ragged_seconds(target, batch, total, 8) + fitted.draft.seconds(batch, 7)
            assert told["bias_seconds"] + of_batch + of_tokens == pytest.approx(ours)


@pytest.mark.parametrize(
    ("draft", "target", "own"),
    [
        (EAGLE3, {"num_key_value_heads": 2}, False),
        (EAGLE3, {"kv_lora_rank": 512}, True),
        (EAGLE3, {"text_config": {"kv_lora_rank": 512}}, True),
        (MLA, {"kv_lora_rank": 512}, False),
        (MLA, {"num_key_value_heads": 2}, True),
        (MLA, {"kv_lora_rank": 512, "index_topk": 2048}, True),
        (DFLASH, {"kv_lora_rank": 512}, False),
        (MTP, {"kv_lora_rank": 512, "index_topk": 2048}, False),
    ],
)
def test_an_eagle3_draft_with_other_attention_than_its_target_gets_kernels_of_its_own(draft, target, own, tmp_path):
    """SGLang resolves those of block drafts itself, and an MTP layer has its target's attention."""
    (tmp_path / "config.json").write_text(json.dumps(target))
    assert arguments_beside(tmp_path, draft, None) == (DRAFT_ATTENTION if own else [])
    assert arguments_beside(tmp_path, draft, "fp8", on_gpus=False) == UNQUANTIZED_DRAFT


def test_every_way_to_serve_says_what_follows_from_the_target(tmp_path):
    at = {"depth": 4, "topk": 2, "tokens": 7, "tokens_per_step": 3.0, "step_s": 1.0}
    tree = TreeGoodput(batch=1, tokens_per_s=3.0, without=2.5, **at)
    run = run_of(tmp_path, "generator.engine=sglang", "generator.sglang.quantization=fp8", kv_lora_rank=512)
    write_settings(run, measured(table()).model_copy(update={"trees": (tree,)}))
    told = json.loads((run.folder.export / "serving" / "sglang.json").read_text())
    for arguments in (told["arguments"], told["adaptive_arguments"], told["trees"][0]["arguments"]):
        assert " ".join([*UNQUANTIZED_DRAFT, *DRAFT_ATTENTION]) in " ".join(arguments)
        assert "--quantization" not in arguments, "the target's own is in the server's command"


@pytest.mark.parametrize("method", ["eagle3", "mtp", "dflash", "dflash2", "dspark", "domino"])
def test_servers_that_follow_take_every_argument_that_an_export_writes(method):
    """Those of a version from the registry are checked, and others refused."""
    shape = SHAPE | ({"layer_types": ["sliding_attention"], "sliding_window": 8} if method == "eagle3" else {})
    config = parse_draft_config({"method": method, **shape} | ({"family": "mimo"} if method == "mtp" else {}))
    always = [*UNQUANTIZED_DRAFT, *DRAFT_ATTENTION, *config.dtype_arguments("float16")]
    at = {"depth": 4, "topk": 2, "tokens": 7, "tokens_per_step": 3.0, "step_s": 1.0}
    trees = (TreeGoodput(batch=1, tokens_per_s=3.0, without=2.5, **at),) if method in ("eagle3", "mtp") else ()
    rates = (0.6,) * config.lookaheads(7)[-1]
    found = measured(table(config.lookaheads(7), rates=rates)).model_copy(update={"trees": trees})
    told = sglang(found, config, always)
    written = [told["arguments"], *(tree["arguments"] for tree in told["trees"]), told["adaptive_arguments"] or []]
    assert [*map(bool, written[:-1])] == [True] * (1 + len(trees))
    assert bool(written[-1]) == config.adaptive
    for arguments in written:
        assert check_arguments(arguments, "1") == tuple(arguments)


def test_a_draft_without_predicted_goodput_is_served_too(tmp_path):
    """Of a quantized target, or of one larger than a GPU."""
    run = run_of(tmp_path, "generator.engine=sglang", "generator.sglang.quantization=fp8", "benchmark.lookahead=3")
    arguments = [*run.config.draft.engine_arguments(3), *UNQUANTIZED_DRAFT]
    written = {path.name: json.loads(path.read_text()) for path in write_settings(run, None)}
    assert written == {
        "sglang.json": {"lookahead": 3, "arguments": arguments},
        "vllm.json": {"method": "eagle3", "num_speculative_tokens": 3},
    }


def test_a_draft_that_no_engine_serves_gets_no_settings(tmp_path):
    run = run_of(tmp_path, "draft={method: medusa}", "target.aux_layer_ids=[0]")
    settings = run.folder.export / "config.json"
    block = block_of(run.config.draft, (0,), 1024, served=False)
    settings.write_text(json.dumps({"draftsmith": block, "dtype": "float32"}))
    assert write_settings(run, None) == []


@pytest.mark.parametrize(("error", "offered"), [(0.07, True), (0.09, False)])
def test_confidences_of_something_else_are_not_offered(error, offered, tmp_path):
    """Beyond the error that exact ones would show."""
    run = run_of(tmp_path, "draft={method: dspark, num_heads: 2, num_kv_heads: 1, head_dim: 8, intermediate_size: 8}")
    errors = {"errors_before": (0.1,), "errors_after": (error,), "errors_by_chance": (0.03,)}
    fit = ConfidenceFit(temperatures=(1.0,), steps=200, **errors)
    found = measured(table((0, 7), rates=(0.6,) * 7)).model_copy(update={"confidence": fit})
    names = {path.name for path in write_settings(run, found)}
    assert (DSPARK_COSTS in names, DSPARK_CONFIDENCE in names) == (offered, offered)


@pytest.mark.timeout(300)
def test_sglang_reads_its_settings(tmp_path: Path, sglang_that_forks: None):
    """Its parser, its loader of adaptive configurations, its choice of a slot by texts at once."""
    found, path = table(), tmp_path / "sglang_adaptive.json"
    always = [*UNQUANTIZED_DRAFT, *DRAFT_ATTENTION]
    adaptive, told = sglang_adaptive(found, EAGLE3), sglang(measured(found), EAGLE3, always)
    path.write_text(json.dumps(adaptive))
    commands = [told["arguments"], told["adaptive_arguments"]]
    costs_path, confidence_path = tmp_path / "costs.json", tmp_path / "confidence.json"
    told_costs = measured(table(DFLASH.lookaheads(7)))
    costs_path.write_text(json.dumps(dspark_costs(told_costs)))
    fit = ConfidenceFit(temperatures=(1.5, 0.7), steps=9, errors_before=(0.1, 0.2), errors_after=(0.0, 0.1))
    confidence_path.write_text(json.dumps(dspark_confidence(fit)))
    arguments = [str(path), json.dumps(list(range(1, 65))), json.dumps(commands), str(costs_path), str(confidence_path)]
    done = subprocess.run(
        [sglang_python(), "-c", SGLANG, *arguments], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["parsed"] == [
        ["EAGLE3", 3, 1, 4, is_adaptive, "unquant", "flashinfer"] for is_adaptive in (False, True)
    ]
    fitted = FittedCosts(told_costs.draft.target, told_costs.draft.draft)
    assert said["steps"] == pytest.approx([fitted.seconds(batch, 3) for batch in (1, 4, 32)])
    assert said["temperatures"] == [1.5, 0.7]
    assert said["candidates"] == sorted({at for span in spans(found) for at in span.near})
    near = {batch: list(span.near) for span in spans(found) for batch in range(span.first, span.last + 1)}
    assert said["at"] == {str(batch): near[min(batch, 32)] for batch in range(1, 65)}
