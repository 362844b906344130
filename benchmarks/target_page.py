"""docs/targets.md from benchmarks/results/targets.json. A test fails when they do not match."""

from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "targets.json"
PUBLISHED = Path(__file__).parent / "results" / "published_targets.json"
PAGE = Path(__file__).parents[1] / "docs" / "targets.md"
WORKS = "yes"
REFUSED = "refused: "
"""Begins a cell of a stage that a run is refused for before it takes GPUs."""
DECODING = ("plain", "chain", "tree", "batch")
COLUMNS: dict[str, tuple[str, ...]] = {
    "prepare": ("prepare",),
    "capture": ("capture", "head"),
    "canary": ("canary",),
    "in bfloat16": ("canary, bfloat16",),
    "large": ("canary, large",),
    "reference decoding": DECODING,
    "training": ("training",),
    "export": ("export",),
    "capture in SGLang": ("capture in SGLang",),
    "serving in SGLang": ("serving in SGLang",),
}
"""Measured stages of each column."""
INTRODUCTION = """# Target families

Find your target's family here before you train a draft for it. Each row is a tiny model with random weights and the
family's real architecture, so the table says that the code works, and nothing of acceptance or speed. An empty
cell was not measured yet, the others all were; `python benchmarks/targets.py` measures them again and writes this page.
"Refused": a run with `generator.engine=sglang` is refused before it takes GPUs. Such a target is captured with
`generator.engine=transformers`, and its draft is measured by the reference decoder.

| column | what was done |
|---|---|
| prepare | the target's preparation, as in a run |
| capture | hidden states of three layers, and the head that training reads from the files, against the model's logits |
| canary | all captured layers, the final states and the top tokens against transformers' own forward |
| in bfloat16 | the same with the target in bfloat16 |
| large | the canary of targets above 4 GiB, whose weights are read one by one |
| reference decoding | plain text with and without a cache and in batches; the same by chains, trees, ragged batches |
| training | an EAGLE-3 draft on the target's own texts until its loss has fallen |
| export | written, read back, and decoded with: the target's own text, and proposals of the draft in it |
| capture in SGLang | the canary over all captured layers, then samples, from a real server |
| serving in SGLang | target and exported draft in a real server: the target's own text in verification steps |

Cells of multimodal targets are empty for SGLang where it needs an image processor, which random models do not have.
Their drafts are trained on text alone here. With `data.images` they see the images of the data, tested for
Qwen2.5-VL, Qwen3-VL, Qwen3.5 and Gemma 3 ([Your own target and data](your-target.md#images)).
"""


PUBLISHED_INTRODUCTION = """## Published targets

Told by their `config.json` alone, without weights: the planner's number of weights, in billions; the heads (queries /
keys and values x size) and the width of the EAGLE-3 draft that a recipe of three lines has; whether the target's
miniature can be captured and decoded, which every run tries before anything is loaded; and whether SGLang captures
its class. An empty cell: the planner does not know the configuration, and the recipe has to give the sizes.
"""


def page(result: dict[str, Any], published: dict[str, Any]) -> str:
    """The page of both results."""
    conditions, families = result["conditions"], result["families"].values()
    rows = [_row(family) for family in sorted(families, key=lambda family: family["title"].lower())]
    return "\n".join(
        [
            INTRODUCTION,
            f"Last measured on {conditions['date']}, {conditions['hardware']}, in float32 unless a column says "
            f"otherwise: PyTorch {conditions['torch']}, transformers {conditions['transformers']}, SGLang "
            f"{conditions['sglang']} on a CPU with the tests' kernels for speculation and for gpt-oss's attention "
            "sinks.",
            "",
            f"| target | {' | '.join(COLUMNS)} |",
            f"|---{'|---' * len(COLUMNS)}|",
            *rows,
            "",
            "## What does not work, and why",
            "",
            "| target | stage | reason |",
            "|---|---|---|",
            *(line for family in families for line in _reasons(family)),
            "",
            *_published(published),
            "",
        ]
    )


def _published(result: dict[str, Any]) -> list[str]:
    conditions, names = result["conditions"], ("weights", "draft", "miniature", "SGLang")
    rows = [[name, *(cells.get(column, "") for column in names)] for name, cells in result["targets"].items()]
    return [
        PUBLISHED_INTRODUCTION,
        f"Tried on {conditions['date']}: transformers {conditions['transformers']}, SGLang {conditions['sglang']}.",
        "",
        "| target | weights (billions) | draft layer | miniature | captured by SGLang |",
        "|---|--:|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _row(family: dict[str, Any]) -> str:
    cells = [_cell(family["stages"], stages) for stages in COLUMNS.values()]
    return f"| {family['title']} | {' | '.join(cells)} |"


def _cell(measured: dict[str, str], stages: tuple[str, ...]) -> str:
    found = [measured[stage] for stage in stages if stage in measured]
    if not found:
        return ""
    if all(cell.startswith(REFUSED) for cell in found):
        return "refused"
    return WORKS if len(found) == len(stages) and set(found) == {WORKS} else "**no**"


def _reasons(family: dict[str, Any]) -> list[str]:
    reasons = dict[str, list[str]]()
    for stage, cell in family["stages"].items():
        if cell != WORKS:
            reasons.setdefault(cell.removeprefix(REFUSED).replace("|", "/"), []).append(stage)
    return [f"| {family['title']} | {', '.join(stages)} | {reason} |" for reason, stages in reasons.items()]
