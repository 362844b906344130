"""A target's embedding and output head, read from its safetensors files without loading the target."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig

from infra.refusal import Refusal
from models.targets.architecture import read_model_config
from models.targets.quantization import PACKED, StoredMatrix, read_quantization

TOP_BYTES = 128 * 2**20
"""Logits over the whole vocabulary that exist at once where only the greatest is wanted."""


@dataclass(frozen=True)
class TargetHead:
    """Token embedding and output head of a target.

    `embedding` `[V, H]` is raw, without Gemma's factor sqrt(H): serving engines feed it to drafts. `head` `[V, H]` is
    the same tensor if the two are tied. Logits are `soft_cap * tanh(logit_scale * h @ head.T / soft_cap)`, or without
    the cap if it is None.
    """

    embedding: Tensor
    head: Tensor
    logit_scale: float
    soft_cap: float | None
    packed: Tensor | None = None
    """`head` in oneDNN's order, see `packed.py`."""

    @torch.no_grad()
    def logits(self, last: Tensor) -> Tensor:
        """`[N, V]` float32 logits of `[N, H]` hidden states after the final norm."""
        if self.packed is not None:
            logits = packed_product(last, self.packed).float()
        elif self.head.dtype == torch.float32 and not self.head.is_cuda:
            # For few rows of a large vocabulary up to six times faster on a CPU, torch 2.13. In bfloat16 it is not, and
            # whatever reads the rows of a transposed result is several times slower.
            logits = (self.head @ last.T).T
        else:
            logits = (last @ self.head.T).float()
        logits = logits * self.logit_scale
        return logits if self.soft_cap is None else torch.tanh(logits / self.soft_cap) * self.soft_cap

    @torch.no_grad()
    def top_tokens(self, last: Tensor) -> Tensor:
        """`[N]` int32 greedy next tokens from `[N, H]` hidden states after the final norm; ties go to the smallest id.

        Logits are compared as the head's dtype has them, without scale and soft cap, which change no order.
        """
        rows = max(1, TOP_BYTES // (len(self.head) * self.head.element_size()))
        chunks = [(part.to(self.head) @ self.head.T).argmax(-1) for part in last.split(rows)]
        return torch.cat(chunks).int()


def packed_product(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """`[..., out]` of `x` `[..., in]` and a weight `[out, in]` in oneDNN's order."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def read_target_head(path: Path, dtype: torch.dtype) -> TargetHead:
    """Read embedding and head of the Hugging Face folder `path` in `dtype`, dequantized where they are quantized.

    Raises Refusal: see `find_target_head`.
    """
    stored = find_target_head(path)
    embedding = stored.embedding.read(dtype)
    head = embedding if stored.head is None else stored.head.read(dtype)
    logit_scale, soft_cap = logit_shape(read_model_config(path))
    return TargetHead(embedding=embedding, head=head, logit_scale=logit_scale, soft_cap=soft_cap)


@dataclass(frozen=True)
class StoredHead:
    """Where a target's embedding and output head are."""

    embedding: StoredMatrix
    head: StoredMatrix | None
    """None: tied to the embedding."""


def find_target_head(path: Path) -> StoredHead:
    """Find embedding and head of the Hugging Face folder `path`; no weights are read.

    Raises Refusal: no safetensors files, no known tensor names, or a packed format.
    """
    files = tensor_files(path)
    embedding, head = (_module(files, name) for name in ("embed_tokens", "lm_head"))
    if embedding is None:
        raise Refusal(f"{path} has no tensor named *embed_tokens.weight: this family of targets is not supported")
    if head is None and not _tied(read_model_config(path)):
        raise Refusal(f"{path} has no tensor named *lm_head.weight, and its config does not tie the embeddings")
    found = [None if module is None else StoredMatrix.find(path, files, module) for module in (embedding, head)]
    assert found[0] is not None
    return StoredHead(found[0], found[1])


def check_tied(path: Path) -> None:
    """Raise Refusal for a head of its own where the config ties it: SGLang takes the embedding, transformers the head.

    Both are read where both are stored. The text model's setting decides: in transformers 5.24 some multimodal
    configurations tie by default, whatever their text model does.
    """
    stored = find_target_head(path)
    if stored.head is None or not getattr(read_model_config(path).get_text_config(), "tie_word_embeddings", False):
        return
    if not torch.equal(stored.embedding.read(torch.bfloat16), stored.head.read(torch.bfloat16)):
        raise Refusal(
            f"{path}: {stored.head.module} differs from {stored.embedding.module}, and its config.json ties the two, "
            "so SGLang would serve another head than the files': set tie_word_embeddings: false in its config.json"
        )


def logit_shape(config: PretrainedConfig) -> tuple[float, float | None]:
    """(factor, soft cap or None) applied to `h @ head.T`: Cohere and HyperCLOVA X multiply, Granite divides."""
    text = config.get_text_config()
    factor, scaling = (float(getattr(text, key, None) or 1.0) for key in ("logit_scale", "logits_scaling"))
    factor = factor * scaling if text.model_type == "hyperclovax" else factor / scaling
    return factor, getattr(text, "final_logit_softcapping", None)


def tensor_files(path: Path) -> dict[str, str]:
    """File name of every tensor in a folder, sharded or not. Raises Refusal without safetensors files, and for one that
    is missing or cut off."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            files = dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise Refusal(f"{index} is damaged ({type(error).__name__}: {error}): fetch it again") from error
        for name in sorted(set(files.values())):
            _tensor_names(path / name)
        return files
    single = path / "model.safetensors"
    if not single.is_file():
        raise Refusal(f"{path} holds no model.safetensors: convert the target with save_pretrained first")
    return dict.fromkeys(_tensor_names(single), single.name)


def _tensor_names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise Refusal(f"{file} is missing or damaged ({error}): fetch it again") from error


def weight_bytes(path: Path, dtype: torch.dtype) -> int:
    """Bytes of a target's weights when they are loaded in `dtype`; of a quantized one, of its files."""
    nbytes = sum((path / file).stat().st_size for file in set(tensor_files(path).values()))
    if read_quantization(path):
        return nbytes
    config = read_model_config(path)
    # Configurations of multimodal targets may give the data type for all parts at once.
    declared = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
    stored = declared if isinstance(declared, torch.dtype) else torch.float32
    return nbytes * dtype.itemsize // stored.itemsize


def _module(names: Iterable[str], last: str) -> str | None:
    """The text model's module: other towers and prediction heads excluded, the name nearest to the root."""
    endings = tuple(f"{last}.{weight}" for weight in ("weight", *PACKED))
    found = [name for name in names if name in endings or name.endswith(tuple(f".{ending}" for ending in endings))]
    found = [name for name in found if not {"vision_tower", "audio_tower", "mtp"} & set(name.split("."))]
    nearest = min(found, key=lambda name: (name.count("."), name), default=None)
    return nearest and nearest.rpartition(".")[0]


def _tied(config: PretrainedConfig) -> bool:
    return any(getattr(part, "tie_word_embeddings", False) for part in (config, config.get_text_config()))
