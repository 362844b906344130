"""The longest sample that one device trains EAGLE-3 on: batch 1, nothing sharded, every position supervised.

    python benchmarks/max_length.py [--shapes kimi-k2.5 kimi-k2.5-32k] [--gib 80] [--steps 4]
    python benchmarks/max_length.py --shapes tiny --lengths 64 128 --device cpu

A whole optimizer step is taken: forward, backward, AdamW. Draft weights and the optimizer's moments are float32,
compute is bfloat16 (on a CPU float32), the target's embeddings and head are frozen, the inner activations of the layer
are computed again. Lengths are doubled until one does not fit, then the gap is halved down to `--resolution` tokens;
memory and seconds of every length that was tried make the curve. `--gib` caps what the process may allocate, so that a
larger device answers for a smaller one. At `--mfu-length` the step is timed with and without computing again; the share
of the device's peak counts the arithmetic of the step alone, never what is computed again, the draft's head and the
target's projection included.

On CUDA: not run yet. On a CPU a length fits that is named with `--lengths`; the form serves a test.
"""

import argparse
import gc
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from draft_contestants import SHAPES, Shape, make_work, our_step

from infra.files.atomic import write_atomically
from infra.provenance import git_sha, hardware, versions

RESULT = Path(__file__).parent / "results" / "max_length.json"
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "B200": 2250.0, "A100": 312.0}
"""Dense bfloat16, by a part of the device's name."""
SHORTEST = 4096


def measure(shape: Shape, device: str, recompute: bool, repeats: int) -> dict[str, Any] | None:
    """Seconds and peak bytes of an optimizer step; None where it does not fit."""
    release(device)
    try:
        return _measure(shape, device, recompute, repeats)
    except torch.OutOfMemoryError:
        return None
    finally:
        release(device)


def _measure(shape: Shape, device: str, recompute: bool, repeats: int) -> dict[str, Any]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    work = make_work(shape, dtype, device)
    work.draft.recompute = recompute
    parameters = [p for p in work.draft.parameters() if p.requires_grad]
    assert all(p.dtype == torch.float32 for p in parameters)
    optimizer = torch.optim.AdamW(parameters, 1e-4, fused=True)
    release(device)
    seconds = []
    # The first step makes the optimizer's moments: a later one has the peak, and the seconds.
    for _ in range(repeats + 1):
        synchronize(device)
        started = time.perf_counter()
        loss = our_step(work, dtype)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    held = sum(p.numel() * 12 for p in parameters) + 2 * work.draft.embed_tokens.weight.numel()
    return {
        "tokens": shape.tokens,
        "recompute": recompute,
        "seconds": min(seconds[1:]),
        "peak_bytes": peak,
        "weights_and_moments_bytes": held,
        "supervised": work.total,
        "loss": float(loss),
    }


def release(device: str) -> None:
    """Give back what the last length held, and count peaks from here."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def search(shape: Shape, device: str, resolution: int) -> Iterator[dict[str, Any]]:
    """Every length tried, with `fits`: doubled from `SHORTEST`, then halved between what fits and what does not."""
    fits, fails, length = 0, 0, SHORTEST
    while not fails or fails - fits > resolution:
        found = measure(replace(shape, lengths=(length,)), device, True, 1)
        yield (found or {"tokens": length}) | {"fits": found is not None}
        fits, fails = (length, fails) if found else (fits, length)
        length = (fits + fails) // 2 if fails else 2 * fits
        if fails and not fits and length < 16:
            return


def model_flops(shape: Shape) -> float:
    """Of a step at bfloat16, without what is computed again."""
    return sum(shape.flops().values())


def of_shape(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The curve, the longest sample, and the share of the peak at one length."""
    shape = replace(SHAPES[name], steps=arguments.steps or SHAPES[name].steps)
    lengths = [replace(shape, lengths=(length,)) for length in arguments.lengths]
    if lengths:
        found = (measure(one, arguments.device, True, 1) for one in lengths)
        curve = [(one or {}) | {"fits": one is not None} for one in found]
    else:
        curve = list(search(shape, arguments.device, arguments.resolution))
    result: dict[str, Any] = {"sizes": asdict(shape) | {"lengths": None}, "curve": curve}
    result["longest"] = max((one["tokens"] for one in curve if one["fits"]), default=None)
    at = replace(shape, lengths=(arguments.mfu_length,))
    timed = [measure(at, arguments.device, again, arguments.repeats) for again in (False, True)]
    result["timed"] = [
        one | {"tflops_per_s": model_flops(at) / one["seconds"] / 1e12, "mfu": share_of_peak(at, one["seconds"])}
        for one in timed
        if one is not None
    ]
    return result


def share_of_peak(shape: Shape, seconds: float) -> float | None:
    """Model FLOPs utilisation; None on devices whose peak is not known here."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = next((value for part, value in PEAK_TFLOPS.items() if part in name), None)
    return None if peak is None else model_flops(shape) / seconds / (peak * 1e12)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["kimi-k2.5", "kimi-k2.5-32k"], choices=SHAPES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cuda", "cpu"])
    parser.add_argument("--gib", type=float, help="at most so much of the device's memory")
    parser.add_argument("--steps", type=int, help="of the training-time test")
    parser.add_argument("--lengths", type=int, nargs="*", default=[], help="instead of the search")
    parser.add_argument("--resolution", type=int, default=4096)
    parser.add_argument("--mfu-length", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args(given)
    if arguments.device == "cpu" and not arguments.lengths:
        raise SystemExit("a CPU does not say what fits: name --lengths, or run this on a GPU")
    if arguments.gib is not None and arguments.device == "cuda":
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, arguments.gib * 2**30 / whole))
    result: dict[str, Any] = {
        "commit": git_sha(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "conditions": "batch 1, AdamW, float32 master weights and moments, every position supervised, no sharding, no "
        "offload; embeddings and target head frozen; the target's head on the draft vocabulary alone",
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu",
        "gib": arguments.gib,
        "shapes": {},
    }
    for name in arguments.shapes:
        result["shapes"][name] = of_shape(name, arguments)
        print(name, json.dumps(result["shapes"][name], indent=2), flush=True)
        write_atomically(arguments.json, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
