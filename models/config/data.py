"""Which text becomes samples, and how."""

from typing import Literal

from pydantic import ConfigDict, Field

from infra.config import Address, StrictConfig


class RegenerationConfig(StrictConfig):
    """Answers by the target itself in place of the given ones: what a draft meets when it serves."""

    model_config = ConfigDict(title="Regeneration")

    temperature: float = Field(default=0.7, ge=0, le=100, description="0 is greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_new_tokens: int = Field(default=1024, ge=1, le=2**20, description="Longest answer, in tokens.")
    prompt_tokens: int = Field(
        default=32, ge=1, le=2**24, description="Of plain text, so many tokens are kept as the prompt."
    )
    thinking: Literal["keep", "strip"] = Field(
        default="keep", description="What an answer says before `</think>`: part of the sample, or left out."
    )


class DataConfig(StrictConfig):
    """Prompts in, samples out."""

    source: Address = Field(
        default="python-docs",
        description="A `.jsonl`, `.json` or `.parquet` file of conversations (`conversations` or `messages`), of "
        "`text`, or of `input_ids` with `loss_mask`; a `.txt` file with blank lines between documents; a folder of "
        "such files; here or at an address like s3://bucket/prompts/. "
        "hf://datasets/OWNER/NAME[@REVISION]?config=C&split=S: a dataset of the Hugging Face Hub. `python-docs`: the "
        "documentation that every Python carries.",
    )
    exclude: tuple[Address, ...] = Field(
        default=(),
        description="Benchmark prompts: documents that hold one of them, exactly or nearly, are left out and counted. "
        "Sources as above, or files of `turns`, `question`, `problem` or `prompt`; the suites of `promotion.suites` "
        "are left out without being named here.",
    )
    turns: Literal["all", "last"] = Field(
        default="all", description="Of a conversation, the answers that are learned: all of them, or the last one."
    )
    thinking: Literal["keep", "strip", "mask"] = Field(
        default="keep",
        description="Reasoning in given answers (`<think>...</think>`, `reasoning_content`): learned, left out, or "
        "shown and not learned.",
    )
    chat_template: Literal["tokenizer", "none"] = Field(
        default="tokenizer",
        description="`tokenizer`: the target's own template. `none`: plain text, every token supervised, or tokens "
        "with their own mask.",
    )
    max_tokens: int = Field(default=1024, ge=8, le=2**24, description="Longest sample, in tokens.")
    min_tokens: int = Field(default=8, ge=2, le=2**24, description="Shorter samples are left out and counted.")
    overlong: Literal["drop", "truncate", "split"] = Field(
        default="truncate",
        description="What happens to a longer sample; counted either way. `split` is for plain text.",
    )
    max_refused_share: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Conversations that the chat template cannot render are left out and counted; above this share of "
        "them the run is refused.",
    )
    regeneration: RegenerationConfig | None = Field(
        default=None, description="Set it to train on the target's own answers to these prompts."
    )
    heldout_share: float = Field(
        default=0.1, gt=0, lt=0.5, description="Held out by a rule: the last share by content hash."
    )
    max_samples: int | None = Field(
        default=None, ge=1, le=1_000_000_000, description="Use at most this many training samples (first by hash)."
    )
