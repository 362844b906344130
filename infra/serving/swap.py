"""What is to be sent to a running server so that it serves another version."""

import subprocess
import sys
from pathlib import Path

from infra.quantities import byte_size

MODULE = "models.export.swap"
READ_S = 600.0
MOST_BYTES = 2 * 2**30
"""Of one request, which holds a copy for each rank; requests wait while a server reads it."""


class CannotSwapError(Exception):
    """Why a server has to be restarted for a version."""


def changed_weights(old: Path, new: Path, ranks: int) -> str:
    """The weights of the version in `new` that differ from those in `old`, as each of a server's `ranks` reads them.

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
    if ranks * len(done.stdout) > MOST_BYTES:
        sent = byte_size(ranks * len(done.stdout))
        raise CannotSwapError(f"{sent} would have to be sent to {ranks} ranks, more than {byte_size(MOST_BYTES)}")
    return done.stdout
