"""What benchmarks have and tests need too: two hosts, and a driver in the flow's place."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
