"""The small typed records that pass between processes, defined once.

Every process imports this module; it knows ids, sizes, paths and numbers, never tensors.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from infra.config import TransportConfig, left_out
from infra.refusal import Refusal

HELDOUT_LENGTH = "heldout_acceptance_length"
"""Key of the lines of `metrics.jsonl` whose steps were measured on held-out text."""
HELDOUT_SEEN = "heldout_image_acceptance_length"
"""The same after held-out prompts with images."""

Ranges = tuple[tuple[int, int], ...]
"""Numbers, as the first and the last of each range, ascending: few where most numbers follow each other."""


class Record(BaseModel):
    """A frozen, strict record that is written as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def read(cls, path: Path):
        """Read the record back from the JSON file at `path`. Raises Refusal for a damaged one."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (IsADirectoryError, PermissionError, ValidationError) as error:  # any other error is the machine's
            why = error.strerror if isinstance(error, OSError) else error.errors()[0]["msg"]
            raise Refusal(
                f"{path} is damaged, or of another version of Draftsmith ({why}): restore it, or start a new run"
            ) from error


class TargetRecord(Record):
    """A target as a plain Hugging Face folder on local disk."""

    name: str
    path: str
    revision: str
    """Hash of the folder's weights and configuration, or the Hub's commit."""
    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    licence: str
    eos_ids: tuple[int, ...] = ()
    """Tokens that end the target's answers."""
    quantization: str | None = None
    """Method and format of a quantized checkpoint (models/targets/quantization.py); None: floating-point numbers."""
    text_only: bool = False
    """Whether the target reads images or sound, and the run's draft sees nothing of them (no `data.images`)."""
    media_ids: tuple[int, ...] = ()
    """Placeholder tokens of images, video and sound. Text that holds one is left out."""


class Histogram(Record):
    """Counts of values in bins of equal width."""

    width: int
    first: int
    """Lower edge of the first bin."""
    counts: tuple[int, ...]


class SamplesRecord(Record):
    """A tokenized, content-hashed set of samples in the cache."""

    path: str
    dataset_hash: str
    template_hash: str
    train_samples: int
    heldout_samples: int
    train_tokens: int
    longest: int
    """Tokens in the longest training sample."""
    supervised_share: float
    dropped: int
    truncated: int
    unusable: int
    """Conversations left out because nothing in them is supervised."""
    broken: int = 0
    """Records left out because they cannot be read."""
    refused: int = 0
    """Conversations left out because they hold more than text, or the chat template cannot render them."""
    refusals: tuple[str, ...] = ()
    """Place and reason of the first broken and refused ones; refused.txt in the folder lists all."""
    reasoning_dropped: int = 0
    """Conversations with reasoning that the chat template has no place for."""
    split: int = 0
    """Documents cut into several samples."""
    duplicates: int = 0
    """Documents or samples that occurred before, or on the held-out side, and were left out."""
    benchmark_prompts: int = 0
    """Documents left out because they hold a benchmark's prompt, exactly or nearly."""
    compared_prompts: int = 0
    """Distinct prompts that documents were compared with."""
    thinking: int = 0
    """Training samples of conversations with reasoning in them."""
    with_images: int = 0
    """Training samples with images in them."""
    unanswered: int = 0
    """Training samples that are prompts, answered while captured; their tokens count as the most they may have."""
    source_hash: str = ""
    """Hash of the source's files."""
    source_revision: str | None = None
    """The commit, where a dataset of the Hub was read."""
    tokenizer_hash: str = ""
    """Hash of the files that determine tokenization."""
    lengths: Histogram | None = None
    """Tokens of the training samples."""
    supervised: Histogram | None = None
    """Supervised tokens of each."""
    turns: Histogram | None = None
    """Assistant turns of each sample; None for plain text or tokens."""


class RegeneratedRecord(Record):
    """`regenerated.json`: the target's own answers to the recipe's prompts."""

    path: str
    """JSONL in the cache."""
    documents: int
    duplicates: int
    """Documents left out because another one asks the same, or goes on from there."""
    tokens: int  # generated ones
    cut: int
    """Documents with an answer that reached the length limit."""
    refused: int = 0
    """Documents left out: more than text, a chat template that cannot render them, a prompt that is too long."""
    refusals: tuple[str, ...] = ()
    """Place and reason of the first."""
    ended_early: int = 0
    """Documents whose first answers are there, and whose later prompts cannot be used: most are too long."""
    engine: str
    settings: Mapping[str, float | int | str]
    wall_s: float
    unanswered: int = 0
    """Prompts that are answered while they are captured."""
    not_asked: int = 0
    """Dialogues that `data.max_samples` does not need."""
    source_revision: str | None = None
    """The commit, where the prompts came from a dataset of the Hub."""

    @property
    def summary(self) -> str:
        """One line for people."""
        shown = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        return (
            f"regenerated: {self.documents} documents, {self.tokens} tokens by {self.engine} in {self.wall_s:.0f} s, "
            f"{self.cut} cut at the limit, {self.duplicates} duplicates left out, {self.refused} refused ({shown})"
            + (f"; {self.ended_early} end before their last turn, most at data.max_tokens" if self.ended_early else "")
            + (f"; {self.unanswered} prompts are answered while they are captured" if self.unanswered else "")
            + (f"; {self.not_asked} not asked, because data.max_samples needs no more" if self.not_asked else "")
            + "".join(f"\n  left out: {refusal}" for refusal in self.refusals)
        )


class BufferRecord(Record):
    """One named buffer inside an object."""

    name: str
    nbytes: int
    xxh3: str
    """Concatenated checksums of its blocks (infra.transport.base)."""


class ObjectRecord(Record):
    """Location and checksums of an object in a transport."""

    key: str
    """`run/epoch/ordinal/attempt`."""
    location: str
    buffers: tuple[BufferRecord, ...]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)


class CaptureSpec(Record):
    """What an engine's capture plugin has to know of a run."""

    transport: TransportConfig
    run: Path
    """The run's folder."""
    aux_count: int
    hidden_size: int
    dtype: str
    """Data type of the stored hidden states."""
    top_token: bool
    """Whether the target's top token at every position belongs to them."""
    embedded: bool
    """Whether the embeddings that the target reads belong to them."""


class CaptureReply(Record):
    """What the capture plugin answers for one sample: its record, or why there is none and what is at fault."""

    record: ObjectRecord | None = None
    put_s: float = 0.0
    """Seconds of writing to the transport."""
    error: str | None = None
    fault: Literal["sample", "engine", "setting"] = "engine"
    """Of an error. `sample`: this sample cannot be captured. `setting`: a person must change the server's. `engine`:
    everything else, such as a full store or a lost device."""


class SampleSlot(Record):
    """One sample's place in an epoch, as it is entered into the ledger."""

    ordinal: int
    sample: int
    """Index into the sample set."""
    tokens: int
    """Of a prompt that is answered while it is captured: the most that it may have."""


class Lease(Record):
    """A generator's right to capture one sample."""

    epoch: int
    ordinal: int
    sample: int
    tokens: int
    attempt: int
    nbytes: int
    """Bytes reserved in the budget: tokens x bytes per token."""
    answer: tuple[int, ...] | None = None
    """Of a prompt that the target answered before, the tokens that follow it in the sample."""


class PlannedSample(Record):
    """One sample of a planned optimizer step."""

    epoch: int
    ordinal: int
    sample: int
    tokens: int
    rank: int  # or group of ranks, where several share a sample
    micro_batch: int
    object: ObjectRecord
    answer: tuple[int, ...] | None = None
    """See `Lease.answer`."""


class StepPlan(Record):
    """One optimizer step: who trains which sample in which micro-batch."""

    step: int
    epoch: int
    micro_batches: int
    """Equal on all ranks."""
    samples: tuple[PlannedSample, ...]

    def of(self, rank: int, micro_batch: int) -> tuple[PlannedSample, ...]:
        """The samples of one rank's micro-batch; empty means weight 0."""
        return tuple(s for s in self.samples if s.rank == rank and s.micro_batch == micro_batch)


class CheckpointRecord(Record):
    """A committed checkpoint, as the ledger holds it."""

    step: int
    path: str
    manifest_hash: str
    incarnation: int


class SampleProgress(Record):
    """Number of a run's samples in each state."""

    pending: int = 0
    leased: int = 0
    ready: int = 0
    taken: int = 0
    consumed: int = 0
    quarantined: int = 0
    bytes_held: int = 0
    attempts: int = 0

    @property
    def total(self) -> int:
        return self.pending + self.leased + self.ready + self.taken + self.consumed + self.quarantined


class StoreRecord(Record):
    """`store.json`: where a run's Mooncake store is."""

    master: str
    """host:port of its master."""
    web: str
    """host:port at which the master lists keys."""
    protocol: Literal["auto", "rdma", "tcp"]
    """Settled by the first part before any of them answers: the flow's machine may have other devices."""
    folder: str
    """In shared memory of each part's machine: where it makes its memory."""
    names: str
    """Folder in which each part writes the name that Mooncake gave it."""
    nbytes: int
    """Of each part."""
    parts: int = 1
    """Processes that hold the memory, one for each of the trainer's machines."""


class CaptureRates(Record):
    """What generators captured in a stretch of time."""

    tokens: int
    prefill_s: float
    """Seconds of prefilling, summed over samples."""
    put_s: float
    """Seconds of writing to the transport, summed over samples."""
    generators: int


class SideRates(Record):
    """Possible rate of each side of the data path, in tokens per second; None before it was measured."""

    inference: float | None
    transport: float | None
    training: float | None
    data_wait_share: float
    """Share of the trainer's time spent waiting for samples."""
    generators: int
    ranks: int


class GeneratorsChange(Record):
    """A line of `generators.jsonl`: generators came or went."""

    at: float
    """Seconds since 1970."""
    generators: int
    """How many there are since."""
    why: str


def generators_changes(path: Path) -> tuple[GeneratorsChange, ...]:
    """All changes of a run, in order; empty before training."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return tuple(GeneratorsChange.model_validate_json(line) for line in lines)


class MoreData(Record):
    """What twice the data would add to the acceptance length on held-out text, or why that cannot be told."""

    lower: float | None = None
    """End of a band of 90 %, as `upper`."""
    upper: float | None = None
    why: str = ""
    """Empty where the band is known."""

    @property
    def in_words(self) -> str:
        if self.lower is None or self.upper is None:
            return f"not known what it would bring: {self.why}"
        return f"{self.lower:+.2f} to {self.upper:+.2f} tokens per verification step on held-out text (90 % confidence)"


class TrainingResult(Record):
    """What the trainer leaves behind at the end of a run."""

    _gone = left_out("step_s")
    steps: int
    tokens: int
    """Target tokens trained on, over all epochs."""
    wall_s: float
    """Seconds inside optimizer steps, data wait included."""
    data_wait_s: float
    checkpoint: str
    """Folder of the final checkpoint."""
    final_loss: float
    acceptance_by_position: tuple[float, ...]
    vocabulary_coverage: float
    """Share of supervised positions whose target argmax is in the draft vocabulary."""
    token_coverage: float | None = None
    """Share of the samples' supervised tokens that the draft vocabulary holds."""
    checkpoint_stall_s: float
    """Seconds that training stood still for a checkpoint, on average since the trainer's last start."""
    peak_gpu_bytes: int | None = None
    """Peak of torch's allocator over all ranks' GPUs since then; None without GPUs."""
    rates: SideRates
    more_data: MoreData | None = None
    """None where held-out text was not measured."""

    @property
    def data_wait_share(self) -> float:
        """Share of the training time spent waiting for data."""
        return self.data_wait_s / self.wall_s if self.wall_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s if self.wall_s else 0.0
