"""YAML that people write: whatever is wrong with it is said in a sentence."""

from pathlib import Path
from typing import Any

import yaml

from infra.refusal import Refusal

LARGEST_BYTES = 2**20


def read_yaml(path: Path, what: str, such_as: str) -> Any:
    """The content of a short file. Raises Refusal, which calls it `what` and names a file `such_as` it should be."""
    try:
        if not path.is_file():
            raise Refusal(f"no {what} at {path}: give a YAML file, {such_as}")
        if path.stat().st_size > LARGEST_BYTES:
            raise Refusal(f"{path} is larger than 1 MiB: a {what} is a short YAML file, so check the path")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Refusal(f"{path} is not UTF-8 text ({error.reason} near byte {error.start}): convert it") from error
    except (OSError, ValueError) as error:
        if isinstance(error, Refusal):
            raise
        raise Refusal(f"{str(path)[:200]!r} cannot be read ({error}): check the path and its permissions") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, place: str) -> Any:
    """What the text says. Raises Refusal, naming `place`."""
    try:
        return yaml.safe_load(text)
    # ValueError: an impossible date, or a number of thousands of digits.
    except (yaml.YAMLError, ValueError, OverflowError, KeyError) as error:
        raise Refusal(f"{place} is not valid YAML: correct it ({error})") from error
    except RecursionError as error:
        raise Refusal(f"{place} is nested too deeply: flatten it") from error
