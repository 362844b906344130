"""Tries a target's architecture at a small size before anything large is loaded.

The miniature has the target's own classes and layers of every kind, small random weights, and windows shorter than the
text. What capture and decoding rely on is checked: captured layers and logits are those that the model reports, a
forward with a cache equals one without, and two branches of a tree equal two texts.
"""

import copy
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from infra.refusal import Refusal
from models.targets.architecture import model_class
from models.targets.model import Placement, TargetModel

TOKENS, CACHED = 24, 16
"""Length of the text, and of the part of it that is in the cache."""
WINDOW = 8
TOLERANCE = 1e-2
LOUD = 0.15
SHARING = 2
"""Most layers with keys and values of earlier ones."""
MOST_PARAMETERS = 1_000_000_000
SMALL = {
    "vocab_size": 128,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "index_topk": WINDOW,
    "n_group": 1,
    "topk_group": 1,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "depth": 1,
}
"""Largest values of some settings."""


def rehearse(config: PretrainedConfig) -> None:
    """Raise Refusal, with the reason, unless the architecture can be captured and decoded."""
    name = (config.architectures or [config.model_type])[0]
    reasons = []
    # Some architectures tie their widths to one another in ways of their own: these keep them.
    for narrow in (True, False):
        try:
            _try(config, narrow)
        except Exception as error:  # noqa: BLE001 (whatever a model fails of is the reason)
            reasons.append(str(error) or type(error).__name__)
        else:
            return
    raise Refusal(
        f"the target's architecture {name} cannot be captured and decoded by transformers {version('transformers')}: a "
        f"small model of it fails ({reasons[-1]}); choose another target"
    )


def miniature(config: PretrainedConfig, narrow: bool) -> PretrainedConfig:
    """A small configuration with the same classes, head sizes and kinds of layers; `narrow`: and fewer heads."""
    small = copy.deepcopy(config)
    text = small.get_text_config()
    for part in {id(part): part for part in (small, text, getattr(small, "vision_config", None)) if part}.values():
        _limit(part, SMALL)
        _limit(part, {key: 64 for key in vars(part) if "intermediate_size" in key})
        part.pad_token_id = 0
        vars(part).pop("quantization_config", None)
        if hasattr(part, "initializer_range"):
            # With the usual 0.02 attention is nearly uniform, and what a token sees makes no difference.
            part.initializer_range = LOUD
    if (vision := getattr(small, "vision_config", None)) is not None:
        _limit(vision, {"num_hidden_layers": 1})
    _cut_layers(text)
    if not narrow:
        return small
    heads = text.num_attention_heads
    shared = getattr(text, "num_key_value_heads", None) or heads
    kept = min(2, shared)
    # Without its own setting a head's size is a share of the width, so the two shrink together.
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    text.num_attention_heads, text.num_key_value_heads = heads // shared * kept, kept
    text.hidden_size = size * text.num_attention_heads
    return small


def _limit(part: Any, most: dict[str, int]) -> None:
    for key, value in most.items():
        present = getattr(part, key, None)
        if isinstance(present, int) and present > value:
            setattr(part, key, value)


def _cut_layers(text: Any) -> None:
    """Keep the shortest run of first layers that has every kind of layer.

    Last layers that read the keys and values of earlier ones (Gemma 4) follow that run.
    """
    count = text.num_hidden_layers
    if shared := min(SHARING, getattr(text, "num_kv_shared_layers", None) or 0):
        text.num_kv_shared_layers = shared
    types = list(getattr(text, "layer_types", None) or [])
    kinds = [types.index(kind) + 1 for kind in set(types)]
    steps = [getattr(text, key, None) or 0 for key in ("interleave_moe_layer_step", "decoder_sparse_step")]
    kept = min(count, max(2, (getattr(text, "first_k_dense_replace", None) or 0) + 1, *kinds, *steps) + shared)
    text.num_hidden_layers = kept
    for key, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == count:
            setattr(text, key, value[:kept])
        elif isinstance(value, list) and value and all(isinstance(each, int) for each in value) and "layers" in key:
            setattr(text, key, [each for each in value if each < kept])


@torch.no_grad()
def _try(config: PretrainedConfig, narrow: bool) -> None:
    small = miniature(config, narrow)
    with torch.device("meta"):
        size = model_class(small).from_config(small).num_parameters()
    if size > MOST_PARAMETERS:
        raise ValueError(f"it has {size / 1e9:.1f} billion parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Not in the precision that the configuration names: errors of bfloat16 would be taken for the architecture's.
        model: Any = model_class(small).from_config(small, dtype=torch.float32)
    layers = model.config.get_text_config().num_hidden_layers
    target = TargetModel(model, range(layers))
    tokens = torch.randint(8, len(target.head_weight), (1, TOKENS), generator=torch.Generator().manual_seed(1))
    whole = target.forward(tokens)
    output = model(input_ids=tokens, output_hidden_states=True)
    reported = output.hidden_states
    # The last entry is the output after the final norm.
    expected = torch.cat(reported[1:layers], dim=-1)
    _compare("a captured layer is not what the model reports", whole.aux[..., : expected.shape[-1]], expected)
    _compare("the final states are not what the model reports", whole.last, reported[-1])
    _compare("its logits are scaled in a way of its own", target.logits(whole.last[0]), output.logits[0])
    cache = target.new_cache()
    parts = [target.forward(part, cache).last for part in tokens.split([CACHED, TOKENS - CACHED - 1, 1], dim=1)]
    _compare("a forward with a cache differs from one without", torch.cat(parts, dim=1), whole.last)
    if target.rewinds:
        _try_branches(target, tokens)


def _try_branches(target: TargetModel, tokens: Tensor) -> None:
    """Two tokens at the same position, after the same cached text."""
    cache, branches = target.new_cache(), torch.tensor([[9, 10]])
    target.forward(tokens[:, :CACHED], cache)
    columns = torch.arange(CACHED + 2).clamp(max=CACHED)[None]
    visible = torch.cat([torch.ones(2, CACHED, dtype=torch.bool), torch.eye(2, dtype=torch.bool)], dim=1)[None]
    together = target.forward(branches, cache, Placement(torch.full((1, 2), CACHED), visible, columns)).last[0]
    alone = [
        target.forward(torch.cat([tokens[:, :CACHED], each[None, None]], dim=1)).last[0, -1] for each in branches[0]
    ]
    _compare("branches of a tree differ from texts of their own", together, torch.stack(alone))


def _compare(what: str, states: Tensor, expected: Tensor) -> None:
    error = float(((states - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    if not error < TOLERANCE:
        raise ValueError(f"{what} (by {error:.2g}, relative)")
