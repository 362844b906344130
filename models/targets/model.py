"""The target in transformers, with a forward that also captures hidden states."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationConfig
from transformers.cache_utils import DummyLayer, DynamicLayer, DynamicSlidingWindowLayer

from infra.refusal import Refusal
from models.config.axes import AXES
from models.data.tokenizer import read_tokenizer
from models.targets.architecture import decoder_of, load_model, read_model_config
from models.targets.hidden_states import HiddenStates
from models.targets.streamed import load_streamed
from models.targets.weights import TargetHead, logit_shape

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
GENERATION_CONFIG, TOKENIZER_CONFIG = "generation_config.json", "tokenizer_config.json"


@dataclass(frozen=True)
class Placement:
    """Positions of the T new tokens of B rows, and which of the S + T columns (S cached, T new) they attend to.

    Each token sees at least itself, and nothing after it.
    """

    positions: Tensor
    """`[B, T]` int64 positions of the new tokens."""
    visible: Tensor
    """`[B, T, S + T]` bool, before sliding windows are applied."""
    columns: Tensor
    """`[B, S + T]` int64 position of each column's token; arbitrary if no token sees the column."""


class TargetModel:
    """A causal language model that captures K layer outputs and the output after the final norm.

    Args:
        model: the model.
        aux_layer_ids: the K layers, ascending.
        with_last: the output after the final norm is also the last part of `aux`.
        head: the target's head, where the model's own is not in memory.
    """

    def __init__(
        self,
        model: "transformers.PreTrainedModel",
        aux_layer_ids: Sequence[int],
        with_last: bool = False,
        head: TargetHead | None = None,
    ):
        self.model = model.eval()
        self.body: Any = decoder_of(model)
        # transformers 5.24 calls it `cache`; older versions, and models with code of their own, `past_key_values`.
        self._cache_argument = "cache" if "cache" in signature(self.body.forward).parameters else "past_key_values"
        self.head = _own_head(model) if head is None else head
        self.head_weight: Tensor = self.head.head
        self.aux_layer_ids, self.with_last = tuple(aux_layer_ids), with_last
        config = self.body.config
        window = getattr(config, "sliding_window", None)
        self._attention = set(getattr(config, "layer_types", None) or [SLIDING if window else FULL])
        kinds = {type(layer) for layer in self.new_cache().layers}
        self.rewinds = kinds <= {DynamicLayer, DummyLayer} and self._attention <= {FULL, SLIDING, CHUNKED}
        """Whether rejected tokens can be taken out of the cache: every layer keeps keys and values of all tokens."""
        self._captured: dict[int, Tensor] = {}
        layers = self.body.layers
        if max(self.aux_layer_ids, default=-1) >= len(layers):
            raise Refusal(
                f"target.aux_layer_ids {list(self.aux_layer_ids)}: the target has layers 0..{len(layers) - 1}"
            )
        for layer_id in self.aux_layer_ids:
            after = layers[layer_id + 1] if layer_id + 1 < len(layers) else self.body.norm
            after.register_forward_pre_hook(self._keep(layer_id), with_kwargs=True)

    @classmethod
    def load(
        cls,
        path: Path,
        aux_layer_ids: Sequence[int],
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        *,
        with_last: bool = False,
        sees: bool = False,
    ) -> "TargetModel":
        """Load from a local Hugging Face folder (safetensors). `sees`: it reads images."""
        return cls(load_model(path, dtype, device, sees), aux_layer_ids, with_last)

    @classmethod
    def streamed(
        cls, path: Path, aux_layer_ids: Sequence[int], dtype: torch.dtype, head: TargetHead, converted: Path
    ) -> "TargetModel":
        """On the CPU, with one module at a time in memory, beside `head`; see `load_streamed`."""
        return cls(load_streamed(path, dtype, converted), aux_layer_ids, head=head)

    def _keep(self, layer_id: int):
        """A hook on what reads a layer's output: Qwen3-VL adds parts of images between its first layers."""

        def hook(_module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._captured[layer_id] = inputs[0] if inputs else named["hidden_states"]

        return hook

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        cache: Cache | None = None,
        placement: Placement | None = None,
        seen: Mapping[str, Tensor] = MappingProxyType({}),
        *,
        embedded: bool = False,
    ) -> HiddenStates:
        """Run the decoder over `tokens` `[B, T]`, which follow the tokens in `cache`. `logits` computes logits.

        Without a placement the tokens are consecutive. With causal attention right padding does not affect earlier
        positions, so a right-padded batch needs no mask as long as padded positions are ignored.

        `seen`: what the model reads of images (`ImageProcessor.inputs`); without cache and placement. `embedded`:
        whether what the first layer reads is wanted, and the places.
        """
        self._captured.clear()
        placed: dict[str, Any] = {}
        if placement is not None:
            placed = {"attention_mask": self._masks(placement), "position_ids": placement.positions}
        if cache is not None:
            placed[self._cache_argument] = cache
        reader = self.body
        if seen:
            # The multimodal model around the decoder: it puts images where their tokens stand.
            assert cache is None
            assert placement is None
            reader, placed = self.model.base_model, dict(seen)
        entered = dict[str, Any]()
        with self._entering(entered) if embedded else nullcontext():
            output = reader(input_ids=tokens, use_cache=cache is not None, **placed)
        last = output.last_hidden_state
        parts = [self._captured[layer_id] for layer_id in self.aux_layer_ids] + [last] * self.with_last
        self._captured.clear()
        aux = torch.cat(parts, dim=-1) if parts else last[..., :0]
        return HiddenStates(aux=aux, last=last, **entered)

    @contextmanager
    def _entering(self, entered: dict[str, Any]) -> Iterator[None]:
        """Note what enters the decoder: `embedded` `[B, T, H]` and `places` `[B, T, 3]`."""

        def read(_layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            entered["embedded"] = inputs[0] if inputs else named["hidden_states"]

        def place(_body: nn.Module, _inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            given = named.get("position_ids")
            tokens = named["input_ids"] if named.get("inputs_embeds") is None else named["inputs_embeds"]
            if given is None:
                given = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
            # Some give the position in the text before the three.
            axes = given[-AXES:] if given.ndim == AXES else given.expand(AXES, *given.shape)
            entered["places"] = axes.movedim(0, -1).int()

        hooks = [(self.body.layers[0], read), (self.body, place)]
        handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in hooks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _masks(self, placement: Placement) -> Tensor | dict[str, Tensor]:
        """Additive masks `[B, 1, T, S + T]`, one per type of layer if there are several."""
        assert self.rewinds
        config, visible, masks = self.body.config, placement.visible, {}
        own, other = placement.positions[:, :, None], placement.columns[:, None, :]
        for name in self._attention:
            seen = visible
            if name == SLIDING:
                seen = visible & (other > own - config.sliding_window)
            elif name == CHUNKED:
                size = config.attention_chunk_size
                seen = visible & (other // size == own // size)
            masks[name] = self._additive(seen)
        return masks if len(masks) > 1 else masks.popitem()[1]

    def _additive(self, visible: Tensor) -> Tensor:
        dtype = self.head_weight.dtype
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return mask.masked_fill_(~visible, torch.finfo(dtype).min).unsqueeze(1)

    def new_cache(self) -> DynamicCache:
        """An empty cache of the kind that each layer needs. Sliding layers keep all tokens, so any can be removed."""
        cache = DynamicCache(config=self.body.config)
        for index, layer in enumerate(cache.layers):
            if type(layer) is DynamicSlidingWindowLayer:
                cache.layers[index] = DynamicLayer()
        return cache

    @torch.no_grad()
    def logits(self, last: Tensor) -> Tensor:
        """`[N, V]` float32 logits of `[N, H]` hidden states after the final norm."""
        return self.head.logits(last)

    def top_tokens(self, last: Tensor) -> Tensor:
        """`[N]` int32: see TargetHead.top_tokens."""
        return self.head.top_tokens(last)


def eos_ids(target: Path) -> frozenset[int]:
    """The tokens that end the target's text: those of its configuration, its generation configuration and its tokenizer
    together, as in SGLang; they differ in many fine-tuned targets. Raises ValueError for one that is no token id."""
    config = read_model_config(target)
    named = [getattr(config, "eos_token_id", None)]
    if (target / GENERATION_CONFIG).is_file():
        named.append(GenerationConfig.from_pretrained(target).eos_token_id)
    if named == [None] * len(named):
        named.append(config.get_text_config().eos_token_id)
    if (target / TOKENIZER_CONFIG).is_file():
        named.append(read_tokenizer(target).eos_token_id)
    ends = [token for ids in named if ids is not None for token in (ids if isinstance(ids, list) else [ids])]
    if odd := [token for token in ends if not isinstance(token, int)]:
        raise ValueError(f"eos_token_id {odd[0]!r} ends its text, and is no token id")
    return frozenset(ends)


def _own_head(model: "transformers.PreTrainedModel") -> TargetHead:
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module)
    weight: Tensor = head.weight  # type: ignore[assignment]
    return TargetHead(weight, weight, *logit_shape(model.config))
