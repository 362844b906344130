"""Our exports in the real vLLM on the CPU: what its own code reads in their settings, and what it accepts of them.

    make vllm
    python benchmarks/vllm_served.py [--prompts 16] [--max-new-tokens 64] [--results FOLDER]

*Settings*: exports of every method and of each kind of attention, read by vLLM's own configuration code; each must have
the features, attention and norms that training used. *Acceptance*: an EAGLE-3 and a DFlash draft of the tiny target,
trained here, are served for a float32 target (`--dtype float32`) and for a bfloat16 one with vLLM's default arguments;
its counters of accepted proposals by position are compared with the reference decoder's, prompt by prompt. Texts may
part at a near-tie in bfloat16; only prompts with the same text are compared. Writes benchmarks/results/vllm.json; exit
status 1 where vLLM reads other settings than training used. About ten minutes on two cores.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from prepared import capture_train_export, prepared_run
from transformers import AutoModelForCausalLM

from infra.files.atomic import write_atomically
from infra.network.ports import HOST
from infra.processes.exit import run_main
from infra.processes.process import Owner
from infra.provenance import git_sha, hardware
from infra.records.data_path import TrainingResult
from infra.refusal import Refusal
from infra.sglang.server import SGLangServer
from models.config.blocks import BlockConfig
from models.config.dflash2 import DFlash2Config
from models.config.draft import parse_draft_config
from models.config.dspark import DSparkConfig
from models.config.recipe import load_recipe
from models.data.prompts import heldout_prompts
from models.decoding.speculative import speculate
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.export.description import speculators_settings, vllm_method
from models.export.served_target import read_served_target
from models.export.sglang import export_checkpoint, load_draft, write_export
from models.targets.model import TargetModel
from models.targets.prepare import prepare_target
from models.targets.weights import read_target_head

ROOT = Path(__file__).parents[1]
RECIPE, RESULTS = ROOT / "recipes" / "tiny.yaml", Path(__file__).parent / "results"
READS = Path(__file__).with_name("vllm_reads.py")
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
LOOKAHEAD, AUX = 4, (0, 1, 2)
START_S, REQUEST_S, TRAIN_S = 300.0, 120.0, 1800.0
LAYER = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 32, "intermediate_size": 256}
EAGLE3 = LAYER | {"method": "eagle3", "vocab_size": 512}
BLOCK = LAYER | {"sliding_window": 64, "mask_token_id": 7}
DFLASH = LAYER | {"method": "dflash", "block_size": LOOKAHEAD + 1, "sliding_window": 64}
DSPARK = BLOCK | {"method": "dspark", "block_size": LOOKAHEAD, "markov_rank": 24}
DFLASH2 = BLOCK | {
    "method": "dflash2", "block_size": LOOKAHEAD + 1, "conv_group_size": 16, "selector_rank": 24, "selector_top_k": 12,
}  # fmt: skip
LATENT = {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
MLA = {"method": "eagle3", "vocab_size": 512, "num_heads": 6, "intermediate_size": 256, "mla": LATENT, "rope_scaling": {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0,
}}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
KINDS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "EAGLE-3": (EAGLE3, AUX),
    "EAGLE-3.1": (EAGLE3 | {"fc_norm": True, "norm_output": True}, AUX),
    "EAGLE-3, whole vocabulary, one norm": (EAGLE3 | {"norm_before_fc": True, "vocab_size": None}, AUX),
    "EAGLE-3, two features": (EAGLE3, (0, 2)),
    "EAGLE-3, one feature": (EAGLE3, (2,)),
    "EAGLE-3, own embeddings": (EAGLE3 | {"train_embeddings": True}, (0, 2)),
    "EAGLE-3 with MLA": (MLA | {"fc_norm": True, "norm_output": True}, (0, 2)),
    "DFlash": (DFLASH | {"layer_types": [FULL, FULL]}, AUX),
    "DFlash, sliding": (DFLASH | {"layer_types": [SLIDING, SLIDING]}, (0, 2)),
    "DFlash, both": (DFLASH | {"layer_types": [SLIDING, FULL]}, AUX),
    "DFlash, both, seeing ahead": (DFLASH | {"layer_types": [SLIDING, FULL], "sliding_sees_ahead": True}, AUX),
    "DSpark": (DSPARK | {"layer_types": [FULL, FULL]}, AUX),
    "DSpark, without confidences": (DSPARK | {"layer_types": [FULL], "confidence_head": False}, (0, 2)),
    "DSpark, both": (DSPARK | {"layer_types": [SLIDING, FULL], "confidence_reads_token": False}, AUX),
    "DSpark, both, seeing ahead": (DSPARK | {"layer_types": [SLIDING, FULL], "sliding_sees_ahead": True}, AUX),
    "DFlash 2": (DFLASH2 | {"layer_types": [FULL, FULL]}, AUX),
    "DFlash 2, both": (DFLASH2 | {"layer_types": [SLIDING, FULL]}, (0, 2)),
    "DFlash 2, both, seeing ahead": (DFLASH2 | {"layer_types": [SLIDING, FULL], "sliding_sees_ahead": True}, AUX),
}  # fmt: skip
TRAINED = {
    "EAGLE-3": [],
    "DFlash": [f"draft={json.dumps(DFLASH | {'layer_types': [FULL, FULL], 'anchors': 64})}"],
}
"""What makes each method of the recipe."""
NOT_SERVED = {
    "Medusa": "exports are not in the layout that vLLM reads: it wants every head's own output matrix, or one that the "
    "heads share beside them",
    "DFlash with layers of both types, DFlash 2, DSpark": "need vLLM's second model runner, which runs on GPUs alone",
    "DSpark with a gated or recurrent Markov head": "vLLM has the plain one",
}
COUNTER = re.compile(r"^vllm:spec_decode_num_(drafts_total|accepted_tokens_per_pos_total)\{(.*)\} (\S+)$", re.M)


@dataclass(frozen=True)
class Case:
    """What is served, and how."""

    method: str
    target: Path
    export: Path
    dtype: torch.dtype
    """That the target is served in."""
    arguments: tuple[str, ...]
    """vLLM's, beside the models'."""


@dataclass(frozen=True)
class Text:
    """One prompt's continuation, and its verification steps."""

    tokens: list[int]
    steps: int
    accepted: list[int]
    """By position."""


def settings(target: Path, folder: Path) -> list[dict[str, Any]]:
    """What vLLM reads in each kind of export, beside what training used. Raises ValueError where they differ."""
    head, served, exports = read_target_head(target, torch.float32), read_served_target(target), []
    count = len(head.embedding)
    for number, (knobs, layers) in enumerate(KINDS.values()):
        config, export = parse_draft_config(knobs), folder / f"export-{number}"
        vocabulary = DraftVocabulary(torch.arange(config.vocabulary_size(count)), count)
        draft = build_draft(config, head.embedding, vocabulary, layers)
        draft.start_from(head.head)
        write_export(draft, export, {}, served, speculators_settings(draft, served, None, LOOKAHEAD))
        method = vllm_method(json.loads((export / "config.json").read_text()))
        speculative = {"method": method, "num_speculative_tokens": LOOKAHEAD}
        (export / "speculative.json").write_text(json.dumps(speculative))
        exports.append(export)
    command = [str(PYTHON), str(READS), str(target), *map(str, exports)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False, env=environment())
    if done.returncode:
        raise ValueError(f"vLLM cannot read the exports: {done.stderr[-3000:]}")
    found = []
    for name, read in zip(KINDS, json.loads(done.stdout.splitlines()[-1]), strict=True):
        trained = expected(*KINDS[name], count, served.context_length)
        if trained != {key: read[key] for key in trained}:
            raise ValueError(f"{name}: trained with {trained}, vLLM reads {read}")
        found.append({"draft": name} | read)
    return found


def expected(knobs: dict[str, Any], layers: Sequence[int], vocabulary: int, length: int) -> dict[str, Any]:
    """What training used, in the words of vllm_reads.py."""
    types, config = knobs.get("layer_types") or [None], parse_draft_config(knobs)
    heads: dict[str, Any] = {}
    if isinstance(config, DSparkConfig):
        heads = {
            "sample_from_anchor": True,
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head,
            "enable_confidence_head": config.confidence_head,
            "confidence_head_with_markov": config.confidence_reads_token,
        }
    if isinstance(config, DFlash2Config):
        names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        heads = {name: getattr(config, name) for name in names}
    masked = {"mask_token_id": config.mask_token_id or vocabulary - 1} if isinstance(config, BlockConfig) else {}
    return masked | {
        "method": "dflash" if knobs["method"] == "dflash2" else knobs["method"],
        "heads": heads,
        "tokens": LOOKAHEAD,
        "dtype": ["torch.bfloat16"] * 2,
        "length": [length] * 2,
        "aux_layer_ids": list(layers),
        "features": len(layers),
        "vocabulary": knobs.get("vocab_size") or vocabulary,
        "attention": [
            {
                "window": knobs["sliding_window"] if kind == SLIDING else None,
                "causal": kind != FULL and not knobs.get("sliding_sees_ahead"),
            }
            for kind in types
        ],
        "norms": [knobs.get(name, False) for name in ("fc_norm", "norm_before_fc", "norm_output")],
    }


def environment() -> dict[str, str]:
    """For vLLM on a CPU: little memory, no look at the Hub, threads where the system puts them."""
    ours = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    return {**os.environ, **ours, "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}


@contextmanager
def serving(case: Case, logs: Path) -> Iterator[httpx.Client]:
    """A vLLM server with the draft."""
    speculation = {"method": case.method, "model": str(case.export), "num_speculative_tokens": LOOKAHEAD}

    def command(port: int) -> list[str]:
        place = ["--model", str(case.target), "--host", HOST, "--port", str(port)]
        draft = ["--speculative-config", json.dumps(speculation)]
        return [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", *place, *draft, *case.arguments]

    server = SGLangServer(command, "vllm", Owner(f"vllm-{os.getpid()}", logs), environment(), START_S)
    try:
        with httpx.Client(base_url=server.address, timeout=REQUEST_S, trust_env=False) as client:
            yield client
    finally:
        server.stop()


def counters(client: httpx.Client) -> list[int]:
    """Verification steps so far, then accepted proposals by position."""
    found = [0] * (1 + LOOKAHEAD)
    for name, labels, value in COUNTER.findall(client.get("/metrics").text):
        position = re.search(r'position="(\d+)"', labels)
        found[0 if name == "drafts_total" or position is None else 1 + int(position[1])] += round(float(value))
    return found


def ask(client: httpx.Client, target: Path, prompt: Sequence[int], new_tokens: int) -> Text:
    """Continue one prompt, greedily, and read what its steps added to the counters."""
    before = counters(client)
    body = {"model": str(target), "prompt": list(prompt), "max_tokens": new_tokens, "temperature": 0}
    answer = client.post("/v1/completions", json=body | {"ignore_eos": True, "return_token_ids": True})
    tokens, deadline = answer.raise_for_status().json()["choices"][0]["token_ids"], time.monotonic() + REQUEST_S
    while True:
        steps, *accepted = (now - then for now, then in zip(counters(client), before, strict=True))
        # The counters may lag behind the answer.
        if 1 + steps + sum(accepted) >= len(tokens):
            return Text(tokens, steps, accepted)
        if time.monotonic() > deadline:
            raise TimeoutError(f"vLLM counts {steps} steps and {accepted} for {len(tokens)} tokens")
        time.sleep(0.05)


def decode(target: TargetModel, draft: Any, prompt: Sequence[int], new_tokens: int) -> Text:
    """The same by the reference decoder. vLLM counts the step that the maximum length cuts, so it decodes some more."""
    decoded = speculate(target, draft, list(prompt), LOOKAHEAD, new_tokens + LOOKAHEAD + 1, frozenset())
    emitted, counts = 1, []
    for count in decoded.counts.accepted:
        if emitted >= new_tokens:
            break
        counts.append(count)
        emitted += count + 1
    by_position = [sum(count > position for count in counts) for position in range(LOOKAHEAD)]
    return Text(list(decoded.tokens[:new_tokens]), len(counts), by_position)


def compare(case: Case, prompts: Sequence[list[int]], new_tokens: int, logs: Path) -> dict[str, Any]:
    """One server: its counts and the reference decoder's, over the prompts to which both say the same."""
    model, draft = TargetModel.load(case.target, AUX, case.dtype), load_draft(case.export, case.target, case.dtype)
    ours = [decode(model, draft, prompt, new_tokens) for prompt in prompts]
    with serving(case, logs) as client:
        theirs = [ask(client, case.target, prompt, new_tokens) for prompt in prompts]
    pairs = [(one, other) for one, other in zip(ours, theirs, strict=True) if one.tokens == other.tokens]
    return {
        "method": case.method,
        "target_dtype": str(case.dtype).removeprefix("torch."),
        "arguments": list(case.arguments),
        "prompts": len(prompts),
        "same_text": len(pairs),
        "same_counts": sum(counts(one) == counts(other) for one, other in pairs),
        "differing": [[counts(one), counts(other)] for one, other in pairs if counts(one) != counts(other)],
        "reference": summed([one for one, _ in pairs]),
        "vllm": summed([other for _, other in pairs]),
    }


def counts(text: Text) -> tuple[int, list[int]]:
    return text.steps, text.accepted


def summed(texts: Sequence[Text]) -> dict[str, Any]:
    accepted = [sum(counts) for counts in zip(*(text.accepted for text in texts), strict=True)]
    return {"steps": sum(text.steps for text in texts), "accepted_by_position": accepted}


def served(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Both methods, for a float32 and a bfloat16 target."""
    found = []
    for name, overrides in TRAINED.items():
        place = folder / name
        quick = ["data.max_samples=500", "training.heldout_steps=0", f"benchmark.prompts={options.prompts}"]
        with prepared_run(place / f"vllm-{name}-{os.getpid()}", RECIPE, [*quick, *overrides]) as run:
            capture_train_export(run, TRAIN_S)
            prompts = heldout_prompts(run.open_samples("heldout"), run.config.benchmark)
            checkpoint = run.folder.path / TrainingResult.read(run.folder.training).checkpoint
            exact, rounded = Path(run.target.path), place / "target"
            shutil.copytree(exact, rounded)
            AutoModelForCausalLM.from_pretrained(exact, dtype=torch.bfloat16).save_pretrained(rounded)
            ways: list[tuple[Path, torch.dtype, tuple[str, ...]]] = [
                (exact, torch.float32, ("--dtype", "float32")),
                (rounded, torch.bfloat16, ()),
            ]
            for target, dtype, arguments in ways:
                case = Case(run.config.draft.method, target, place / f"export-{dtype}", dtype, arguments)
                export_checkpoint(checkpoint, target, case.export, {}, lookahead=LOOKAHEAD)
                found.append(compare(case, prompts, options.max_new_tokens, place / "logs"))
                print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--only-settings", action="store_true", help="leaves what was served before as it is")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not PYTHON.is_file():
        raise Refusal(f"there is no vLLM at {PYTHON}: `make vllm` sets it up")
    torch.set_num_threads(1)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        rounded = Path(temporary) / "target"
        base = prepare_target(load_recipe(RECIPE).target).path
        shutil.copytree(base, rounded)
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(rounded)
        path = options.results / "vllm.json"
        result = json.loads(path.read_text()) if options.only_settings else {}
        result |= {
            "vllm": next((PYTHON.parents[1] / "lib").glob("*/site-packages/vllm_cpu-*.dist-info"))
            .name.split("-")[1]
            .removesuffix(".dist"),
            "not_served": NOT_SERVED,
            "settings": settings(rounded, Path(temporary)),
            "settings_commit": git_sha(),
        }
        if not options.only_settings:
            result |= {
                "target": "tiny-llama",
                "lookahead": LOOKAHEAD,
                "max_new_tokens": options.max_new_tokens,
                "served": served(Path(temporary), options),
                "commit": git_sha(),
                "date": time.strftime("%Y-%m-%d"),
                "hardware": hardware(),
                "seconds": round(time.perf_counter() - begun),
            }
    write_atomically(path, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
