"""`python -m models.benchmark.replay EVIDENCE`: what the gate decides on this evidence. Prints the decision as JSON."""

import argparse
from pathlib import Path

from infra.processes.exit import run_main
from infra.records.acceptance import GateEvidence
from models.benchmark.gate import decide


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evidence", type=Path)
    print(decide(GateEvidence.read(parser.parse_args().evidence)).model_dump_json())


if __name__ == "__main__":
    run_main(main)
