"""`python -m models.data.preview SOURCE`: what a source of text holds, and how a chat template renders it."""

import argparse
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path

from rich.console import Console
from rich.text import Text

from infra.processes.exit import run_main
from infra.refusal import Refusal
from infra.terminal import visible
from models.config.data import NO_TEMPLATE, DataConfig
from models.data.check import check_data
from models.data.conversations import training_documents
from models.data.tokenizer import read_tokenizer

PREVIEWED_DOCUMENTS = 64
"""First documents among which samples are looked for."""
TOKENIZER_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]


def preview(config: DataConfig, tokenizer_folder: Path, samples: int) -> Iterator[Text]:
    """The first samples of the source, as `config` renders them with a target's tokenizer: learned text in colour.

    Raises Refusal: the tokenizer cannot be read, or the chat template cannot be used.
    """

    from models.data.loss_mask import runs_of
    from models.data.samples import SampleEncoder

    try:
        tokenizer = read_tokenizer(tokenizer_folder)
    except (ValueError, OSError) as error:
        raise Refusal(f"{tokenizer_folder} holds no tokenizer that can be read ({error}): check --target") from error
    encoder = SampleEncoder(tokenizer, config, add_bos=False)
    documents = islice(training_documents(config), PREVIEWED_DOCUMENTS)
    for number, sample in enumerate(islice(encoder.encode(documents), samples), start=1):
        yield Text(f"sample {number}: {len(sample.tokens)} tokens, {sample.loss_mask.mean():.0%} learned", style="bold")
        edges = [0, *(edge for run in runs_of(sample.loss_mask) for edge in run), len(sample.tokens)]
        for start, end in pairwise(edges):
            if start == end:
                continue
            label, style = ("learned", "green") if sample.loss_mask[start] else ("context", "dim")
            text = visible(str(tokenizer.decode(sample.tokens[start:end].tolist())))
            yield Text("\n".join(f"{label} | {line}" for line in text.split("\n")), style=style)
    yield from (Text(f"left out: {visible(fault)}", style="yellow") for fault in encoder.counts.refusals)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("--chat-template", default="tokenizer")
    parser.add_argument("--max-broken-share", type=float, default=1.0)
    parser.add_argument("--target", help="also show samples: a local Hugging Face folder, or an id of the Hub")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--kind", action="store_true", help="print the kind of the first record only")
    options = parser.parse_args()
    config = DataConfig(
        source=options.source,
        chat_template=options.chat_template,
        overlong="split" if options.chat_template == NO_TEMPLATE else "truncate",
        max_broken_share=options.max_broken_share,
    )
    if options.kind:
        for document in islice(training_documents(config), 1):
            print(document.kind)
        return
    checked = check_data(config)
    for line in checked.lines():
        print(line, flush=True)
    if options.target is not None:
        from models.data.hub import model_folder

        console = Console(highlight=False)
        for text in preview(config, model_folder("--target", options.target, None, TOKENIZER_FILES), options.samples):
            console.print(text, soft_wrap=True)
    raise SystemExit(1 if checked.broken else 0)


if __name__ == "__main__":
    run_main(main)
