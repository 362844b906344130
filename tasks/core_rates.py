"""How fast this machine's cores compute, for plans of runs without GPUs."""

import json
import subprocess
import sys
from functools import cache

RATE_TIMEOUT_S = 120


@cache
def core_rates() -> dict[str, float]:
    """FLOP/s of matrix products on one core of this machine, by precision. The first call takes two seconds."""
    command = [sys.executable, "-m", "models.core_rate"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=RATE_TIMEOUT_S, check=True)
    return json.loads(done.stdout)
