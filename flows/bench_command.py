"""`draftsmith bench`: what a draft accepts and how fast it decodes, on suites of prompts."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from infra.refusal import Refusal


def bench(  # noqa: PLR0913, PLR0917 (the options of a command line)
    target: Annotated[str, typer.Option(help="Folder or Hub id of the target.")],
    draft: Annotated[Path, typer.Option(help="Folder of an exported draft.")],
    suite: Annotated[
        list[str] | None,
        typer.Option(help="spec-bench, mt-bench, gsm8k, humaneval, math500, or NAME=SOURCE; may be repeated."),
    ] = None,
    prompts: Annotated[list[Path] | None, typer.Option(help="JSONL or text of your own; may be repeated.")] = None,
    champion_of: Annotated[str | None, typer.Option(help="Compare with the champion of this registered model.")] = None,
    lookahead: Annotated[str, typer.Option(help="Numbers of proposed tokens, for instance 3,5.")] = "4",
    engines: Annotated[str, typer.Option(help="reference, sglang (drafts, greedy, chains), or both.")] = "reference",
    tree: Annotated[str, typer.Option(help="Trees, for instance 3x2x1,dynamic-5-4-16.")] = "",
    temperature: Annotated[str, typer.Option(help="0 is greedy.")] = "0,1",
    batch: Annotated[str, typer.Option(help="Batch sizes whose speed is measured, at most 32; '' for none.")] = "1",
    repeats: Annotated[int, typer.Option(min=3, help="Of every speed measurement.")] = 3,
    num_prompts: Annotated[int, typer.Option(min=2, help="Of each suite, spread over its categories.")] = 48,
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Longer questions are left out.")] = 512,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest continuation.")] = 64,
    chat_template: Annotated[str, typer.Option(help="auto, tokenizer or none.")] = "auto",
    add_bos: Annotated[bool, typer.Option("--add-bos", help="As in the recipe's target.add_bos.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the result here too.")] = None,
    page: Annotated[Path | None, typer.Option(help="Write a Markdown page here.")] = None,
) -> None:
    """Measure a draft beside what needs no training: acceptance by category and context, speed by batch size."""
    command = [sys.executable, "-m", "models.benchmark.standalone"]
    command += [part for one in suite or [] for part in ("--suite", one)]
    command += [part for one in prompts or [] for part in ("--prompts", str(one))]
    command += ["--add-bos"] if add_bos else []
    options = {
        "target": target, "draft": draft, "lookahead": lookahead, "tree": tree, "temperature": temperature,
        "batch": batch, "engines": engines, "repeats": repeats, "num-prompts": num_prompts,
        "prompt-tokens": prompt_tokens, "max-new-tokens": max_new_tokens, "chat-template": chat_template,
        "json": json, "page": page,
    }  # fmt: skip
    command += [f"--{name}={value}" for name, value in options.items() if value is not None]
    with TemporaryDirectory(prefix="draftsmith-bench-") as folder:
        if champion_of:
            command += ["--champion", str(_champion(champion_of, Path(folder)))]
        raise typer.Exit(subprocess.run(command, check=False).returncode)


def _champion(name: str, folder: Path) -> Path:
    """The export of a registered model's champion. Raises Refusal where none serves."""
    from infra.settings import tracking_uri
    from infra.tracking import registry

    found = registry.champion(tracking_uri(), name)
    if found is None:
        raise Refusal(f"--champion-of {name}: no version is champion; `draftsmith drafts list` shows what there is")
    return registry.download(tracking_uri(), found, folder)
