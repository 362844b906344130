"""`python -m models.export.stitch EXPORT TARGET FOLDER`: writes the target with an exported MTP layer."""

import argparse
from pathlib import Path

import torch

from infra.processes.exit import run_main
from models.export.sglang import load_draft
from models.export.stitched import stitch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("export", "target", "folder"):
        parser.add_argument(name, type=Path)
    given = parser.parse_args()
    written = stitch(load_draft(given.export, given.target, torch.float32), given.target, given.folder)
    print(f"{given.folder} is {given.target} with the MTP layer of {given.export}; written again: {', '.join(written)}")


if __name__ == "__main__":
    run_main(main)
