"""Who counts a benchmark's acceptance: the reference decoder, or the serving engine."""

from collections.abc import Sequence
from pathlib import Path

from infra.processes.control_groups import memory
from infra.quantities import byte_size
from infra.records.data_path import TargetRecord
from infra.refusal import Refusal
from models.dtypes import DTYPES
from models.run import RunWithTarget
from models.targets.weights import weight_bytes

FREE_SHARE = 0.9
"""Share of a device for the reference decoder's weights; its cache and the draft need the rest."""


def why_engine_counts(run: RunWithTarget, gpus: Sequence[int]) -> str | None:
    """Why SGLang counts acceptance, for a person; None: the reference decoder does.

    `gpus`: bytes of each inference GPU, 0 where unknown; empty on the CPU, whose memory counts in their place. Raises
    Refusal, with the remedy, where neither can.
    """
    why = _why(run, gpus)
    if why is None or run.config.own_engine == "sglang":
        return why
    remedy = (
        "set generator.engine=sglang" if run.config.generator.live is None else "give it GPUs (pools.inference_gpus)"
    )
    raise Refusal(f"{why}: only SGLang can count its acceptance; {remedy}")


def _why(run: RunWithTarget, gpus: Sequence[int]) -> str | None:
    config, target = run.config, run.target
    chosen = config.benchmark.counted_by
    quantization = config.served_quantization(target.quantization)
    if quantization and chosen == "reference":
        raise Refusal(
            f"benchmark.counted_by=reference: the target is served in {quantization}, and the reference decoder "
            "computes with floating-point weights, so its acceptance is another target's: set it to auto"
        )
    if chosen != "auto":
        return "benchmark.counted_by=engine" if chosen == "engine" else None
    return why_no_reference(target, quantization, config.benchmark_dtype, gpus)


def why_no_reference(target: TargetRecord, quantization: str | None, dtype: str, gpus: Sequence[int]) -> str | None:
    """Why the reference decoder cannot decode a target in `dtype`, for a person; None: it can.

    `quantization`: as it is served; `gpus`: see `why_engine_counts`.
    """
    if quantization:
        return f"the target is served in {quantization}, which the reference decoder does not compute"
    needed = weight_bytes(Path(target.path), DTYPES[dtype])
    room = min(gpus) if gpus else memory()
    if not room or needed <= FREE_SHARE * room:
        return None
    device = "one GPU" if gpus else "this machine"
    return f"the target's weights take {byte_size(needed)} in {dtype}, {device} has {byte_size(room)}"
