"""Memory of one trainer rank, by component. All terms of the model are here; a method says only what its rows keep.

Calibrated against the allocator (benchmarks/planner.py measures what is predicted here, component by component).
"""

from bisect import bisect_left

from pydantic import Field

from infra.planner.shapes import ITEM_BYTES, DraftShape, Precision, TargetShape
from infra.planner.traffic import STORED_BYTES, StoredPrecision, stored_bytes_per_token
from infra.records.data_path import Record

FLOAT = 4
RESTORED_BYTES = 2
"""Of a number that was stored in fewer."""
MOMENTS = 2
"""AdamW's. Muon keeps one of a matrix."""
BLOCK_BYTES = {True: 4 * 2**20, False: 0}
"""Draft logits of a chunk that the loss works on at once, as float32: on a CPU; on a GPU its compiled functions keep
none (models/losses/chunked.py)."""
CPU_CHUNK_TOKENS = 256
"""Positions of the loss at once on a CPU: products are no faster with more, and their logits leave the cache."""
GPU_CHUNK_BYTES = 512 * 2**20
"""Draft logits of a chunk on a GPU, whose kernels want many rows and few launches."""
BLOCKS = 2
"""Arrays of a block that are alive at once: two temporaries; where logits are bfloat16, the block in float32 too."""
MASS_BLOCKS = 3
"""More of them where the loss asks for the target's whole distribution (acceptance, and its slope)."""
RECOMPUTED_ROWS = 8192
"""Rows of a step whose inner activations exist at once when they are recomputed (models/drafts/eagle3)."""
RESERVED = 1.5 * 2**30
"""Memory of a GPU that planning leaves to CUDA's context, NCCL's buffers and cuBLAS workspaces. Assumed."""
FRAGMENTS = 0.92
"""Share of the rest that the caching allocator turns to use. Assumed."""


CHUNK_TOKENS = 8192
"""Tokens that an engine prefills at once. Assumed: SGLang's default on large GPUs."""
ENGINE_CHUNKS = ((20 * 1024, 2048), (60 * 1024, 4096), (160 * 1024, 8192))
"""Pairs (MiB, tokens): SGLang's chunk size on GPUs with less memory than the first; see `engine_static`."""
ENGINE_LARGEST_CHUNK = 16384
MIB = 2**20
PREFILL_ROWS = 24
"""Rows of the hidden size that a prefilled token keeps at most in a forward. Assumed."""


class Setting(Record):
    """Settings that determine a rank's memory, besides target and draft."""

    aux_count: int
    stored: StoredPrecision
    precision: Precision
    top_token: bool
    """Whether generators send the target's top token at every position."""
    whole_head: bool
    """Whether the target's whole head is kept, because the loss reads its logits over the whole vocabulary."""
    chunk_tokens: int | None = None
    """Positions whose logits exist at once (training.loss_chunk_tokens); None: by the device."""
    muon: bool = False
    """Whether matrices step by Muon, with one moment (training.optimizer)."""
    recompute: bool = False
    """Whether inner activations are computed again in the backward pass (training.recompute)."""
    prefetch_steps: int
    divided: int = 1
    """Ranks among which weights, gradients and optimizer state are divided (training.sharded)."""
    context: int = 1
    """Ranks that share every sample (training.context_parallel_size)."""
    embedded: bool = False
    """Whether generators send the embeddings that the target read (data.images)."""
    on_device: bool = False
    """Whether prefetched hidden states are in GPU memory too (transport.receive)."""
    one_memory: bool
    """Whether what a GPU leaves to its host shares the memory that is planned: on a CPU."""

    def stored_bytes_per_token(self, hidden_size: int) -> int:
        """Bytes of a token's hidden states, of a target of `hidden_size`."""
        return stored_bytes_per_token(self.aux_count, hidden_size, self.stored, self.top_token, self.embedded)


class RankMemory(Record):
    """Bytes of one rank, by component; they add up to the predicted peak."""

    weights: int = Field(description="weights, float32")
    gradients: int = Field(description="gradients, float32")
    optimizer: int = Field(description="the optimizer's moments, float32")
    averaged: int = Field(description="averaged weights, float32")
    # Embeddings, the head's rows of the draft vocabulary, perhaps the whole head.
    frozen_tables: int = Field(description="frozen tables of the target")
    # As autocast keeps them during a micro-batch.
    cast_weights: int = Field(description="weights cast to bfloat16")
    # Those of the micro-batch, and on a GPU of the next; without one all prefetched ones.
    features: int = Field(description="hidden states")
    # What the draft's rows keep for the backward, over all steps of the training-time test.
    activations: int = Field(description="activations, all steps")
    # Gradients formed in the forward, and the chunk whose logits are alive.
    loss: int = Field(description="loss and its gradients")
    # A trainer on a CPU reads embedding and head in float32: of a small draft, more than its steps need.
    building: int = Field(default=0, description="more than all of these, while the draft is built")

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in type(self).model_fields)


def loss_chunk_tokens(logits_bytes: int, on_cpu: bool) -> int:
    """Positions of the loss whose logits exist at once, where no setting says so.

    `logits_bytes`: draft logits of one position, over all the steps that predict its next token.
    """
    if on_cpu:
        return CPU_CHUNK_TOKENS
    return max(CPU_CHUNK_TOKENS, GPU_CHUNK_BYTES // logits_bytes // CPU_CHUNK_TOKENS * CPU_CHUNK_TOKENS)


def planned_chunk_tokens(draft: DraftShape, setting: Setting) -> int:
    """The same for a draft that is planned."""
    rows = 1 if draft.target_per_row else draft.rows_per_token
    return loss_chunk_tokens(rows * draft.vocab_size * ITEM_BYTES[setting.precision], setting.one_memory)


def rank_memory(draft: DraftShape, target: TargetShape, setting: Setting, lengths: tuple[int, ...]) -> RankMemory:
    """Peak of a rank: of its start without a checkpoint, or of an optimizer step (not the first) on packed samples of
    these lengths, all tokens supervised."""
    exchanged = int(draft.kept.exchanged * sum(lengths)) if setting.context > 1 else 0
    lengths = tuple(-(-length // setting.context) for length in lengths)
    item, tokens = ITEM_BYTES[setting.precision], sum(lengths)
    table = target.hidden_size * item
    heads = table * draft.vocab_size + (table * target.vocab_size if setting.whole_head else 0)
    copies = setting.prefetch_steps + 2 if setting.one_memory or setting.on_device else 2
    activations, loss = _of_batch(draft, target, setting, lengths)
    captured = setting.stored_bytes_per_token(target.hidden_size)
    # Restored once more, for the micro-batch that is computed.
    rows = setting.aux_count + 1 + setting.embedded
    restored = rows * target.hidden_size * RESTORED_BYTES if setting.stored == "float8" else 0
    share = -(-draft.parameters // setting.divided) * FLOAT
    saved = -(-draft.matrix_parameters // setting.divided) * FLOAT if setting.muon else 0
    # Divided, a draft is still put together for every micro-batch, and its gradients before they are reduced.
    gathered = draft.parameters * FLOAT if setting.divided > 1 else 0
    step = RankMemory(
        weights=share + gathered,
        gradients=share + gathered,
        optimizer=share * MOMENTS - saved,
        averaged=share,
        frozen_tables=draft.frozen * FLOAT + draft.frozen_embeddings * item + heads,
        cast_weights=draft.matrix_parameters * item if item < FLOAT else 0,
        features=tokens * (copies * captured + restored),
        activations=activations + exchanged,
        loss=loss,
    )
    return step.model_copy(update={"building": max(0, _building(draft, target, setting) - step.total)})


def _building(draft: DraftShape, target: TargetShape, setting: Setting) -> int:
    """Bytes while models.training.start builds the draft and the projection; 0 where the host's memory is not planned.

    Sharded or not, every rank builds all of it.
    """
    if not setting.one_memory:
        return 0
    item = ITEM_BYTES[setting.precision]
    table, rows = target.hidden_size * target.vocab_size, target.hidden_size * draft.vocab_size
    read = table * FLOAT * (1 if target.tied_head else 2)
    # A frozen head over the whole vocabulary shares the memory of the target's.
    own_heads = draft.frozen if draft.vocab_size < target.vocab_size else 0
    cast_embeddings = draft.frozen_embeddings * item if item < FLOAT else 0
    cast_head = table * item if item < FLOAT else 0
    held = read + (draft.parameters + own_heads) * FLOAT + cast_embeddings + rows * item
    # The cast head goes before the averaged weights come, unless the loss reads all of it.
    averaged = draft.parameters * FLOAT
    return held + (cast_head + averaged if setting.whole_head else max(cast_head, averaged))


def _of_batch(draft: DraftShape, target: TargetShape, setting: Setting, lengths: tuple[int, ...]) -> tuple[int, int]:
    """Bytes of activations, and of the loss at its dearest moment: in a chunk, or as the backward begins."""
    rows, kept = sum(draft.rows(length) for length in lengths), draft.kept
    pairs = sum(draft.rows(length) * length for length in lengths)
    loss, formed = _loss(draft, target, setting, sum(lengths), rows)
    if setting.recompute and kept.carried is not None:
        held = int(kept.token * sum(lengths) + kept.carried * rows)
        of_step = rows // draft.rows_per_token
        again = int(kept.step * of_step + kept.inner * min(of_step, RECOMPUTED_ROWS))
        # The last step's output is gone when that step, the first to be computed again, is.
        return held, max(loss, formed + again - int(kept.carried * of_step))
    return int(kept.token * sum(lengths) + kept.row * rows + kept.pair * pairs), loss


def _loss(draft: DraftShape, target: TargetShape, setting: Setting, tokens: int, rows: int) -> tuple[int, int]:
    """Hidden states, gradients and a chunk's peak, and the part of them that exists during the backward pass."""
    item, hidden, vocabulary = ITEM_BYTES[setting.precision], draft.hidden_size or target.hidden_size, draft.vocab_size
    positions = rows if draft.target_per_row else tokens
    chunk = min(setting.chunk_tokens or planned_chunk_tokens(draft, setting), positions)
    logits = int(rows / max(1, positions) * chunk * vocabulary * item)
    wide = chunk * (target.vocab_size if setting.whole_head else vocabulary)
    of_target = chunk * vocabulary * FLOAT
    projecting = of_target + wide * (FLOAT + (item if item < FLOAT else 0))
    block = min(BLOCK_BYTES[setting.one_memory], logits * FLOAT // item)
    comparing = logits + of_target + (BLOCKS + (item < FLOAT) + MASS_BLOCKS * setting.whole_head) * block
    by_head = hidden * vocabulary * FLOAT if draft.trains_head else 0
    cast_head = hidden * vocabulary * item if item < FLOAT and draft.trains_head else 0
    # The loss reads the target's states as they are read back.
    read = max(STORED_BYTES[setting.stored], RESTORED_BYTES)
    outputs = int(draft.kept.output * rows) + positions * target.hidden_size * read
    states = rows * hidden * item
    # Chains hand their hidden states over, and the gradients take their memory; blocks of rows keep both.
    formed = outputs + states * (2 if draft.target_per_row else 1) + by_head
    return formed + cast_head + max(projecting, comparing), formed


def cache_tokens(longest_tokens: int, groups: int = 1) -> int:
    """Tokens of KV cache that an engine needs to prefill without pause: two chunks, or two of the longest samples.

    `groups`: of its ranks, which compute attention for requests of their own; each of them has such a cache.
    """
    return 2 * max(CHUNK_TOKENS // groups, longest_tokens)


def engine_static(memory_bytes: int, tensor_parallel: int, chunk_tokens: int | None = None) -> int:
    """Bytes of a GPU that SGLang gives to weights and KV cache where no --mem-fraction-static is set.

    This is the default of SGLang 0.5.23 (srt/arg_groups/memory_hook.py, handle_gpu_memory_settings) without what it
    reserves for CUDA graphs, most of which generators disable. `chunk_tokens`: --chunked-prefill-size; None: SGLang's
    own choice.
    """
    memory_mib = memory_bytes / MIB
    if chunk_tokens is None:
        chunk_tokens = next((chunk for below, chunk in ENGINE_CHUNKS if memory_mib < below), ENGINE_LARGEST_CHUNK)
    reserved = 512 + 1.5 * max(chunk_tokens, 2048) + 128 * tensor_parallel
    if memory_mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return max(0, int((memory_mib - reserved) * MIB))


def generator_static(
    target: TargetShape, precision: Precision, longest_tokens: int, devices: int, groups: int = 1
) -> int:
    """Bytes of weights and KV cache on each of a generator's `devices`, in `groups` of data-parallel attention."""
    return held_static(target, precision, cache_tokens(longest_tokens, groups), devices, groups)


def held_static(target: TargetShape, precision: Precision, cached_tokens: int, devices: int, groups: int = 1) -> int:
    """Bytes of weights and of a KV cache of `cached_tokens` on each of a generator's `devices`."""
    cached = target.cache_per_token * cached_tokens * ITEM_BYTES[precision]
    divided = 1 if target.latent_cache else max(1, devices // groups)
    return target.weight_bytes(precision, groups) // devices + cached // divided


def generator_memory(
    target: TargetShape, precision: Precision, longest_tokens: int, devices: int, groups: int = 1
) -> int:
    """Bytes of each of a generator's `devices`, with a forward's activations and CUDA's own."""
    rows = max(CHUNK_TOKENS, longest_tokens) * PREFILL_ROWS
    forward = rows * target.hidden_size * ITEM_BYTES[precision]
    return generator_static(target, precision, longest_tokens, devices, groups) + forward + int(RESERVED)


def usable(memory_bytes: int) -> int:
    """What of a GPU's memory can be planned."""
    return int((memory_bytes - RESERVED) * FRAGMENTS)


def longest_sample(draft: DraftShape, target: TargetShape, setting: Setting, memory_bytes: int) -> int:
    """Tokens of the longest sample that a rank of so much memory trains alone; 0 where not even one token fits."""

    def fits(tokens: int) -> bool:
        return rank_memory(draft, target, setting, (tokens,)).total <= usable(memory_bytes)

    return bisect_left(range(1, 2**30), True, key=lambda tokens: not fits(tokens))
