"""Which text becomes samples, and how."""

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

from infra.config import Address, AtLeastOne, Share, StrictConfig, Tokens
from infra.refusal import Refusal

OWN_TEMPLATE, NO_TEMPLATE = "tokenizer", "none"
"""Values of `data.chat_template` that are no files."""
LIVE = "live"
"""`data.source` of a run that learns from servers' users."""
PLAIN_BATCH = 16
"""Dialogues that transformers answers together."""
TemplateArgument = bool | int | float | str | tuple[str, ...]
"""A value that a recipe passes to the chat template."""


class RegenerationConfig(StrictConfig):
    """The target's own answers in place of the given ones: the text that a draft meets in service."""

    model_config = ConfigDict(title="Regeneration")

    temperature: float = Field(default=0.7, ge=0, le=100, description="Sampling temperature; 0 is greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Top-p, applied after temperature; 1 is off.")
    max_new_tokens: int = Field(
        default=1024,
        ge=1,
        le=2**20,
        description="Longest answer, in tokens; a shorter one near the end of the target's context.",
    )
    prompt_tokens: Tokens = Field(default=32, description="Tokens of plain text that are kept as the prompt.")
    capture: bool = Field(
        default=False,
        description="Answer and capture in one pass, while the draft trains: hidden states are taken as the target "
        "writes. Twice the held-out share, 32 at least, is answered before, for the held-out part and the draft's "
        "vocabulary. Of a conversation the last answer is generated, after the given ones.",
    )


class DataConfig(StrictConfig):
    """Prompts in, samples out."""

    source: Address = Field(
        default="python-docs",
        description="A `.jsonl`, `.json` or `.parquet` file of conversations (`conversations` or `messages`), of "
        "`text`, or of `input_ids` with `loss_mask`; a `.txt` file with blank lines between documents; a folder, "
        "of which only the files of the first kind that it holds are read (.parquet, .jsonl, .json, .txt), and none "
        "whose path below it has a part that begins with `.` or `_`; linked folders are entered. `.ndjson` is another "
        "name of `.jsonl`, and all but Parquet may be compressed (`.gz`, `.bz2`, `.xz`, `.zst`). It is local or at "
        "an address like s3://bucket/prompts/ or https://host/prompts.jsonl. "
        "hf://datasets/OWNER/NAME[@REVISION]?config=C&split=S: a dataset of the Hugging Face Hub. `python-docs`: the "
        "documentation that comes with Python. `live`: what users ask the servers of generator.live from now on, with "
        "what they are answered; a run learns `max_samples` of it.",
    )
    exclude: tuple[Address, ...] = Field(
        default=(),
        description="Benchmark prompts: documents that contain one, exactly or nearly, are left out and counted. "
        "Sources as above, or files of `turns`, `question`, `problem` or `prompt`. The suites of `promotion.suites` "
        "are always excluded.",
    )
    images: Address | None = Field(
        default=None,
        description="Folder below which the source's paths of images lie, local or at an address; `embedded`: images "
        "lie inside the records alone (`data:` addresses, bytes in Parquet). Conversations with images are then "
        "learned with them. Default: they are left out.",
    )
    turns: Literal["all", "last"] = Field(
        default="all",
        description="Which answers of a conversation are learned: all of them, or only the last. Empty answers "
        "and those with `weight: 0` are never learned.",
    )
    thinking: Literal["keep", "strip", "mask"] = Field(
        default="keep",
        description="Reasoning in answers (`<think>...</think>`, `reasoning_content`, `thinking`): learned, removed "
        "from given answers, or shown but not learned.",
    )
    chat_template: Address = Field(
        default=OWN_TEMPLATE,
        description="`tokenizer`: the target's own chat template. A path: the Jinja file that the target is served "
        "with. `none`: plain text with every token supervised, or tokens with their own mask.",
    )
    template_arguments: dict[str, TemplateArgument] = Field(
        default={},
        description="Arguments of the chat template, as the server passes them: `{enable_thinking: false}`, "
        "`{reasoning_effort: high}`.",
    )
    max_tokens: int = Field(
        default=1024, ge=8, le=2**24, description="Longest sample, in tokens; at most the target's context."
    )
    min_tokens: int = Field(default=8, ge=2, le=2**24, description="Shortest sample, in tokens; others are left out.")
    overlong: Literal["drop", "truncate", "split"] = Field(
        default="truncate", description="What happens to longer samples, which are counted; `split` needs plain text."
    )
    max_broken_share: Share = Field(
        default=0.2,
        description="The run is refused when a larger share of the records is broken (no JSON, no UTF-8, no known "
        "keys); fewer are left out, counted and listed.",
    )
    max_refused_share: Share = Field(
        default=0.9,
        description="The run is refused when a larger share of the conversations holds images, cannot be rendered by "
        "the chat template, or fills the target's context; fewer are left out, counted and listed.",
    )
    regeneration: RegenerationConfig | None = Field(
        default=None, description="Train on the target's own answers to these prompts; default: on the given answers."
    )
    heldout_share: float = Field(
        default=0.1,
        gt=0,
        lt=0.5,
        description="Share of dialogues that are held out, with all that begin with the same question.",
    )
    max_samples: AtLeastOne | None = Field(
        default=None,
        description="Most training samples; default: all. With `regeneration` no more prompts are answered than these "
        "and the held-out part need, and a tenth to spare.",
    )

    @model_validator(mode="after")
    def _regenerated_as_generated(self) -> Self:
        if self.regeneration is not None and self.regeneration.capture and self.images is not None:
            raise Refusal(
                "data.regeneration.capture answers prompts of text alone: leave it out, and the target answers about "
                "the images before they are captured"
            )
        if self.chat_template == NO_TEMPLATE and self.images is not None:
            raise Refusal(
                "data.images: only a chat template knows where images stand: leave data.chat_template or data.images "
                "out"
            )
        if self.source == LIVE and (obstacle := self._obstacle_to_live()):
            raise Refusal(f"data.source=live learns what the servers read and write as it is: {obstacle}")
        if self.regeneration is not None and self.regeneration.capture and self.thinking != "keep":
            raise Refusal(
                f"data.regeneration.capture learns what the target writes as it writes it, and data.thinking is "
                f"{self.thinking}: set it to keep, or leave capture out"
            )
        if self.regeneration is not None and self.thinking == "strip":
            raise Refusal(
                "data.thinking=strip would change what the target generated (data.regeneration): set it to mask, or "
                "let the target answer without reasoning, for instance by data.template_arguments={enable_thinking: "
                "false}"
            )
        return self

    def _obstacle_to_live(self) -> str:
        if self.max_samples is None:
            return "set data.max_samples to the number of requests that a run learns from"
        if self.regeneration is not None or self.images is not None:
            return "leave data.regeneration and data.images out"
        if self.thinking != "keep" or self.turns != "all" or self.overlong != "truncate":
            return "leave data.thinking, data.turns and data.overlong out"
        return ""

    @property
    def answered_before(self) -> float:
        """Share of the texts that are there before the training (see `RegenerationConfig.capture`)."""
        one_pass = self.source == LIVE or (self.regeneration is not None and self.regeneration.capture)
        return min(1.0, 2 * self.heldout_share) if one_pass else 1.0
