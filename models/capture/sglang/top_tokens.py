"""The target's top token at every row of a prefill, by SGLang's own head. Called on all ranks of a group.

A head that is divided over ranks (tensor parallelism) has a range of the vocabulary on each, padded to equal size.
Every rank finds its greatest logit; only those and their tokens are exchanged.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from infra.refusal import Refusal
from models.targets.weights import TOP_BYTES

REMEDY = "set training.out_of_vocabulary=text"


def top_tokens(scheduler: Any, parallel: Any, last: Tensor) -> Tensor:
    """`[N]` int32 tokens with the greatest logit from `last` `[N, H]`, after the final norm; ties: the smallest id.

    `scheduler` and `parallel` are SGLang's `Scheduler` and `ParallelContext`. Raises Refusal for a model whose head is
    not found, or whose rows are not on all ranks that divide it.
    """
    model = scheduler.tp_worker.model_runner.model
    # The text part of a model with several towers.
    model = model if hasattr(model, "lm_head") else getattr(model, "language_model", model)
    if not (hasattr(model, "lm_head") and hasattr(model, "logits_processor")):
        raise Refusal(f"SGLang's {type(model).__name__} has no lm_head, for the target's top token: {REMEDY}")
    head, processor = model.lm_head, model.logits_processor
    if processor.do_tensor_parallel_all_gather_dp_attn:
        raise Refusal(
            "the head is divided over ranks with different requests (data-parallel attention), so the target's top "
            "token is not known: set generator.sglang.attention_data_parallel in place of SGLang's own argument, or "
            f"{REMEDY}"
        )
    # On the forward's stream: after it, and before its buffers are used again.
    overlapped = last.is_cuda and scheduler.enable_overlap
    with torch.no_grad(), scheduler.forward_stream_ctx if overlapped else nullcontext():
        # Without it the head is an ordinary embedding, such as Gemma 3's: whole on every rank.
        shard = getattr(head, "shard_indices", None)
        vocabulary = len(head.weight) if shard is None else shard.num_elements_padded
        rows = max(1, TOP_BYTES // (vocabulary * last.element_size()))
        best = [_best(processor._compute_lm_head(part, head), shard) for part in last.split(rows)]
        greatest, tokens = (torch.cat(parts) for parts in zip(*best, strict=True))
        if processor.do_tensor_parallel_all_gather and shard is not None:
            group = parallel.attn_tp_group if processor.use_attn_tp_group else parallel.tp_group
            tokens = _of_all_ranks(group, greatest, tokens)
        return tokens.int()


def _best(logits: Tensor, shard: Any) -> tuple[Tensor, Tensor]:
    """Greatest logit `[n]` of this rank's part of the vocabulary, without padding and added tokens, and its token."""
    if shard is None:
        return logits.max(-1)
    logits[:, shard.num_org_elements :] = -torch.inf
    greatest, index = logits.max(-1)
    return greatest, index + shard.org_vocab_start_index


def _of_all_ranks(group: Any, greatest: Tensor, tokens: Tensor) -> Tensor:
    """Ranks are in the order of their tokens, and the first maximum wins. float64 holds both exactly."""
    pairs = torch.stack([greatest.double(), tokens.double()], dim=-1)
    everyone = group.all_gather(pairs, dim=0).view(-1, *pairs.shape)
    best = everyone[..., 0].argmax(0, keepdim=True)
    return everyone[..., 1].gather(0, best).squeeze(0)
