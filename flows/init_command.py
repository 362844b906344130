"""`draftsmith init TARGET SOURCE`: writes a recipe with everything that the target decides."""

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.data_command import kind_of
from infra.refusal import Refusal

if TYPE_CHECKING:
    from models.config.target import TargetConfig

HEAD = """\
# Made by `draftsmith init`. Sizes and layers are the target's; docs/settings.md lists all settings.
"""
LARGE_HIDDEN_SIZE = 1024
"""Hidden size from which a target gets the rate and batch below, as in the shipped recipes for one and two GPUs."""
LARGE_TRAINING = {"learning_rate": 1.0e-4, "samples_per_step": 16}
TRAINING_COMMENT = """\
# The default learning rate and batch are for targets with a hidden size below 1,024.
"""


def init(
    target: Annotated[str, typer.Argument(help="A local Hugging Face folder, or an id of the Hub.")],
    source: Annotated[str, typer.Argument(help="Training text: a file, folder, address or dataset.")],
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Recipe name; default: after the target.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Where to write; default: NAME.yaml.")
    ] = None,
) -> None:
    """Write a recipe for a target and a source of text, and say what to run next."""
    import yaml

    from models.config.recipe import as_recipe
    from models.config.target_settings import completed
    from tasks.division import division

    name = name or re.sub(r"[^a-z0-9._-]+", "-", os.path.basename(os.path.abspath(target)).lower()).strip("-._")
    if not name:
        raise Refusal(f"{target}: a recipe's name has Latin letters and digits, and this has none: choose a --name")
    output = output or Path(f"{name}.yaml")
    if output.exists():
        raise Refusal(f"{output} exists: remove it, or name another file with --output")
    data = _data(source)
    tree = completed({"name": name, "target": {"name": target}, "data": data})
    tree |= _training(as_recipe(tree, str(output)).target)
    divided, why = division(tree)
    tree |= divided
    as_recipe(tree, str(output))
    text = yaml.safe_dump(tree, sort_keys=False, default_flow_style=None, width=110)
    if "learning_rate" in tree.get("training", {}):
        text = text.replace("\ntraining:", f"\n{TRAINING_COMMENT}training:")
    write_output("--output", output, HEAD + text)
    check = ["data", "check", source, "--target", target]
    if "chat_template" in data:
        check += ["--chat-template", data["chat_template"]]
    commands = [check, ["retrain", str(output), "--plan"], ["retrain", str(output)]]
    print(
        f"{output}\n" + (f"{why}\n" if why else "") + "\nnext:",
        *(shlex.join(["draftsmith", *command]) for command in commands),
        sep="\n  ",
    )


def write_output(option: str, path: Path, text: str) -> None:
    """Write a file that a person named with `option`. Raises Refusal where it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Refusal(
            f"{path} cannot be written ({error.strerror}): name a file in a folder that you may write to with {option}"
        ) from error


def _training(target: "TargetConfig") -> dict[str, Any]:
    """The training section for a target of this size; none where the defaults fit, or the size is unknown."""
    from models.config.target_settings import read_settings

    settings = read_settings(target)
    text = settings.get("text_config") or settings
    return {"training": dict(LARGE_TRAINING)} if text.get("hidden_size", 0) >= LARGE_HIDDEN_SIZE else {}


def _data(source: str) -> dict[str, Any]:
    """Settings for the kind of text that the source holds."""
    kind = kind_of(source)
    if not kind:
        check = ["draftsmith", "data", "check", source]
        raise Refusal(f"{source} holds no record that can be used: `{shlex.join(check)}` lists why")
    return {"source": source} | ({"chat_template": "none", "overlong": "split"} if kind != "conversation" else {})
