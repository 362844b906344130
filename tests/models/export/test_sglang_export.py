"""The export's layout, its refusals, and the overfit gate: train on one text to the end, export, reload, decode."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from infra.files.atomic import write_atomically
from infra.records.data_path import SamplesRecord
from infra.refusal import Refusal
from infra.serving.servers import ServerClient
from infra.sglang.client import SGLangClient
from models.benchmark.harness_result import page
from models.benchmark.served import counts_of, setup_of, watch
from models.benchmark.standalone import bench
from models.config.bench_arguments import bench_parser
from models.config.benchmark import PromotionConfig
from models.data.encoded import EncodedSample
from models.data.sample_set import read_manifest, write_sample_set
from models.data.samples import Splits
from models.decoding.acceptance import AcceptedCounts
from models.decoding.plain import continue_greedily
from models.decoding.speculative import speculate
from models.export.sglang import MAPS, load_draft
from models.export.swap import changed_tensors, serialized
from models.run import PreparedRun
from models.targets.model import TargetModel

PRUNED = (
    "draft.vocab_size=1000", "draft.hidden_size=96", "draft.layer_types=[sliding_attention, sliding_attention]",
    "draft.sliding_window=12", "draft.partial_rotary_factor=0.5",
    "draft.rope_scaling={rope_type: llama3, factor: 8.0, original_max_position_embeddings: 64}", "training.epochs=8",
)  # fmt: skip
"""A draft of its own size with two sliding layers and the rotary embedding of another family."""
LOOKAHEAD, NEW_TOKENS, PROMPT_TOKENS, COPIES = 4, 80, 16, 120
LAYERS = (
    "num_heads: 4, num_kv_heads: 2, head_dim: 32, intermediate_size: 256, layer_types: [full_attention, full_attention]"
)
DFLASH = f"draft={{method: dflash, block_size: {LOOKAHEAD + 1}, anchors: 64, {LAYERS}}}"

DSPARK = f"draft={{method: dspark, block_size: {LOOKAHEAD}, markov_rank: 32, anchors: 128, {LAYERS}}}"

DFLASH2 = f"draft={{method: dflash2, block_size: {LOOKAHEAD + 1}, selector_rank: 32, anchors: 128, {LAYERS}}}"

DOMINO = (
    f"draft={{method: domino, block_size: {LOOKAHEAD + 1}, gru_hidden_dim: 32, emb_dim: 32, anchors: 128, {LAYERS}}}"
)


def one_continuation(run: PreparedRun, target: TargetModel) -> list[int]:
    """A held-out prompt and what the target makes of it, greedily."""
    prompt = run.open_samples("heldout")[3].tokens[:PROMPT_TOKENS].tolist()
    return prompt + list(continue_greedily(target, prompt, NEW_TOKENS, frozenset()))


def surely(model: Path, text: list[int], folder: Path) -> Path:
    """The model, tuned until it is sure of `text`, in bfloat16: two engines' roundings do not change what it says."""
    shutil.copytree(model, folder)
    tuned, tokens = AutoModelForCausalLM.from_pretrained(model), torch.tensor([text])
    optimizer = torch.optim.AdamW(tuned.parameters(), 1e-3)
    for _ in range(100):
        loss = tuned(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
    tuned.to(torch.bfloat16).save_pretrained(folder)
    return folder


def only_sample(run: PreparedRun, tokens: list[int]) -> SamplesRecord:
    """A sample set that holds one text, many times."""
    sample = EncodedSample(np.array(tokens, dtype=np.int32), np.ones(len(tokens), dtype=bool), "one")
    folder = run.folder.path / "samples"
    folder.mkdir()
    record = run.samples.model_copy(
        update={
            "path": str(folder),
            "train_samples": COPIES,
            "heldout_samples": 1,
            "train_tokens": COPIES * len(tokens),
            "longest": len(tokens),
        }
    )
    write_sample_set(folder, Splits([sample] * COPIES, [sample]), record)
    return read_manifest(folder).samples


@pytest.fixture
def overfit(make_run, run_to_the_end, start):
    """Trains a draft on one text that its bfloat16 target is sure of, and exports it; (run, target, the text)."""

    def train(*draft: str) -> tuple[PreparedRun, TargetModel, list[int]]:
        small = ("training.epochs=5", "training.samples_per_step=4", "training.heldout_steps=0", "data.max_tokens=64")
        folder = make_run("overfit", *small, *draft)
        run = PreparedRun.open(folder.path)
        layers = run.config.target.aux_layer_ids
        text = one_continuation(run, TargetModel.load(Path(run.target.path), layers, torch.float32))
        place = surely(Path(run.target.path), text, folder.path / "target")
        target = TargetModel.load(place, layers, torch.float32)
        write_atomically(folder.target, run.target.model_copy(update={"path": str(place)}))
        write_atomically(folder.samples, only_sample(run, text))
        run_to_the_end(folder)
        export = start("models.export.sglang", folder)
        output, _ = export.communicate(timeout=400)
        assert export.returncode == 0, output
        return PreparedRun.open(folder.path), target, text

    return train


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_overfit_draft_is_accepted_nearly_always_and_its_export_is_complete(overfit, tmp_path, monkeypatch):
    run, target, text = overfit(*PRUNED)
    monkeypatch.setenv("SGLANG_PLATFORM", "draftsmith_test_cpu")
    check_decoded(run, target, text)
    check_served(run, text, worsened(run.folder.export, tmp_path))
    check_bench(run, tmp_path, monkeypatch)
    check_layout(run.folder.export, run)
    check_refusals(run.folder.export, Path(run.target.path), tmp_path)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("draft", [DFLASH, DFLASH2, DOMINO, DSPARK], ids=["dflash", "dflash2", "domino", "dspark"])
def test_an_overfit_block_draft_is_accepted_nearly_always(overfit, tmp_path, monkeypatch, draft):
    run, target, text = overfit(draft, "training.samples_per_step=2", f"benchmark.lookahead={LOOKAHEAD}")
    monkeypatch.setenv("SGLANG_PLATFORM", "draftsmith_test_cpu")
    check_decoded(run, target, text)
    swapped = draft in (DFLASH, DFLASH2)
    check_served(run, text, worsened(run.folder.export, tmp_path) if swapped else None)
    if not swapped:
        with pytest.raises(Refusal, match="not known to be exact"):
            changed_tensors(run.folder.export, run.folder.export)
    if draft == DSPARK:
        check_wrong_layout(run, text)


def check_decoded(run: PreparedRun, target: TargetModel, text: list[int]) -> None:
    """The reference decoder's steps."""
    draft = load_draft(run.folder.export, Path(run.target.path), torch.float32)
    decoded = speculate(target, draft, text[:PROMPT_TOKENS], LOOKAHEAD, NEW_TOKENS, frozenset())
    assert list(decoded.tokens) == text[PROMPT_TOKENS:]
    assert decoded.counts.tokens / decoded.counts.steps >= 0.95 * (LOOKAHEAD + 1)


def check_served(run: PreparedRun, text: list[int], worse: Path | None) -> None:
    """The real engine, with its default data type, takes the same steps as the reference decoder in bfloat16.

    A server whose draft is swapped for a worse one accepts less, and after the swap back what it did.
    """
    place, export, dtype, prompt = Path(run.target.path), run.folder.export, torch.bfloat16, text[:PROMPT_TOKENS]
    stored = {name: tensor.dtype for name, tensor in load_file(export / "model.safetensors").items()}
    assert {stored[name] for name in stored.keys() - set(MAPS)} == {dtype}
    target = TargetModel.load(place, run.config.target.aux_layer_ids, dtype)
    ours = speculate(target, load_draft(export, place, dtype), prompt, LOOKAHEAD, NEW_TOKENS, frozenset())
    assert ours.counts.tokens / ours.counts.steps >= 0.9 * (LOOKAHEAD + 1)
    assert list(ours.tokens) == text[PROMPT_TOKENS:]
    sampling = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}

    def counts(client: SGLangClient) -> AcceptedCounts:
        answer = watch(client, prompt, sampling)
        assert answer.tokens == text[PROMPT_TOKENS:]
        return counts_of(answer, LOOKAHEAD, frozenset())

    with replace(setup_of(run), dtype="auto").serving(export, LOOKAHEAD) as client:
        assert counts(client) == ours.counts
        if worse:
            control = ServerClient(client.server.address)
            control.swap(serialized(changed_tensors(export, worse)), 1, "worse@1")
            assert counts(client).steps > ours.counts.steps
            control.swap(serialized(changed_tensors(worse, export)), 1, "draft@2")
            assert counts(client) == ours.counts


def worsened(export: Path, folder: Path) -> Path:
    """The same draft with noise in its weights."""
    worse = Path(shutil.copytree(export, folder / "worse"))
    tensors, noise = load_file(export / "model.safetensors"), torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.ndim == 2 and "embed" not in name:
            tensor.add_(tensor.float().std() * torch.randn(tensor.shape, generator=noise))
    save_file(tensors, worse / "model.safetensors")
    return worse


def check_wrong_layout(run: PreparedRun, text: list[int]) -> None:
    """With the flag of the other layout each row is taken for another token: served acceptance collapses.

    The gate refuses such a draft, because served and simulated acceptance are too far apart.
    """
    file, lengths, simulated = run.folder.export / "config.json", list[float](), LOOKAHEAD + 1
    right = file.read_text()
    wrong = json.loads(right) | {"sample_from_anchor": False}
    wrong["dflash_config"]["sample_from_anchor"] = False
    for content in (right, json.dumps(wrong)):
        file.write_text(content)
        sampling = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        with replace(setup_of(run), dtype="auto").serving(run.folder.export, LOOKAHEAD) as client:
            answer = watch(client, text[:PROMPT_TOKENS], sampling)
        assert answer.tokens == text[PROMPT_TOKENS:], "whatever is proposed, the text is the target's"
        counts = counts_of(answer, LOOKAHEAD, frozenset())
        lengths.append(counts.tokens / counts.steps)
    file.write_text(right)
    gaps = [abs(length / simulated - 1) for length in lengths]
    assert gaps[0] <= PromotionConfig().max_gap
    assert gaps[1] > 0.5 > PromotionConfig().max_gap


def check_bench(run: PreparedRun, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`draftsmith bench` tells the same of both engines; of a target that no device holds SGLang alone tells it."""
    prompts = folder / "prompts.jsonl"
    texts = ("Return a copy of the list in which " * 8, "The name of the file is the string that " * 8)
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = ["--target", run.target.path, "--draft", str(run.folder.export), "--prompts", str(prompts)]
    options += ["--dtype", "float32", "--baselines", "", "--batch", "", "--temperature", "0"]
    options += ["--num-prompts", "2", "--max-new-tokens", "24"]
    (ours,) = bench(bench_parser().parse_args(options)).cells
    assert ours.conditions.engine == "transformers"
    sysconf = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 1 if name == "SC_PHYS_PAGES" else sysconf(name))
    result = bench(bench_parser().parse_args(options))
    (engines,) = result.cells
    assert engines.conditions.engine.startswith("sglang 0.")
    assert (engines.length, engines.steps, engines.by_position) == (ours.length, ours.steps, ours.by_position)
    assert ours.mismatches == engines.mismatches == 0
    assert f"draft in {engines.conditions.engine}" in page(result)


def check_layout(export: Path, run: PreparedRun) -> None:
    """Names and shapes as SGLang 0.5.23's llama_eagle3.py and speculators 0.9.0 load them."""
    settings, tensors = json.loads((export / "config.json").read_text()), load_file(export / "model.safetensors")
    draft, target_hidden = run.config.draft, run.target.hidden_size
    hidden, queries, keys = draft.hidden_size, draft.num_heads * draft.head_dim, draft.num_kv_heads * draft.head_dim
    layers = {
        f"layers.{index}.{name}.weight": shape
        for index, wide in enumerate((2 * hidden, hidden))
        for name, shape in {
            "input_layernorm": (hidden,),
            "hidden_norm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, wide),
            "self_attn.k_proj": (keys, wide),
            "self_attn.v_proj": (keys, wide),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (draft.intermediate_size, hidden),
            "mlp.up_proj": (draft.intermediate_size, hidden),
            "mlp.down_proj": (hidden, draft.intermediate_size),
        }.items()
    }
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == layers | {
        "fc.weight": (hidden, 3 * target_hidden),
        **{f"fc_norm.{index}.weight": (target_hidden,) for index in range(3)},
        "embed_tokens.weight": (run.target.vocab_size, hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (draft.vocab_size, hidden),
        "d2t": (draft.vocab_size,),
        "t2d": (run.target.vocab_size,),
    }
    assert torch.equal(tensors["layers.1.hidden_norm.weight"], tensors["layers.1.input_layernorm.weight"])
    assert settings["fc_norm"] is True
    assert settings["architectures"] == ["LlamaForCausalLMEagle3"]
    assert settings["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(run.config.target.aux_layer_ids)
    assert settings["draftsmith"]["target_revision"] == run.target.revision


def check_refusals(export: Path, target: Path, folder: Path) -> None:
    tensors = load_file(export / "model.safetensors")
    settings = (export / "config.json").read_text()
    without = {name: tensor for name, tensor in tensors.items() if name != "norm.weight"}
    damaged = {
        "no vocabulary map": {name: tensor for name, tensor in tensors.items() if name != "d2t"},
        "misshapen tensors: norm.weight": without,
        "misshapen tensors: extra": tensors | {"extra": torch.zeros(2)},
        "misshapen tensors: fc.weight": tensors | {"fc.weight": tensors["fc.weight"][:, 1:].contiguous()},
        "ascending": tensors | {"d2t": -tensors["d2t"] - 1},
    }
    for number, (message, content) in enumerate(damaged.items()):
        place = folder / str(number)
        place.mkdir()
        (place / "config.json").write_text(settings)
        save_file(content, place / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            load_draft(place, target, torch.float32)
    with pytest.raises(ValueError, match="not an exported draft"):
        load_draft(folder, target, torch.float32)
