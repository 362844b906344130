"""Which text becomes samples, and how."""

from typing import Literal

from pydantic import ConfigDict, Field

from infra.config import Address, AtLeastOne, Share, StrictConfig, Tokens

PLAIN_BATCH = 16
"""Dialogues that transformers answers together."""


class RegenerationConfig(StrictConfig):
    """The target's own answers in place of the given ones: the text that a draft meets in service."""

    model_config = ConfigDict(title="Regeneration")

    temperature: float = Field(default=0.7, ge=0, le=100, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Top-p, applied after temperature; 1 is off.")
    max_new_tokens: int = Field(default=1024, ge=1, le=2**20, description="Longest answer, in tokens.")
    prompt_tokens: Tokens = Field(default=32, description="Tokens of plain text that are kept as the prompt.")
    thinking: Literal["keep", "strip"] = Field(
        default="keep", description="Whether an answer's reasoning, up to `</think>`, becomes part of the sample."
    )


class DataConfig(StrictConfig):
    """Prompts in, samples out."""

    source: Address = Field(
        default="python-docs",
        description="A `.jsonl`, `.json` or `.parquet` file of conversations (`conversations` or `messages`), of "
        "`text`, or of `input_ids` with `loss_mask`; a `.txt` file with blank lines between documents; a folder of "
        "such files. It is local or at an address like s3://bucket/prompts/. "
        "hf://datasets/OWNER/NAME[@REVISION]?config=C&split=S: a dataset of the Hugging Face Hub. `python-docs`: the "
        "documentation that comes with Python.",
    )
    exclude: tuple[Address, ...] = Field(
        default=(),
        description="Benchmark prompts: documents that contain one, exactly or nearly, are left out and counted. "
        "Sources as above, or files of `turns`, `question`, `problem` or `prompt`. The suites of `promotion.suites` "
        "are always excluded.",
    )
    turns: Literal["all", "last"] = Field(
        default="all", description="Which answers of a conversation are learned: all of them, or only the last."
    )
    thinking: Literal["keep", "strip", "mask"] = Field(
        default="keep",
        description="Reasoning in given answers (`<think>...</think>`, `reasoning_content`): learned, removed, or "
        "shown but not learned.",
    )
    chat_template: Literal["tokenizer", "none"] = Field(
        default="tokenizer",
        description="`tokenizer`: the target's own chat template. `none`: plain text with every token supervised, or "
        "tokens with their own mask.",
    )
    max_tokens: int = Field(default=1024, ge=8, le=2**24, description="Longest sample, in tokens.")
    min_tokens: int = Field(default=8, ge=2, le=2**24, description="Shortest sample, in tokens; others are left out.")
    overlong: Literal["drop", "truncate", "split"] = Field(
        default="truncate", description="What happens to longer samples, which are counted; `split` needs plain text."
    )
    max_refused_share: Share = Field(
        default=0.05,
        description="The run is refused when the chat template cannot render a larger share of the conversations; "
        "fewer are left out and counted.",
    )
    regeneration: RegenerationConfig | None = Field(
        default=None, description="Train on the target's own answers to these prompts; default: on the given answers."
    )
    heldout_share: float = Field(default=0.1, gt=0, lt=0.5, description="Share of documents that are held out.")
    max_samples: AtLeastOne | None = Field(default=None, description="Most training samples; default: all.")
