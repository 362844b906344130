"""Which target families work, stage by stage: tiny random models of the real architectures. Writes docs/targets.md.

    SGLANG_PLATFORM=draftsmith_test_cpu python benchmarks/targets.py [--sglang] [family ...]

Every cell is measured, at the commit that the result names. What is not asked for keeps its cells.
"""

import argparse
import json
import os
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import target_stages as stages
import torch
import transformers
from prepared import prepared_run
from target_families import FAMILIES, Family, write
from target_page import PAGE, PUBLISHED, REFUSED, RESULT, WORKS, page

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.processes.process import ProcessFailedError
from infra.provenance import git_sha, hardware
from infra.refusal import Refusal
from infra.settings import sglang_platform
from infra.sglang.command import sglang_version
from models.benchmark.served import setup_of
from models.capture.sglang.engine import SGLangEngine
from models.drafts.base import Draft
from models.preflight import check_engine
from models.run import PreparedRun
from models.targets.tiny import trained_tiny

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "tiny.yaml"
SMALL = (
    "data.max_samples=24", "data.max_tokens=64", "training.log_steps=4", "training.heldout_steps=0",
    "generator.sglang.start_timeout_s=600", "draft.num_heads=4", "draft.num_kv_heads=2", "draft.head_dim=16",
)  # fmt: skip
CAPTURED = 4
"""Samples that SGLang captures after its canary."""
REASON = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Refusal): .+")
CPU = re.compile(r"triton|active drivers|cuda|TorchNative|platform support|sgl_kernel|on CPU|_cpu\b", re.IGNORECASE)
CPU_ATTENTION = "torch_native_backend.py"
"""What the message of a failure, or its traceback, says that a GPU would not have."""
LONGEST_REASON = 400
SGLANG = ("capture in SGLang", "serving in SGLang")


@dataclass
class Cells:
    """The cells of one family: `WORKS`, or the reason why the stage fails; a stage that cannot be tried has none."""

    stages: dict[str, str] = field(default_factory=dict)

    def measure(self, stage: str, part: Callable[[], object]) -> bool:
        """Run a stage. Returns whether it works."""
        begun = time.monotonic()
        try:
            part()
            self.stages[stage] = WORKS
        except Exception as error:  # noqa: BLE001 (whatever a stage fails of is the result)
            self.stages[stage] = reason(error)
        print(f"  {stage}: {self.stages[stage]} ({time.monotonic() - begun:.1f} s)", flush=True)
        return self.stages[stage] == WORKS


def reason(error: Exception) -> str:
    """One line about a failure; of a process that died, its last exception."""
    lines = str(error).strip().splitlines()
    if isinstance(error, ProcessFailedError):
        lines = [line for line in error.log.read_text().splitlines() if REASON.match(line)][-1:] or lines
        print(str(error))
    text = lines[0].strip() if lines else type(error).__name__
    build = ""
    if isinstance(error, ProcessFailedError):
        attention = any(CPU_ATTENTION in line for line in error.tail)
        build = "SGLang's attention on a CPU: " if attention else "SGLang's CPU build: " if CPU.search(text) else ""
    return build + re.sub(r"/(?:tmp|dev/shm|work)\S*/", "", text)[:LONGEST_REASON]


def measure(family: Family, work: Path, sglang: bool) -> dict[str, str]:
    """The cells of a family; those of SGLang only if asked for."""
    cells, folder, loaded, drafts = Cells(), work / "target", list[stages.Loaded](), list[Draft]()
    write(family, folder, trained_tiny("tiny-llama"))
    if not cells.measure("prepare", partial(stages.prepare, folder)):
        return cells.stages
    if not cells.measure("capture", lambda: loaded.append(stages.load(folder))):
        return cells.stages
    (target,) = loaded
    cells.measure("canary", partial(stages.check_canary, target))
    cells.measure("canary, bfloat16", partial(stages.check_canary_in_bfloat16, target, folder))
    cells.measure("canary, large", partial(stages.check_large, target, folder, work / "converted"))
    cells.measure("head", partial(stages.check_head, target, folder))
    for stage in ("plain", "chain", "tree", "batch"):
        cells.measure(stage, partial(getattr(stages, f"check_{stage}"), target))
    if not cells.measure("training", lambda: drafts.append(stages.train(target, folder))):
        return cells.stages
    cells.measure("export", partial(stages.export, target, folder, *drafts, work / "export"))
    if sglang:
        settings = ["target.source=huggingface", f"target.name={folder}", "generator.engine=sglang"]
        with prepared_run(work / "run", RECIPE, [*SMALL, *settings]) as run:
            measure_in_sglang(cells, run, work / "export", target, servers=not family.wrapper)
    return cells.stages


def measure_in_sglang(cells: Cells, run: PreparedRun, draft: Path, target: stages.Loaded, servers: bool) -> None:
    """Capture and serve in real servers, unless a run with this target would be refused before.

    Without `servers` only the refusal is tried: SGLang wants an image processor, which a random model has none of.
    """
    try:
        check_engine(run, speculates=True)
    except Refusal as refusal:
        cells.stages |= dict.fromkeys(SGLANG, f"{REFUSED}{refusal}")
        print(f"  {refusal}", flush=True)
        return
    if not servers:
        return
    parts = partial(capture_in_sglang, run), partial(serve_in_sglang, run, draft, target)
    for stage, part in zip(SGLANG, parts, strict=True):
        cells.measure(stage, part)


def capture_in_sglang(run: PreparedRun) -> None:
    """The canary over all captured layers, and samples written to the transport."""
    samples, transport = run.open_samples(), run.open_transport()
    with closing(SGLangEngine(run, 0)) as engine:
        engine.check_canary(samples[0].tokens[:32])
        for index in range(CAPTURED):
            record = engine.capture(f"targets/{index}", samples[index].tokens).record
            hidden = run.layout.empty(len(samples[index].tokens))
            transport.get(record, run.layout.views(hidden))
            run.layout.check(hidden, len(samples[index].tokens))


def serve_in_sglang(run: PreparedRun, draft: Path, loaded: stages.Loaded) -> None:
    """Greedy text of the target with its draft is the target's own, and comes in verification steps."""
    sampling = {"temperature": 0.0, "max_new_tokens": stages.NEW_TOKENS, "ignore_eos": True}
    with setup_of(run).serving(draft, stages.LOOKAHEAD) as client:
        for prompt, text in zip(loaded.prompts, loaded.texts, strict=True):
            answer = client.generate(prompt, sampling)
            if answer.tokens != text:
                raise ValueError("the text differs from the target's own")
            if not answer.meta.get("spec_verify_ct"):
                raise ValueError("the server did not speculate")


def record(name: str, sglang: bool) -> None:
    """Measure a family, and write its cells into the result."""
    family = FAMILIES[name]
    print(family.title, flush=True)
    with tempfile.TemporaryDirectory(prefix="draftsmith-targets-") as work:
        cells = measure(family, Path(work), sglang)
    result = json.loads(RESULT.read_text()) if RESULT.is_file() else {"families": {}}
    before = result["families"].get(name, {}).get("stages", {})
    kept = {stage: cell for stage, cell in before.items() if stage.endswith("SGLang") and "export" in cells}
    result["families"][name] = {"title": family.title, "commit": git_sha(), "stages": kept | cells}
    result["conditions"] = {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "sglang": sglang_version(),
    }
    write_atomically(RESULT, json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang", action="store_true", help="also capture and serve in SGLang, a minute each")
    parser.add_argument("families", nargs="*", metavar="family", help=f"of {', '.join(FAMILIES)}; default: all")
    options = parser.parse_args()
    if options.sglang and sglang_platform() is None:
        raise ValueError("set SGLANG_PLATFORM=draftsmith_test_cpu, the test equipment's kernels for speculation")
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    transformers.logging.set_verbosity_error()
    for name in options.families or FAMILIES:
        record(name, options.sglang)
    write_atomically(PAGE, page(json.loads(RESULT.read_text()), json.loads(PUBLISHED.read_text())))


if __name__ == "__main__":
    run_main(main)
