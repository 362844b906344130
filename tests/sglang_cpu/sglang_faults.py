"""Faults on demand inside a real SGLang server: `$DRAFTSMITH_TEST_FAULT` is `<fault>:<n>:<marker file>`.

The fault happens once, at the n-th prefill of captured requests, and leaves the marker file behind.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

TARGET = "sglang.srt.managers.scheduler.Scheduler.run_batch"
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


def register() -> None:
    fault = os.environ.get("DRAFTSMITH_TEST_FAULT", "").partition(":")[0]
    if not fault:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hook, kind = {
        "killed in prefill": (kill_in_prefill, HookType.BEFORE),
        "killed before the reply": (kill_before_reply, HookType.AFTER),
        "hung": (hang, HookType.BEFORE),
    }[fault]
    HookRegistry.register(TARGET, hook, kind)
