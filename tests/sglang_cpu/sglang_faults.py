"""Faults on demand inside a real SGLang server: `$DRAFTSMITH_TEST_FAULT` is `<fault>:<n>:<marker file>`.

The fault happens once, at the n-th prefill of captured requests, and leaves the marker file behind. "slow" is none:
every prefill takes SLOW_S, and the marker holds the number of prompts that the plugin has parts of.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

TARGET = "sglang.srt.managers.scheduler.Scheduler.run_batch"
CAPTURE = "models.capture.sglang.plugin.Capture.take"
SLOW_S = 0.1
_seen: list[Any] = []


def _due(batch: Any) -> bool:
    """Whether this is the prefill at which the fault is to happen."""
    _, count, marker = os.environ["DRAFTSMITH_TEST_FAULT"].split(":")
    captured = any((request.sampling_params.custom_params or {}).get("draftsmith") for request in batch.reqs)
    if not batch.forward_mode.is_extend() or not captured:
        return False
    _seen.append(batch)
    if len(_seen) < int(count) or Path(marker).exists():
        return False
    Path(marker).touch()
    return True


def kill_in_prefill(_scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    if _due(batch):
        os.kill(os.getpid(), signal.SIGKILL)


def kill_before_reply(_result: Any, _scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    """Runs after the capture hook: the objects are written, nobody knows of them."""
    if _due(batch):
        os.kill(os.getpid(), signal.SIGKILL)


def hang(_scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    if _due(batch):
        time.sleep(3600)


def fail_in_hook(take: Any, capture: Any, scheduler: Any, batch: Any, *arguments: Any) -> Any:
    """Runs in place of the capture itself."""
    if _due(batch):
        raise RuntimeError("broken on purpose")
    return take(capture, scheduler, batch, *arguments)


def slow(_scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    if batch.forward_mode.is_extend():
        time.sleep(SLOW_S)


def count_parts(take: Any, capture: Any, scheduler: Any, batch: Any, *arguments: Any) -> Any:
    replies = take(capture, scheduler, batch, *arguments)
    marker = Path(os.environ["DRAFTSMITH_TEST_FAULT"].split(":")[2])
    marker.with_suffix(".new").write_text(str(len(capture.assembly)))
    marker.with_suffix(".new").rename(marker)
    return replies


def register() -> None:
    fault = os.environ.get("DRAFTSMITH_TEST_FAULT", "").partition(":")[0]
    if not fault:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = {
        "killed in prefill": [(TARGET, kill_in_prefill, HookType.BEFORE)],
        "killed before the reply": [(TARGET, kill_before_reply, HookType.AFTER)],
        "hung": [(TARGET, hang, HookType.BEFORE)],
        "hook raising": [(CAPTURE, fail_in_hook, HookType.AROUND)],
        "slow": [(TARGET, slow, HookType.BEFORE), (CAPTURE, count_parts, HookType.AROUND)],
    }[fault]
    for target, hook, kind in hooks:
        HookRegistry.register(target, hook, kind)
