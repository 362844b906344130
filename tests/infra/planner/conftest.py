"""What benchmarks have and tests need too: a trainer's measured memory."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
