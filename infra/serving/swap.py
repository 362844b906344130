"""What is to be sent to a running server so that it serves another version."""

import subprocess
import sys
from pathlib import Path

MODULE = "models.export.swap"
READ_S = 600.0


class CannotSwapError(Exception):
    """Why a server has to be restarted for a version."""


def changed_weights(old: Path, new: Path) -> str:
    """The weights of the version in `new` that differ from those in `old`, as SGLang reads them.

    A process of its own reads them, because this one knows no tensors. Raises CannotSwapError.
    """
    command = [sys.executable, "-m", MODULE, str(old), str(new)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=READ_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CannotSwapError(f"{new} was not read within {READ_S:.0f} s") from error
    if done.returncode != 0:
        last = next(reversed(done.stderr.splitlines()), f"{MODULE} ended with {done.returncode}")
        raise CannotSwapError(last.removeprefix("error: "))
    return done.stdout
