"""Chain speculation (topk 1, greedy; EAGLE-3 and drafts of blocks) and fp8 for a real SGLang on a CPU: test equipment.

SGLang has seams for most of it (`sglang_speculation_platform.py`); kernels without one are replaced here through
its hook registry. Active only with `SGLANG_PLATFORM=draftsmith_test_cpu`.
"""

import os
import sys
from typing import Any

import torch
from torch import Tensor

NAME = "draftsmith_test_cpu"
OPS = "sglang.kernels.ops.speculative."


def activate() -> str | None:
    """Entry point of the platform."""
    if os.environ.get("SGLANG_PLATFORM") != NAME:
        return None
    from models.capture.sglang.cpu_platform import activate as plain

    return None if plain() is None else "sglang_speculation_platform.SpeculatingCpu"


def register() -> None:
    """Entry point of the kernels."""
    if os.environ.get("SGLANG_PLATFORM") != NAME:
        return
    from models.capture.sglang.plugin import register as plain

    plain()  # SGLang skips the plugins of a distribution whose platform is not the chosen one
    from sglang.srt.arg_groups.choices import add_draft_attention_backend_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_draft_attention_backend_choices(["torch_native"])
    replaced = {
        "cache_locs.assign_draft_cache_locs_contiguous_func": assign_draft_cache_locs,
        "eagle.fill_bonus_tokens_func": fill_bonus_tokens,
        "eagle.fill_accept_out_cache_loc_func": fill_accepted_cache_locs,
        "spec_tree.build_tree_kernel_efficient_func": build_chain,
        "spec_tree.verify_tree_greedy_func": verify_chain,
    }
    for name, function in replaced.items():
        HookRegistry.register(OPS + name, function, HookType.REPLACE)
    group = "sglang.srt.distributed.parallel_state.GroupCoordinator."
    HookRegistry.register(group + "all_gather_into_tensor", all_gather, HookType.REPLACE)
    HookRegistry.register(group + "reduce_scatter_tensor", reduce_scatter, HookType.REPLACE)
    HookRegistry.register(group + "reduce_scatterv", reduce_scatter_ragged, HookType.REPLACE)
    moe = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
    HookRegistry.register(moe, of_own_experts, HookType.AROUND)
    pool = "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func"
    HookRegistry.register(pool, assign_req_to_token_pool, HookType.REPLACE)
    fp8 = "sglang.srt.layers.quantization.fp8.Fp8LinearMethod.apply"
    HookRegistry.register(fp8, fp8_block_linear, HookType.REPLACE)
    factory = "sglang.srt.speculative.draft_utils.DraftBackendFactory."
    HookRegistry.register(factory + "create_decode_backend", decode_backend, HookType.AROUND)
    HookRegistry.register(factory + "create_draft_extend_backend", extend_backend, HookType.AROUND)
    HookRegistry.register("sglang.srt.models.dflash.DFlashAttention.forward", without_triton, HookType.AROUND)
    for name in ("DFlashDraftModel", "DFlashLagunaForCausalLM", "DFlash2DraftModel"):
        HookRegistry.register(f"sglang.srt.models.dflash.{name}.forward", in_own_dtype, HookType.AROUND)
    HookRegistry.register("sglang.srt.arg_groups.speculative_hook._handle_dspark", dspark_on_cpu, HookType.AROUND)
    checked = "sglang.srt.speculative.dflash_worker_v2.validate_domino_runtime"
    HookRegistry.register(checked, domino_on_cpu, HookType.AROUND)
    bundle = "sglang.srt.models.dspark.DSparkDraftMixin._fused_kv_write_bundle"
    HookRegistry.register(bundle, lambda _draft, _pool: None, HookType.REPLACE)
    _without_streams()


def dspark_on_cpu(original: Any, server_args: Any) -> None:
    """Of all algorithms only DSpark's check of the device asks no platform (0.5.23)."""
    module = sys.modules[original.__module__]
    view = module.resolving_view

    class OnCuda:
        """The arguments, with another device."""

        device = "cuda"

        def __init__(self, given: Any):
            self.given = given

        def __getattr__(self, name: str) -> Any:
            return getattr(self.given, name)

    module.resolving_view = lambda given: OnCuda(view(given))
    try:
        original(server_args)
    finally:
        module.resolving_view = view


def domino_on_cpu(original: Any, *, device: torch.device, **given: Any) -> None:
    """All that SGLang asks of a Domino draft but the device (0.5.23); its proposals are plain torch."""
    original(device=torch.device("cuda"), **given)


def fp8_block_linear(method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """SGLang's product of weights and activations in fp8, whose kernel is Triton's: both are rounded as it does."""
    assert method.block_quant, "only weights in blocks"
    height, width = method.weight_block_size
    scales = layer.weight_scale_inv.repeat_interleave(height, 0).repeat_interleave(width, 1)
    groups = x.float().unflatten(-1, (-1, width))
    factors = groups.abs().amax(-1, keepdim=True).clamp_min(1e-10) / torch.finfo(layer.weight.dtype).max
    rounded = ((groups / factors).to(layer.weight.dtype).float() * factors).flatten(-2)
    product = rounded @ (layer.weight.float() * scales).T
    return (product if bias is None else product + bias).to(x.dtype)


def decode_backend(_original: Any, factory: Any) -> Any:
    """Attention of the draft's own steps; none where it takes only one."""
    from sglang_speculation_attention import DraftSteps

    if factory.speculative_num_steps <= 1:
        return None
    return DraftSteps(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)


def extend_backend(_original: Any, factory: Any) -> Any:
    from sglang_speculation_attention import VerifyingAttention, named

    return named(VerifyingAttention(factory.draft_model_runner))


def without_triton(original: Any, attention: Any, *inputs: Any, **others: Any) -> Any:
    """Of SGLang's two ways to normed and rotated queries and keys in bfloat16, the one that needs no GPU."""
    attention.use_table_qk_norm_rope = False
    return original(attention, *inputs, **others)


def in_own_dtype(original: Any, draft: Any, *inputs: Any, input_embeds: Tensor | None = None, **others: Any) -> Any:
    """SGLang hands every draft bfloat16 embeddings; DSpark looks up its own."""
    given = None if input_embeds is None else input_embeds.to(draft.norm.weight.dtype)
    return original(draft, *inputs, input_embeds=given, **others)


def _without_streams() -> None:
    """DFlash's worker marks a tensor as used by a stream without asking whether it lies on a device that has any."""
    torch.cuda.synchronize = lambda device=None: None  # glm4_moe calls it when a draft takes the target's tables
    original = Tensor.record_stream
    Tensor.record_stream = lambda tensor, stream: original(tensor, stream) if tensor.is_cuda else None


def all_gather(group: Any, output: Tensor, given: Tensor) -> None:
    """By gloo; SGLang's own operators are registered for its platform's device alone."""
    torch.distributed.all_gather(list(output.chunk(group.world_size)), given, group=group.device_group)


def reduce_scatter(group: Any, output: Tensor, given: Tensor) -> Tensor:
    """By gloo, which has none: everybody reduces everything."""
    return reduce_scatter_ragged(group, given, output, [len(output)] * group.world_size)


def reduce_scatter_ragged(
    group: Any, given: Tensor, output: Tensor | None = None, sizes: list[int] | None = None
) -> Tensor:
    """The same, where ranks get different numbers of rows."""
    whole = given.clone()
    torch.distributed.all_reduce(whole, group=group.device_group)
    part = whole.split(sizes or len(given) // group.world_size)[group.rank_in_group]
    return part.clone() if output is None else output.copy_(part)


def of_own_experts(original: Any, layer: Any, x: Tensor, chosen: Any, *others: Any) -> Tensor:
    """With expert parallelism those of other ranks have the number -1, which SGLang's PyTorch code does not know.

    Experts of this rank that a token did not choose take their places, without weight.
    """
    ids, absent = chosen.topk_ids.long(), chosen.topk_ids < 0
    used = torch.zeros(len(ids), len(layer.w13_weight) + 1, dtype=torch.long).scatter_(1, ids + 1, 1)[:, 1:]
    others_first = used.argsort(dim=1, stable=True)
    ids = torch.where(absent, others_first.gather(1, (absent.cumsum(1) - 1).clamp_min(0)), ids)
    weights = chosen.topk_weights.masked_fill(absent, 0.0)
    return original(layer, x, chosen._replace(topk_ids=ids.int(), topk_weights=weights), *others)


def assign_req_to_token_pool(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    _batch_size: int,
) -> None:
    """New places in the KV cache become each request's positions from start to end."""
    taken = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for request, start, end in rows:
        places = out_cache_loc[taken : taken + end - start]
        req_to_token[request, start:end] = places.to(req_to_token.dtype)
        taken += end - start


def assign_draft_cache_locs(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    topk: int,
    num_cols: int,
    positions: Tensor | None = None,
    mrope: Tensor | None = None,
) -> None:
    """Each request's next `topk * num_cols` places in the KV cache, one request after the other."""
    count = topk * num_cols
    for row, (request, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        places = req_to_token[request, length : length + count]
        out_cache_loc[row * count : (row + 1) * count] = places.to(out_cache_loc.dtype)
    if positions is not None:
        positions.copy_(seq_lens)
    if mrope is not None:
        mrope.copy_(seq_lens.expand(3, -1))


def fill_bonus_tokens(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int, batch_size: int
) -> None:
    """The last accepted token of each request."""
    last = torch.arange(batch_size) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accepted_cache_locs(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor, _size: int
) -> None:
    """Places of the accepted tokens, side by side."""
    chosen = accept_index.flatten()
    chosen = chosen[chosen >= 0].long()
    accept_out_cache_loc[: len(chosen)] = out_cache_loc[chosen]


def build_chain(
    _parents: Tensor,
    _selected: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next: Tensor,
    _retrieve_sibling: Tensor,
    topk: int,
    _steps: int,
    count: int,
    mask_mode: Any,
) -> None:
    """Node i follows node i - 1; `count` nodes per request, the first is the token that is already sure."""
    assert topk == 1, "chains only"
    nodes = torch.arange(count)
    visible = nodes[:, None] >= nodes[None, :]
    offset = 0
    for row, length in enumerate(seq_lens.tolist()):
        retrieve_index[row] = nodes + row * count
        retrieve_next[row, :-1] = nodes[1:]
        positions[row * count : (row + 1) * count] = length + nodes
        if int(mask_mode) == 0:  # rows over the prefix and the nodes
            size = count * (length + count)
            tree_mask[offset : offset + size].view(count, length + count)[:, length:] = visible
            offset += size
        else:
            tree_mask[row * count**2 : (row + 1) * count**2] = visible.flatten()


def verify_chain(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates `[B, n]` are accepted as long as each is what the target predicts `[B, n]` after the one before."""
    choices = target_predict.reshape(candidates.shape)
    depth = accept_index.shape[1]
    agrees = candidates[:, 1:depth] == choices[:, : depth - 1]
    accepted = agrees.long().cumprod(-1).sum(-1)
    for row, count in enumerate(accepted.tolist()):
        places = retrieve_index[row, : count + 1]
        accept_index[row, : count + 1] = places.to(accept_index.dtype)
        predicts[places.long()] = choices[row, : count + 1].to(predicts.dtype)
    accept_token_num.copy_(accepted)
    return predicts, accept_index, accept_token_num
