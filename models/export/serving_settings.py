"""What each engine is told about a draft and how many tokens to propose: files beside an exported draft.

SGLang takes one lookahead, or for `--speculative-adaptive` a list of them by texts at once, among which it moves with
the acceptance it sees, whatever steps cost. vLLM takes a lookahead by texts at once.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from infra.files.atomic import write_atomically
from infra.records.drafts import CONFIG
from infra.records.goodput import ConfidenceFit, GoodputTable, MeasuredGoodput, TreeGoodput
from models.config.draft import DraftConfig
from models.config.draft_base import MethodConfig
from models.config.eagle3 import Eagle3Config
from models.decoding.goodput import FittedCosts, predict
from models.export.description import read_description
from models.run import RunWithTarget

SERVING = "serving"
GOODPUT, SGLANG, SGLANG_ADAPTIVE, VLLM = "goodput.json", "sglang.json", "sglang_adaptive.json", "vllm.json"
DSPARK_COSTS, DSPARK_CONFIDENCE = "dspark_costs.json", "dspark_confidence.json"
UNQUANTIZED_DRAFT = ["--speculative-draft-model-quantization", "unquant"]
"""SGLang's argument for a draft of a quantized target: otherwise a draft inherits `--quantization` (0.5.23,
srt/arg_groups/serving_hook.py)."""
DRAFT_ATTENTION = ["--speculative-draft-attention-backend", "flashinfer"]
"""SGLang's argument for an EAGLE-3 draft whose attention is of another kind than its target's: otherwise it gets the
target's kernels, and where these are for one kind only (0.5.23: trtllm_mla and trtllm_mha on B200, dsa everywhere) the
server does not start. FlashInfer has both kinds, on CUDA alone."""
NEAR = 0.05
"""SGLang may move among lookaheads whose predicted goodput is so little below the best, relatively: it follows
acceptance alone, and costs that differ more than this would not be asked."""


@dataclass(frozen=True)
class Span:
    """Batch sizes from `first` to `last`."""

    first: int
    last: int
    best: int
    """The lookahead of greatest goodput."""
    near: tuple[int, ...]
    """Lookaheads that are hardly worse, the best one among them; ascending."""


def spans(table: GoodputTable) -> list[Span]:
    """What pays with 1 text at once, 2, and so on up to the greatest load of the table: without gaps, ascending."""
    costs = FittedCosts(table.target, table.draft)
    lookaheads = sorted({row.lookahead for row in table.rows})
    found: list[Span] = []
    for batch in range(1, max(row.batch for row in table.rows) + 1):
        goodput = {at: predict(costs, table.rates, batch, at).tokens_per_s for at in lookaheads}
        best = max(lookaheads, key=lambda at: (goodput[at], -at))
        near = tuple(at for at in lookaheads if goodput[at] >= (1 - NEAR) * goodput[best])
        if found and (found[-1].best, found[-1].near) == (best, near):
            found[-1] = replace(found[-1], last=batch)
        else:
            found.append(Span(batch, batch, best, near))
    return found


def arguments_beside(target: Path, config: DraftConfig, quantization: str | None, *, on_gpus: bool = True) -> list[str]:
    """SGLang's arguments for a draft that follow from its target, whatever it proposes.

    `target`: its folder; `quantization`: as it is served.
    """
    settings = json.loads((target / CONFIG).read_text())
    text = settings.get("text_config") or settings
    # Block drafts' attention is resolved by SGLang, and MTP layers have their target's.
    is_other = isinstance(config, Eagle3Config) and (
        text.get("index_topk") is not None or bool(text.get("kv_lora_rank")) != (config.mla is not None)
    )
    return [*UNQUANTIZED_DRAFT * (quantization is not None), *DRAFT_ATTENTION * (is_other and on_gpus)]


def always_told(run: RunWithTarget, dtype: str) -> list[str]:
    """SGLang's arguments for a run's draft, whatever it proposes, in servers with GPUs; `dtype`: of its weights.

    The target's own quantization is in its server's command, with and without a draft.
    """
    quantization = run.config.served_quantization(run.target.quantization)
    beside = arguments_beside(Path(run.target.path), run.config.draft, quantization)
    return [*run.config.draft.dtype_arguments(dtype), *beside]


def served_lookahead(run: RunWithTarget) -> int:
    """The benchmark's; a block is served whole, whatever lookahead it was measured at."""
    return run.config.draft.lookaheads(run.config.benchmark.lookahead)[-1]


def sglang_as_benchmarked(run: RunWithTarget, dtype: str) -> dict[str, Any]:
    """SGLang's arguments at the benchmark's lookahead."""
    lookahead = served_lookahead(run)
    arguments = [*run.config.draft.engine_arguments(lookahead), *always_told(run, dtype)]
    return {"lookahead": lookahead, "arguments": arguments}


def sglang(found: MeasuredGoodput, config: MethodConfig, always: Sequence[str] = ()) -> dict[str, Any]:
    """SGLang's arguments, but for the paths of the models and of the adaptive configuration.

    `arguments` propose the best number of tokens at the main load, `adaptive_arguments` as many as pay at each load;
    no arguments (0 proposals): the target alone is faster. `trees`: where they are expected to give clearly more.
    `always`: arguments whatever is proposed, see `always_told`.
    """

    def arguments(lookahead: int) -> list[str]:
        return [*config.engine_arguments(lookahead), *always]

    lookahead, adaptive = found.best.lookahead, sglang_adaptive(found.draft, config)
    settings: dict[str, Any] = {"load": found.main_load, "lookahead": lookahead}
    settings |= {"arguments": arguments(lookahead) if lookahead else [], "adaptive_arguments": None}
    if adaptive is not None:
        # SGLang refuses to start with a lookahead that is not a candidate.
        candidates = sorted({at for slot in adaptive.values() for at in slot["candidate_steps"] if at})
        start = lookahead if lookahead in candidates else candidates[0]
        settings["adaptive_arguments"] = [*arguments(start), "--speculative-adaptive"]
    settings["trees"] = [
        {"load": tree.batch, "gain": round(tree.gain, 4), "arguments": [*tree_arguments(config, tree), *always]}
        for tree in found.trees
        if tree.gain > NEAR
    ]
    return settings


def tree_arguments(config: MethodConfig, tree: TreeGoodput) -> list[str]:
    """SGLang's arguments for a tree."""
    return config.tree_arguments(tree.depth, tree.topk, tree.tokens)


def sglang_adaptive(table: GoodputTable, config: MethodConfig) -> dict[str, Any] | None:
    """SGLang's `--speculative-adaptive-config` (0.5.23): a key is the smallest batch size that its entry applies to.

    None where SGLang cannot change the method's lookahead, or none is ever worth proposing.
    """
    slots = [(span.first, span.near) for span in spans(table)]
    if not config.adaptive or not any(at for _, near in slots for at in near):
        return None
    changes = [next(group) for _, group in groupby(slots, key=lambda slot: slot[1])]
    return {str(first): {"candidate_steps": list(near)} for first, near in changes}


def vllm(table: GoodputTable, method: str) -> dict[str, Any] | None:
    """vLLM's `--speculative-config`, but for `model`, the draft's folder; beyond the last range its number stays.

    None where no proposal is ever worth its time.
    """
    found = spans(table)
    most = max(span.best for span in found)
    if most == 0:
        return None
    groups = [list(group) for _, group in groupby(found, key=lambda span: span.best)]
    ranges = [[group[0].first, group[-1].last, group[0].best] for group in groups]
    told = {"method": method, "num_speculative_tokens": most}
    # For any table vLLM's first model runner gives up full CUDA graphs.
    return told | ({"num_speculative_tokens_per_batch_size": ranges} if len(ranges) > 1 else {})


def dspark_costs(found: MeasuredGoodput) -> dict[str, Any]:
    """SGLang's `--speculative-dspark-sps-table-path`: a step's seconds as a constant, by requests and by tokens.

    It interpolates, which is exact: fits are straight lines with one knee, and a step between one text and two.
    """
    target, draft = found.draft.target, found.draft.draft
    most = max(row.batch for row in found.draft.rows)
    block = max(row.lookahead for row in found.draft.rows)
    # What tokens of each text cost, however many texts there are, is paid for a whole block: SGLang adds by totals.
    constant = target.constant + target.several + target.per_position * (block + 1)
    batches = sorted({1, min(2, most), *(row.batch for row in found.draft.rows)})
    tokens = sorted({1.0, target.knee, float(most * (block + 1))} - {0.0})

    def of_batch(batch: int) -> float:
        together = target.together * (batch > 1)
        return (target.per_text + target.several_per_text) * batch + together + draft.seconds(batch, block)

    def of_tokens(total: float) -> float:
        return target.per_token * total + target.per_token_beyond * max(0.0, total - target.knee)

    return {
        "bias_seconds": max(constant, 1e-9),
        "bs_probes": batches,
        "alpha_seconds": [of_batch(batch) for batch in batches],
        "m_probes": [round(total) for total in tokens],
        "theta_seconds": [of_tokens(total) for total in tokens],
    }


def dspark_confidence(found: ConfidenceFit) -> dict[str, Any]:
    """SGLang's `--speculative-dspark-confidence-sts-path`."""
    return {
        "temperatures": list(found.temperatures),
        "dataset": "benchmark prompts of the run",
        "num_samples": found.steps,
        "ece_before": list(found.errors_before),
        "ece_after": list(found.errors_after),
    }


def write_settings(run: RunWithTarget, found: MeasuredGoodput | None) -> list[Path]:
    """Replace `serving/` of the run's export; engines are included if they have its model.

    `found`: None where the benchmark measures no step costs.
    """
    description = read_description(run.folder.export)
    config, method, files = description.config, description.vllm_method, dict[str, Any]()
    if found is None:
        files[SGLANG] = sglang_as_benchmarked(run, description.dtype) if description.served else None
        files[VLLM] = {"method": method, "num_speculative_tokens": served_lookahead(run)} if method else None
    else:
        files[GOODPUT] = found.model_dump(mode="json")
        if description.served:
            files[SGLANG] = sglang(found, config, always_told(run, description.dtype))
            files[SGLANG_ADAPTIVE] = sglang_adaptive(found.draft, config)
            # Of confidences that say something else, a scheduler makes a worse choice than a fixed number.
            if found.confidence is not None and found.confidence.meaningful:
                files |= {DSPARK_COSTS: dspark_costs(found), DSPARK_CONFIDENCE: dspark_confidence(found.confidence)}
        files[VLLM] = vllm(found.draft, method) if method else None
    folder = run.folder.export / SERVING
    shutil.rmtree(folder, ignore_errors=True)
    written = {folder / name: content for name, content in files.items() if content is not None}
    for path, content in written.items():
        write_atomically(path, json.dumps(content, indent=1) + "\n")
    return list(written)
