"""Which published targets can be tried, told by their `config.json` alone. Adds to docs/targets.md.

    python benchmarks/published_targets.py FOLDER

`FOLDER/OWNER--NAME/config.json`: configurations as they are published, with ModelOpt's `hf_quant_config.json` where
there is one; they are not part of this repository. For each the planner's number of weights, the layer of an EAGLE-3
draft that a recipe of three lines has, the miniature that a run tries first, and what SGLang's model class can do.
"""

import argparse
import json
import time
from pathlib import Path

import transformers
from target_page import PAGE, PUBLISHED, RESULT, WORKS, page

from infra.files.atomic import write_atomically
from infra.planner.shapes import read_target_shape
from infra.processes.exit import run_main
from infra.provenance import git_sha
from infra.refusal import Refusal
from infra.sglang.command import sglang_version
from models.capture.sglang.model_class import CAPTURED_AS, ask_sglang
from models.config.eagle3 import Eagle3Config
from models.config.recipe import as_recipe
from models.targets.architecture import read_model_config
from models.targets.rehearsal import rehearse


def draft_layer(folder: Path) -> str:
    recipe = {"name": "draft", "target": {"name": str(folder)}, "data": {"source": "texts.jsonl"}}
    draft = as_recipe(recipe, str(folder)).draft
    assert isinstance(draft, Eagle3Config)
    return f"{draft.num_heads} / {draft.num_kv_heads} x {draft.head_dim}, {draft.intermediate_size:,}"


def miniature(folder: Path) -> str:
    try:
        rehearse(read_model_config(folder))
    except (Refusal, ValueError, OSError) as error:
        if "trust_remote_code" in str(error) or "does not recognize" in str(error):
            return f"transformers {transformers.__version__} does not have its architecture"
        return str(error).partition("fails (")[2].partition("); choose")[0] or str(error)
    return WORKS


def captured(folder: Path) -> str:
    (name, *_) = json.loads((folder / "config.json").read_text())["architectures"]
    kind = ask_sglang(CAPTURED_AS.get(name, name))
    if kind.name is None:
        return "no model class"
    return WORKS if kind.captures else "not captured"


def measured(folder: Path) -> dict[str, str]:
    cells = {"miniature": miniature(folder), "SGLang": captured(folder)}
    try:
        cells["weights"] = f"{read_target_shape(folder / 'config.json').parameters / 1e9:,.1f}"
        cells["draft"] = draft_layer(folder)
    except Refusal:
        pass  # a setting that the planner reads is missing: the recipe has to name it
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    targets = dict[str, dict[str, str]]()
    for file in sorted(parser.parse_args().folder.glob("*/config.json")):
        name = file.parent.name.replace("--", "/")
        targets[name] = measured(file.parent)
        print(name, targets[name], flush=True)
    conditions = {
        "date": time.strftime("%Y-%m-%d"),
        "transformers": transformers.__version__,
        "sglang": sglang_version(),
    }
    result = {"commit": git_sha(), "conditions": conditions, "targets": targets}
    write_atomically(PUBLISHED, json.dumps(result, indent=1) + "\n")
    write_atomically(PAGE, page(json.loads(RESULT.read_text()), result))


if __name__ == "__main__":
    run_main(main)
