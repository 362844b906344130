"""What benchmarks have and tests need too: two hosts, and a driver in the flow's place."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[4] / "benchmarks"))
sys.path.append(str(Path(__file__).parent))  # test modules import kept_store from this folder
