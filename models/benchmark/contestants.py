"""Loads what is compared: the target once, and any number of drafts."""

import atexit
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import gettempdir

import torch
from torch import Tensor

from infra.files.locks import own_folder, sweep
from infra.processes.control_groups import memory
from infra.quantities import byte_size
from infra.refusal import Refusal
from models.benchmark.counter import FREE_SHARE
from models.devices import compute_device, device_with
from models.drafts.base import Draft
from models.drafts.batched_proposer import Along, ChangedTurns, DrawingSource, PackedTexts, RolloutSource
from models.drafts.sampling import Sampling
from models.export.description import check_precision
from models.export.sglang import load_draft
from models.targets.architecture import has_experts, read_model_config
from models.targets.model import TargetModel, eos_ids
from models.targets.packed import pack_products
from models.targets.quantization import read_quantization
from models.targets.recommended import recommended_sampling
from models.targets.weights import read_target_head, weight_bytes

EXACT = "draftsmith-float32-"
"""Beginning of the name of a folder for a target's stacked experts."""


@dataclass(frozen=True)
class Contestants:
    """Target and drafts on one device in one data type."""

    target: TargetModel
    exact: Callable[[], TargetModel]
    """The target in float32, on the CPU where the device has no room for it, from disk where this machine's memory has
    none; the target itself if it is float32."""
    drafts: Sequence[DrawingSource]
    """The draft, then the champion if there is one."""
    eos_ids: frozenset[int]
    recommended: Sampling
    """How the target's makers sample."""

    @property
    def draft(self) -> DrawingSource:
        return self.drafts[0]

    @property
    def champion(self) -> DrawingSource | None:
        return self.drafts[1] if len(self.drafts) > 1 else None


def load_contestants(target: Path, folders: Sequence[Path], dtype: torch.dtype, *, sees: bool = False) -> Contestants:
    """Load a target and exported drafts, which may read different target layers. `sees`: the target reads images."""
    if quantization := read_quantization(target):
        raise Refusal(
            f"{target} is quantized ({quantization}), and the reference decoder would compute it with dequantized "
            "weights: acceptance is counted by SGLang, in a run with generator.engine=sglang, or in `draftsmith bench`"
        )
    for folder in folders:
        check_precision(folder, None)
    device = compute_device()
    drafts = [load_draft(folder, target, dtype, device) for folder in folders]
    layers = sorted({layer for loaded in drafts for layer in loaded.aux_layer_ids})
    mixed = bool(layers) and not all(loaded.aux_layer_ids for loaded in drafts)
    model = TargetModel.load(target, layers, dtype, device, with_last=mixed, sees=sees)
    pack_products(model)

    @cache
    def exact() -> TargetModel:
        if dtype == torch.float32:
            return model
        # Beside the target itself, whose decoding goes on: one forward at each divergence is fast enough on the CPU.
        needed = weight_bytes(target, torch.float32)
        beside = weight_bytes(target, dtype) if device.type == "cpu" else 0
        # Wherever the weights go, transformers builds them in the machine's memory.
        if needed + beside > FREE_SHARE * memory():
            return _streamed(target, layers, needed)
        return TargetModel.load(target, layers, torch.float32, device_with(int(needed / FREE_SHARE)))

    sources = [_reading_its_own(loaded, layers, mixed) for loaded in drafts]
    return Contestants(model, exact, sources, eos_ids(target), recommended_sampling(target))


def _streamed(target: Path, layers: Sequence[int], nbytes: int) -> TargetModel:
    """A target in float32 that is larger than this machine's memory. Raises Refusal without space for its experts."""
    temporary = Path(gettempdir())
    sweep(temporary, f"{EXACT}*")  # a benchmark that was killed leaves its own
    place, at_the_end = temporary / f"{EXACT}{os.getpid()}", ExitStack()
    at_the_end.enter_context(own_folder(place))
    atexit.register(at_the_end.close)
    print(
        f"the target takes {byte_size(nbytes)} in float32, more than this machine's memory has room for: its weights "
        "are read from disk at each divergence of the texts",
        flush=True,
    )
    if has_experts(read_model_config(target)) and shutil.disk_usage(place).free < nbytes:
        raise Refusal(
            f"{temporary} lacks the {byte_size(nbytes)} that stacking the target's experts in float32 needs: set "
            "TMPDIR to a folder with that much free space, and resume"
        )
    head = read_target_head(target, torch.float32)
    return TargetModel.streamed(target, layers, torch.float32, head, place)


def _reading_its_own(draft: Draft, layers: Sequence[int], with_last: bool) -> DrawingSource:
    """`with_last`: features are those of the layers, and the target's last hidden state after them."""
    if list(draft.aux_layer_ids) == list(layers) and not with_last:
        return draft
    chosen = [layers.index(layer) for layer in draft.aux_layer_ids] or [len(layers)]
    return SelectedLayers(draft, chosen, len(layers) + with_last)


def same_build(one: RolloutSource, other: RolloutSource) -> bool:
    """Whether two drafts compute the same with other weights, so that their steps cost the same."""
    first, second = draft_of(one), draft_of(other)
    shapes = [{name: tensor.shape for name, tensor in draft.state_dict().items()} for draft in (first, second)]
    settings = [draft.config.model_dump(exclude=set(draft.config.training_only)) for draft in (first, second)]
    return shapes[0] == shapes[1] and settings[0] == settings[1]


def draft_of(source: RolloutSource) -> Draft:
    """The draft behind a contestant."""
    draft = source.source if isinstance(source, SelectedLayers) else source
    assert isinstance(draft, Draft)
    return draft


class SelectedLayers:
    """A `DrawingSource` that hands a draft only the target layers it was trained on."""

    def __init__(self, source: DrawingSource, chosen: Sequence[int], layers: int):
        self.source, self.chosen, self.layers = source, list(chosen), layers

    def select(self, aux: Tensor) -> Tensor:
        """`[n, layers * H]` to `[n, chosen * H]`."""
        return aux.unflatten(-1, (self.layers, -1))[..., self.chosen, :].flatten(-2)

    def proposers(self, count: int) -> ChangedTurns:
        """See `ProposalSource.proposers`."""
        return ChangedTurns(self.source.proposers(count), lambda turn: replace(turn, aux=self.select(turn.aux)))

    def rollout(self, tokens: Tensor, aux: Tensor, lookahead: int, first: int = 0) -> Tensor:
        """`[T - first, lookahead]` int64; see `DrawingSource.rollout`."""
        return self.source.rollout(tokens, self.select(aux), lookahead, first)

    def after_images(self, embedded: Tensor, places: Tensor, shown: Tensor) -> DrawingSource:
        """See `Draft.after_images`."""
        draft = draft_of(self).after_images(embedded, places, shown)
        return SelectedLayers(draft, self.chosen, self.layers)

    def along(self, texts: PackedTexts, lookahead: int, rows: Tensor, sampling: Sampling) -> Along:
        """See `DrawingSource.along`."""
        return self.source.along(replace(texts, aux=self.select(texts.aux)), lookahead, rows, sampling)
