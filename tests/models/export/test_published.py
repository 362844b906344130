"""Published drafts as the start of training: those that `speculators` saves, the authors' layout, and refusals."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorsConfig
from speculators.config import VerifierConfig
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.records.data_path import TargetRecord
from models.config.draft import DraftConfig, parse_draft_config
from models.config.recipe import RunConfig
from models.drafts.eagle3.module import Eagle3Draft
from models.drafts.vocabulary import DraftVocabulary
from models.export.description import read_description
from models.export.published import default_layers, import_start, load_published, main
from models.export.published_settings import read_published
from models.export.sglang import load_draft

HIDDEN, VOCABULARY, DRAFT_VOCABULARY, TARGET_LAYERS, LENGTH = 24, 60, 32, 8, 15
SIZES = {"hidden_size": HIDDEN, "intermediate_size": 40, "vocab_size": VOCABULARY, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "rope_theta": 50_000.0, "attention_bias": False}
OURS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 40, "rope_theta": 50_000.0}
AUTHORS = SIZES | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCABULARY}
AUTHORS |= {"model_type": "llama", "num_hidden_layers": 1}
LONG = {"original_max_position_embeddings": 64}
EAGLE3 = parse_draft_config(OURS | {"method": "eagle3", "vocab_size": DRAFT_VOCABULARY, "ttt_steps": 2})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetRecord:
    """Head and embeddings of its own."""
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(1)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=TARGET_LAYERS, **sizes)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return TargetRecord(
        name="target", path=str(folder), revision="r", model_type="llama", hidden_size=HIDDEN,
        num_layers=TARGET_LAYERS, vocab_size=VOCABULARY, licence="none",
    )  # fmt: skip


def published_by_speculators(target: TargetRecord, folder: Path, method: str, **changes: Any) -> Any:
    """Made and saved by the package, with random weights."""
    torch.manual_seed(2)
    verifier = VerifierConfig.from_pretrained(target.path)
    ways = GreedyTokenProposalConfig(speculative_tokens=3)
    described = SpeculatorsConfig(
        algorithm=method, proposal_methods=[ways], default_proposal_method="greedy", verifier=verifier
    )
    if method == "eagle3":
        layer: Any = LlamaConfig(num_hidden_layers=1, mlp_bias=False, **SIZES)
        settings: Any = {"draft_vocab_size": DRAFT_VOCABULARY, "eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
        kinds: Any = (Eagle3SpeculatorConfig, Eagle3DraftModel)
    else:
        layer = Qwen3Config(num_hidden_layers=2, **SIZES)
        settings = {"draft_vocab_size": VOCABULARY, "aux_hidden_state_layer_ids": [1, 3, 6], "block_size": 4}
        settings |= {"mask_token_id": 11}
        kinds = (DFlashSpeculatorConfig, DFlashDraftModel)
    layer._attn_implementation = "eager"
    model = kinds[1](kinds[0](transformer_layer_config=layer, speculators_config=described, **(settings | changes)))
    for name, parameter in model.named_parameters():
        if name not in ("embed_tokens.weight", "verifier_lm_head.weight"):
            torch.nn.init.normal_(parameter, float("norm" in name), 0.3)
    if method == "eagle3":
        ids = torch.randperm(VOCABULARY)[:DRAFT_VOCABULARY].sort().values
        vocabulary = DraftVocabulary(ids, VOCABULARY)
        model.load_vocab_mappings(vocabulary.t2d, vocabulary.d2t)
    model.load_verifier_weights()
    model.save_pretrained(folder)
    return model.eval()


def eagle3_logits(model: Any, tokens: Tensor, aux: Tensor) -> list[Tensor]:
    """What the package's class says in two steps."""
    said: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: said.append(output[0]))
    documents = torch.zeros(1, LENGTH, dtype=torch.long)
    with torch.no_grad():
        model(hidden_states=aux[None], input_ids=tokens[None, 1:], document_ids=documents, ttt_steps=2)
    return said


@pytest.mark.parametrize("norms", [{}, {"fc_norm": True, "norm_output": True}, {"norm_before_fc": True}], ids=str)
def test_a_draft_that_speculators_saved_says_here_what_it_says_there(norms, target, tmp_path):
    model = published_by_speculators(target, tmp_path / "published", "eagle3", **norms)
    draft = load_published(tmp_path / "published", EAGLE3, target)
    assert isinstance(draft, Eagle3Draft)
    assert draft.aux_layer_ids == (0, 2, 5)
    assert draft.config.ttt_steps == 2, "how it is trained is the recipe's"
    tokens, aux = torch.randint(VOCABULARY, (LENGTH + 1,)), torch.randn(LENGTH, 3 * HIDDEN)
    following = torch.cat([tokens[2:], torch.zeros(1, dtype=torch.long)])
    ours = draft.unroll(tokens[1:], aux, [LENGTH], 2, lambda _step, _normed: following)
    for mine, theirs in zip(ours, eagle3_logits(model, tokens, aux), strict=True):
        assert (draft.logits(mine) - theirs).abs().max() < 1e-4


def test_a_start_is_an_export_like_ours(target, tmp_path):
    """Of `speculators`' DFlash; and an export of ours is taken as it is."""
    knobs = OURS | {"method": "dflash", "block_size": 4, "layer_types": ["full_attention"] * 2, "mask_token_id": 11}
    recipe = {"name": "r", "target": {"name": target.path, "aux_layer_ids": [0, 2, 5]}, "draft": knobs}
    model = published_by_speculators(target, tmp_path / "published", "dflash")
    said = import_start(str(tmp_path / "published"), RunConfig.model_validate(recipe), target, tmp_path / "start")
    assert "60 tokens" in said
    draft = load_draft(tmp_path / "start", Path(target.path), torch.float32)
    assert draft.config == parse_draft_config(knobs)
    theirs = model.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in draft.state_dict().items())
    assert "Draftsmith" in import_start(
        str(tmp_path / "start"), RunConfig.model_validate(recipe), target, tmp_path / "2"
    )
    assert load_file(tmp_path / "2" / "model.safetensors").keys() == draft.state_dict().keys()


@pytest.fixture
def authors(target: TargetRecord, tmp_path: Path) -> Path:
    """In the authors' layout: `midlayer`, embeddings in bfloat16 that are the target's, no layer ids."""
    published_by_speculators(target, tmp_path / "saved", "eagle3")
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    renamed["embed_tokens.weight"] = renamed["embed_tokens.weight"].bfloat16()
    folder = tmp_path / "authors"
    folder.mkdir()
    save_file(renamed, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(AUTHORS))
    return folder


def test_the_authors_layout_is_read(authors, target):
    draft = load_published(authors, EAGLE3, target)
    stored = load_file(authors / "model.safetensors")
    assert torch.equal(draft.state_dict()["layers.0.mlp.up_proj.weight"], stored["midlayer.mlp.up_proj.weight"])
    assert draft.aux_layer_ids == default_layers(TARGET_LAYERS) == (1, 3, 4)
    assert not draft.config.train_embeddings
    assert torch.equal(draft.vocabulary.d2t, stored["d2t"])


def changed(authors: Path, **tensors: Tensor | None) -> None:
    stored: dict[str, Any] = load_file(authors / "model.safetensors") | tensors
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, authors / "model.safetensors")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"d2t": None}, "has no map d2t"),
        ({"d2t": torch.zeros(DRAFT_VOCABULARY, dtype=torch.long) - 1}, "d2t is damaged"),
        ({"d2t": torch.zeros(31, dtype=torch.long)}, "31 tokens, its draft_vocab_size is 32"),
        ({"t2d": torch.zeros(VOCABULARY, dtype=torch.bool)}, "contradict"),
        ({"norm.weight": None}, "tensors: norm.weight"),
        ({"aux_norm_low.weight": torch.ones(HIDDEN)}, "tensors: fc_norm.0.weight"),
        ({"fc.weight": torch.ones(HIDDEN, 2 * HIDDEN)}, "tensors: fc.weight"),
    ],
    ids=["no map", "damaged map", "short map", "two maps", "missing", "unknown", "misshapen"],
)
def test_weights_that_do_not_fit_are_refused(tensors, message, authors, target):
    changed(authors, **tensors)
    with pytest.raises(ValueError, match=message):
        load_published(authors, EAGLE3, target)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 48}, "its hidden_size is 48, the target's 24"),
        ({"vocab_size": 61}, "its vocab_size is 61, the target's 60"),
        ({"target_hidden_size": 48}, "its target_hidden_size is 48, the target's 24"),
        ({"num_hidden_layers": 2}, "tensors: layers.1"),
        ({"attention_bias": True}, "tensors: .*q_proj.bias"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "factor is .*Field required"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3]}}, "mrope_section"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 9]}}, r"has 14 pairs, and \d of a head"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5} | LONG},
            "attention_factor is 1.5",
        ),
        ({"layer_types": ["sliding_attention"], "sliding_window": None}, "contradict"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 9, "use_sliding_window": False}, "contradict"),
        ({"layer_types": ["full_attention"] * 2}, "of 2 layers, its num_hidden_layers is 1"),
        (
            {"layer_types": ["chunked_attention"]},
            r"layer_types\.0 is 'chunked_attention': Input should be 'full_attention' or 'sliding_attention'",
        ),
        ({"use_sliding_window": True, "sliding_window": 9}, "which layers slide"),
        ({"logit_scale": 0.5}, "its logit_scale is 0.5, drafts here have 1.0"),
        ({"use_last_layernorm": False}, "its use_last_layernorm is False, drafts here have True"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"tie_word_embeddings": True, "draft_vocab_size": VOCABULARY}, "its head is its embeddings"),
        ({"parallel_drafting": True}, "parallel_drafting is True"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "its quantization_config is .* a setting that drafts here do not",
        ),
        (
            {"eagle_config": {"use_input_layernorm_in_first_layer": False}},
            r"eagle_config\.use_input_layernorm_in_first_layer",
        ),
        ({"some_new_switch": False}, "its some_new_switch is False, a setting that drafts here do not have"),
        ({"norm_before_residual": "twice", "rope_theta": "much"}, "damaged or incomplete"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9]}}, "the target has 0..7"),
        ({"architectures": ["Other"]}, "none that can be taken over"),
        ({"speculators_model_type": "mtp"}, "'mtp' cannot be taken over"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message, authors, target):
    (authors / "config.json").write_text(json.dumps(AUTHORS | settings))
    with pytest.raises(ValueError, match=message):
        load_published(authors, EAGLE3, target)


def test_what_is_no_draft_is_refused_with_the_setting_that_named_it(authors, target, tmp_path):
    medusa: DraftConfig = parse_draft_config({"method": "medusa", "vocab_size": DRAFT_VOCABULARY})
    with pytest.raises(ValueError, match=r"its method is eagle3, the recipe's draft\.method medusa"):
        load_published(authors, medusa, target)
    recipe = {"name": "r", "target": {"name": target.path, "aux_layer_ids": [0]}, "draft": EAGLE3.model_dump()}
    config = RunConfig.model_validate(recipe)
    with pytest.raises(ValueError, match=r"training\.start_from: there is no folder .*/no-folder"):
        import_start(str(tmp_path / "no-folder"), config, target, tmp_path / "start")
    for file, cut in (("model.safetensors", 2000), ("config.json", 20)):
        content = (authors / file).read_bytes()
        (authors / file).write_bytes(content[:cut])
        with pytest.raises(ValueError, match=rf"training\.start_from=.* cannot start .*{file} is .*damaged \("):
            import_start(str(authors), config, target, tmp_path / "start")
        (authors / file).write_bytes(content)
    (authors / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"training\.start_from=.*neither model\.safetensors nor pytorch_model\.bin"):
        import_start(str(authors), config, target, tmp_path / "start")
    assert not (tmp_path / "start").exists()


class Dangerous:
    """Unpickled carelessly, it makes a folder."""

    def __init__(self, place: Path):
        self.place = place

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.place),)


def test_a_file_of_pytorchs_is_read_as_tensors_only(authors, target, tmp_path):
    tensors = load_file(authors / "model.safetensors")
    (authors / "model.safetensors").unlink()
    file = authors / "pytorch_model.bin"
    for content in (tensors | {"extra": Dangerous(tmp_path / "ran")}, tensors | {"extra": 1}, [1, 2]):
        torch.save(content, file)
        with pytest.raises(ValueError, match=r"holds more than tensors|no mapping of names to tensors"):
            load_published(authors, EAGLE3, target)
    assert not (tmp_path / "ran").exists()
    torch.save(tensors, file)
    assert isinstance(load_published(authors, EAGLE3, target), Eagle3Draft)
    file.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ValueError, match="is damaged"):
        load_published(authors, EAGLE3, target)


DFLASH = {name: value for name, value in AUTHORS.items() if name != "draft_vocab_size"}
DFLASH |= {"architectures": ["DFlashDraftModel"], "block_size": 4}
DFLASH |= {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1]}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_swa": True}, "use_swa is True"),
        ({"use_gemma_norm": True}, "use_gemma_norm is True"),
        ({"is_causal": True}, "is_causal is True"),
        (
            {
                "is_causal": True,
                "sliding_window_non_causal": True,
                "layer_types": ["sliding_attention"],
                "sliding_window": 9,
            },
            "is_causal is True",
        ),
        ({"dflash_config": {"causal": True, "mask_token_id": 3}}, r"dflash_config\.causal is True"),
        ({"dflash_config": {"final_logit_softcapping": 30.0}}, r"dflash_config\.final_logit_softcapping is 30\.0"),
        ({"dflash_config": {"output_multiplier": 2.0}}, "output_multiplier is 2.0"),
        ({"dflash_config": {"conv_kernel_size": 2}}, "conv_kernel_size is 2"),
        ({"dflash_config": {"projector_type": "lilicorr"}}, "projector_type is 'lilicorr'"),
        (
            {"dflash_config": {"mask_token": "<mask>", "target_layer_ids": [1]}},
            "its mask_token is '<mask>'.*add the token's id",
        ),
        ({"dflash_config": {"mask_token_id": 3}}, "names no target_layer_ids"),
        (
            {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1], "new": 1}},
            r"dflash_config\.new is 1, a setting",
        ),
        ({"gating": "per_head"}, "gating is 'per_head', a setting"),
        ({"architectures": ["DFlash2BeamDraftModel"]}, "none that can be taken over"),
    ],
)
def test_settings_of_dflash_that_do_not_fit_are_refused(settings, message):
    assert read_published(DFLASH).shape["mask_token_id"] == 3
    with pytest.raises(ValueError, match=message):
        read_published(DFLASH | settings)


@pytest.mark.parametrize(
    "changes", [{"norm_before_residual": None}, {"speculators_model_type": "mtp"}, {"sample_from_anchor": True}]
)
def test_settings_of_speculators_that_do_not_fit_are_refused(changes):
    layer = SIZES | {"model_type": "qwen3", "num_hidden_layers": 1}
    theirs = {"speculators_model_type": "eagle3", "transformer_layer_config": layer, "draft_vocab_size": 32}
    theirs |= {"norm_before_residual": True}
    assert read_published(theirs).shape["qk_norm"]
    with pytest.raises(ValueError, match=f"its? .*{next(iter(changes))}"):
        read_published(theirs | changes)
    with pytest.raises(ValueError, match="model_type 'gemma3_text' is no layer"):
        read_published(theirs | {"transformer_layer_config": layer | {"model_type": "gemma3_text"}})


def test_two_names_of_one_norm_must_agree(target, tmp_path):
    """A later layer's first norm: SGLang reads one name, vLLM the other."""
    published_by_speculators(target, tmp_path / "published", "eagle3")
    tensors, norm = tmp_path / "published" / "model.safetensors", torch.ones(HIDDEN)
    later = {"layers.1.input_layernorm.weight": norm, "layers.1.hidden_norm.weight": norm + 1}
    save_file(load_file(tensors) | later, tensors)
    with pytest.raises(ValueError, match=r"layers\.1\.hidden_norm\.weight, which SGLang reads, and its .* differ"):
        load_published(tmp_path / "published", EAGLE3, target)


def test_the_command_writes_the_start_of_a_run(authors, target, tmp_path, monkeypatch, capsys):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    recipe = {"name": "r", "target": {"name": target.path, "aux_layer_ids": [0]}, "draft": EAGLE3.model_dump()}
    write_atomically(folder.config, RunConfig.model_validate(recipe | {"training": {"start_from": str(authors)}}))
    write_atomically(folder.target, target)
    monkeypatch.setattr("sys.argv", ["published", str(folder.path)])
    main()
    assert "with its vocabulary of 32 tokens" in capsys.readouterr().out
    assert read_description(folder.start).target_revision is None, "it says nothing of its target"


def test_embeddings_of_its_own_are_kept(authors, target):
    stored = load_file(authors / "model.safetensors")
    changed(authors, **{"embed_tokens.weight": stored["embed_tokens.weight"] + 1})
    assert load_published(authors, EAGLE3, target).config.train_embeddings


def test_layers_are_counted_as_each_layout_does():
    layer = SIZES | {"model_type": "llama", "num_hidden_layers": 1}
    theirs = {"speculators_model_type": "eagle3", "transformer_layer_config": layer, "draft_vocab_size": 32}
    theirs |= {"norm_before_residual": False}
    assert read_published(theirs | {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}).aux_layer_ids == (1, 3, 4)
    named = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}
    assert read_published(AUTHORS | named).aux_layer_ids == (2, 4, 5)
