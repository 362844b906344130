"""The target in transformers: one forward that also captures hidden states. Runs in generators and benchmarks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from models.targets.weights import TargetHead, logit_shape


@dataclass(frozen=True)
class HiddenStates:
    """Captured hidden states: `aux` `[..., T, K*H]` and `last` `[..., T, H]`, in the target's compute dtype."""

    aux: Tensor
    last: Tensor


class TargetModel:
    """A causal language model with capture of K layer outputs and of the output after the final norm."""

    def __init__(self, model: PreTrainedModel, aux_layer_ids: Sequence[int]):
        self.model = model.eval()
        self.body: Any = model.get_decoder()
        head = model.get_output_embeddings()
        assert isinstance(head, nn.Module)
        self.head_weight: Tensor = head.weight  # type: ignore[assignment]
        self._head = TargetHead(self.head_weight, self.head_weight, *logit_shape(model.config))
        self.aux_layer_ids = tuple(aux_layer_ids)
        self._captured: dict[int, Tensor] = {}
        layers = self.body.layers
        if self.aux_layer_ids[-1] >= len(layers):
            raise ValueError(
                f"target.aux_layer_ids {list(self.aux_layer_ids)}: the target has layers 0..{len(layers) - 1}"
            )
        for layer_id in self.aux_layer_ids:
            layers[layer_id].register_forward_hook(self._keep(layer_id))

    @classmethod
    def load(
        cls, path: Path, aux_layer_ids: Sequence[int], dtype: torch.dtype, device: str | torch.device = "cpu"
    ) -> "TargetModel":
        """Load from a local Hugging Face folder (safetensors)."""
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
        return cls(model.to(device), aux_layer_ids)  # type: ignore[arg-type]

    def _keep(self, layer_id: int):
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._captured[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, cache: DynamicCache | None = None, attention_mask: Tensor | None = None
    ) -> HiddenStates:
        """Run the body over `tokens` `[B, T]` after what `cache` holds; logits are left to `logits`.

        Causal attention leaves right padding without effect on earlier positions, so a right-padded batch needs no
        mask as long as padded positions are ignored.
        """
        self._captured.clear()
        output = self.body(
            input_ids=tokens, attention_mask=attention_mask, past_key_values=cache, use_cache=cache is not None
        )
        aux = torch.cat([self._captured[layer_id] for layer_id in self.aux_layer_ids], dim=-1)
        self._captured.clear()
        return HiddenStates(aux=aux, last=output.last_hidden_state)

    def new_cache(self) -> DynamicCache:
        """An empty key-value cache that can be cropped to any earlier length."""
        return DynamicCache()

    @torch.no_grad()
    def logits(self, last: Tensor) -> Tensor:
        """`[N, H]` hidden states after the final norm to `[N, V]` float32 logits."""
        return self._head.logits(last)
