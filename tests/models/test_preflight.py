"""What preflight says of a run that can go on, and of targets and engines that do not fit."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from infra.doctor.cuda import WITHOUT_BFLOAT16
from infra.files.run_folder import RunFolder
from infra.pools.gpus import Gpu, Gpus
from infra.pools.local import LocalPools
from infra.records.data_path import TargetRecord
from infra.refusal import Refusal
from models import preflight
from models.capture.sglang.live import Live
from models.config.recipe import load_recipe
from models.preflight import check_live, check_settings
from models.run import RunWithTarget
from tests.models.capture.sglang.test_live import Recorder

TINY = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
DFLASH = (
    "draft={method: dflash, block_size: 4, anchors: 8, num_heads: 6, num_kv_heads: 3, head_dim: 32, "
    "intermediate_size: 64}"
)
pytestmark = pytest.mark.usefixtures("sglang_that_forks")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([], ""),
        (
            ["draft.qk_norm=true", "draft.attention_bias=true"],
            "SGLang does not serve a draft with attention_bias, qk_norm: it is exported for vLLM, and measured by the "
            "reference decoder\n",
        ),
        (
            ["draft.num_heads=5", "draft.num_kv_heads=1"],
            "SGLang does not serve a draft with num_heads that do not divide its hidden size: it is exported and "
            "measured by the reference decoder\n",
        ),
        (
            ["draft.fc_bias=true"],
            "SGLang does not serve a draft with fc_bias: it is exported and measured by the reference decoder\n",
        ),
        (
            ["draft={method: eagle3, num_heads: 2, intermediate_size: 16, mla: {q_lora_rank: null}, vocab_size: 512}"],
            "SGLang does not serve a draft with mla.q_lora_rank of null: it is exported and measured by the reference "
            "decoder\n",
        ),
    ],
)
def test_a_draft_that_sglang_does_not_serve_is_named_before_it_is_trained(changes, said, tmp_path, capsys):
    run = run_of("LlamaForCausalLM", {}, changes, tmp_path)
    capsys.readouterr()
    check_settings(run)
    assert capsys.readouterr().out == said


def test_a_scaling_of_positions_that_drafts_do_not_have_is_named(tmp_path, capsys):
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    run = run_of("LlamaForCausalLM", {"rope_parameters": rope}, ["generator.engine=transformers"], tmp_path)
    capsys.readouterr()
    check_settings(run)
    assert "the target scales positions by dynamic, which drafts do not have" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("Gemma4ForCausalLM", {"head_dim": 24, "global_head_dim": 24, "hidden_size_per_layer_input": 0}),
        ("KimiLinearForCausalLM", {}),
    ],
    ids=["a part of each head is rotated", "no positions at all"],
)
def test_of_a_target_whose_positions_are_not_scaled_nothing_is_said(architecture, settings, tmp_path, capsys):
    run = run_of(architecture, settings, ["generator.engine=transformers"], tmp_path)
    capsys.readouterr()
    check_settings(run)
    assert "scales positions" not in capsys.readouterr().out


WINDOW = {"sliding_window": 64}
GEMMA4 = {"head_dim": 24, "global_head_dim": 24, "hidden_size_per_layer_input": 0}


@pytest.mark.parametrize(
    ("architecture", "settings", "changes", "refused"),
    [
        (
            "Glm4ForCausalLM",
            {},
            [],
            r"SGLang [\d.]+ cannot capture hidden states of the target's architecture Glm4ForCausalLM, nor serve an "
            r"EAGLE-3 draft .*: set generator.engine=transformers",
        ),
        ("Qwen2MoeForCausalLM", {}, [], "serves no EAGLE-3 draft .* Qwen2MoeForCausalLM"),
        ("SmolLM3ForCausalLM", {}, [], "has no model class for .* SmolLM3ForCausalLM"),
        (
            *("Qwen2ForCausalLM", {}, [DFLASH, "benchmark.lookahead=3"]),
            "serves no DFlash draft for the target's architecture Qwen2ForCausalLM .*: set draft.method=eagle3",
        ),
        (
            *("Gemma4ForCausalLM", GEMMA4, [DFLASH, "benchmark.lookahead=3"]),
            r"DFlash .* Gemma4ForCausalLM \(its embedding scales rows, .*\): set draft.method=eagle3",
        ),
        ("Gemma4ForCausalLM", GEMMA4, [], None),
        (
            *("MistralForCausalLM", WINDOW, ["data.max_tokens=65"]),
            "MistralForCausalLM ignores the target's sliding window of 64 tokens, .*: set data.max_tokens to at most",
        ),
        ("MistralForCausalLM", WINDOW, ["data.max_tokens=64"], None),
        ("Gemma3ForCausalLM", WINDOW, ["data.max_tokens=65"], None),
    ],
)
def test_a_target_that_sglang_would_fail_on_is_refused_for_sglang_alone(
    architecture, settings, changes, refused, tmp_path
):
    run = run_of(architecture, settings, changes, tmp_path)
    with nullcontext() if refused is None else pytest.raises(Refusal, match=refused):
        check_settings(run)
    plain = run.config.model_copy(
        update={"generator": run.config.generator.model_copy(update={"engine": "transformers"})}
    )
    check_settings(RunWithTarget(run.folder, plain, run.target))


def test_an_environment_of_sglang_that_cannot_use_the_gpus_is_refused(tmp_path, monkeypatch):
    """The environment is the one for the CPU, where nothing is refused."""
    inventory = Gpus((Gpu("H100", 80 * 2**30, 79 * 2**30, capability=(9, 0)),), "580.1", 13)
    monkeypatch.setattr(preflight, "read_gpus", lambda: inventory)
    half = [f"{part}.compute_dtype=bfloat16" for part in ("generator", "benchmark")]
    run = run_of("LlamaForCausalLM", {}, ["pools.inference_gpus=1", *half], tmp_path)
    found = r"could not on these GPUs \(SGLang's torch: .*, CPU only, and this machine has 1 GPU.*`draftsmith doctor`"
    with pytest.raises(Refusal, match=found):
        check_settings(run)

    def broken() -> None:
        raise Refusal("a driver that does not answer")

    monkeypatch.setattr(preflight, "read_gpus", broken)
    check_settings(run_of("LlamaForCausalLM", {}, [], tmp_path / "cpu"))


T4, A100 = (Gpu(name, 2**34, 2**34, uuid=name, capability=kind) for name, kind in (("T4", (7, 5)), ("A100", (8, 0))))


@pytest.mark.parametrize(
    ("leasable", "changes", "refused"),
    [
        ((T4,), [], r"T4 \(compute capability 7.5\) .* of training.precision, .*, generator.compute_dtype: set"),
        (
            (T4,),
            ["generator.compute_dtype=float32"],
            r"the dtype of training\.precision: set training\.precision=float32",
        ),
        ((T4,), list(WITHOUT_BFLOAT16), None),
        ((T4,), ["pools.kind=ray", "transport.kind=files", "transport.folder=/nowhere"], None),
        ((T4, A100), [], None),
    ],
)
def test_a_run_in_bfloat16_on_gpus_without_it_is_refused(leasable, changes, refused, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "read_gpus", lambda: Gpus((T4, A100), "580.1", 13))
    monkeypatch.setattr(preflight, "LocalPools", lambda: LocalPools(tuple(gpu.uuid for gpu in leasable)))
    pools = ["pools.inference_gpus=1", "pools.training_gpus=1", "generator.engine=transformers"]
    silent = [f"{name}=null" for name in ("training.precision", "generator.compute_dtype", "benchmark.compute_dtype")]
    run = run_of("LlamaForCausalLM", {}, [*pools, *silent, *changes], tmp_path)
    with nullcontext() if refused is None else pytest.raises(Refusal, match=refused):
        check_settings(run)


def test_a_copy_on_gpus_that_do_not_divide_its_heads_is_refused(tmp_path):
    run = run_of("LlamaForCausalLM", {}, ["generator.sglang.tensor_parallel=3"], tmp_path)
    with pytest.raises(Refusal, match=r"SGLang cannot divide the target's \d+ attention heads .* among the 3 GPUs"):
        check_settings(run)


@pytest.mark.long
def test_a_class_that_this_machine_cannot_import_is_left_to_sglang(tmp_path, monkeypatch):
    monkeypatch.setenv("SGLANG_DISABLED_MODEL_ARCHS", "commandr")
    monkeypatch.delenv("DRAFTSMITH_SGLANG")  # read while SGLang is imported
    check_settings(run_of("CohereForCausalLM", {}, [], tmp_path))


def test_axes_that_the_target_does_not_have_are_refused(tmp_path):
    run = run_of("LlamaForCausalLM", {}, ["draft.mrope_section=[16, 0, 0]"], tmp_path)
    with pytest.raises(Refusal, match=r"draft\.mrope_section: the target counts positions along one axis"):
        check_settings(run)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        (["data.max_tokens=256", "benchmark.prompt_tokens=200", "benchmark.max_new_tokens=56"], None),
        (["data.max_tokens=257"], r"data\.max_tokens is 257, and the target's context ends at 256 tokens"),
        (
            ["benchmark.prompt_tokens=200", "benchmark.max_new_tokens=57"],
            r"benchmark\.prompt_tokens \+ benchmark\.max_new_tokens is 257, .* lower it",
        ),
        (["data.max_tokens=257", "generator.sglang.context_length=512"], None),
        (["benchmark.max_new_tokens=6"], None),
        (["benchmark.max_new_tokens=5"], r"all of benchmark\.lookahead=4 tokens are accepted needs 6: raise it"),
    ],
)
def test_text_that_is_too_long_or_too_short_is_refused(changes, refused, tmp_path):
    changes = [*changes, "generator.engine=transformers"]
    run = run_of("LlamaForCausalLM", {"max_position_embeddings": 256}, changes, tmp_path)
    with nullcontext() if refused is None else pytest.raises(Refusal, match=refused):
        check_settings(run)


def test_a_target_without_an_mtp_layer_is_refused_before_anything_is_captured(tmp_path):
    sizes = "num_heads: 2, num_kv_heads: 2, head_dim: 24, intermediate_size: 16"
    changes = [f"draft={{method: mtp, family: mimo, {sizes}}}", "target.aux_layer_ids=[]"]
    run = run_of("LlamaForCausalLM", {}, [*changes, "generator.engine=transformers"], tmp_path)
    with pytest.raises(Refusal, match=r"holds no MTP layer \(no tensor named model.mtp_layers.0.*choose another draft"):
        check_settings(run)


LIVE = (
    "generator.live={servers: [{address: 'http://127.0.0.1:1', socket: /nowhere/live.sock}], consent: users agreed, "
    "retention_days: 1}"
)


@pytest.mark.parametrize(
    ("vocabulary", "has_start", "message"),
    [
        (512, False, "no champion to start from, and 512 of the target's"),
        (512, True, "DRAFTSMITH_LIVE=/nowhere/live.sock"),
        ("null", False, "DRAFTSMITH_LIVE=/nowhere/live.sock"),
    ],
)
def test_a_run_that_cannot_learn_from_a_server_is_refused(vocabulary, has_start, message, tmp_path):
    changes = ["generator.engine=serving", LIVE, "data.source=live", "data.max_samples=64", "data.overlong=truncate"]
    changes += ["training.start_from=champion", f"draft.vocab_size={vocabulary}"]
    changes += ["generator.sglang.start_timeout_s=0.01"]
    run = run_of("LlamaForCausalLM", {}, changes, tmp_path)
    if has_start:
        run.folder.start.mkdir()
    with pytest.raises(Refusal, match=message):
        check_live(run)


def test_a_server_that_is_restarted_is_waited_for(tmp_path, path_in_memory, capsys):
    place = path_in_memory / "live.sock"  # a short path
    changes = ["generator.engine=serving", LIVE.replace("/nowhere/live.sock", str(place)), "data.source=live"]
    changes += ["data.max_samples=64", "data.overlong=truncate", "training.start_from=champion"]
    run = run_of("LlamaForCausalLM", {}, changes, tmp_path)
    with ThreadPoolExecutor(1) as threads:
        checked = threads.submit(check_live, run)
        while "waiting for the server" not in capsys.readouterr().out:
            assert not checked.done(), checked.result()
            time.sleep(0.01)
        server = Live(place, Recorder)
        checked.result(120)
    server.close()


def run_of(architecture: str, settings: dict[str, Any], changes: list[str], folder: Path) -> RunWithTarget:
    """A run with a tiny random target, before its samples are prepared."""
    kind = getattr(transformers, architecture)
    sizes = {"vocab_size": 600, "hidden_size": 48, "intermediate_size": 16, "num_hidden_layers": 3, "pad_token_id": 0}
    model = kind(kind.config_class(num_attention_heads=2, num_key_value_heads=2, **sizes, **settings))
    model.to(torch.bfloat16).save_pretrained(folder / "target")
    options = ["generator.engine=sglang", "benchmark.served_concurrency=[1]", "draft.vocab_size=null"]
    config, run = load_recipe(TINY, [*options, *changes]), RunFolder(folder / "run")
    run.path.mkdir()
    target = TargetRecord(
        name="t", path=str(folder / "target"), revision="2" * 40, hidden_size=48, num_layers=3, vocab_size=600,
        model_type=model.config.model_type, licence="x",
    )  # fmt: skip
    return RunWithTarget(run, config, target)


def test_rdma_is_asked_of_the_machines_that_hold_the_store(tmp_path, monkeypatch):
    """A cluster's head has often no RDMA device, where the machines with GPUs have some."""
    monkeypatch.setattr(preflight, "check_mooncake", lambda: None)
    rdma = ["transport.kind=mooncake", "transport.protocol=rdma", "generator.engine=transformers"]
    with pytest.raises(Refusal, match=r"transport\.protocol=rdma: no RDMA device"):
        check_settings(run_of("LlamaForCausalLM", {}, rdma, tmp_path / "here"))
    check_settings(run_of("LlamaForCausalLM", {}, [*rdma, "pools.kind=ray"], tmp_path / "cluster"))
