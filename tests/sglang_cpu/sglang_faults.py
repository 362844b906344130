"""Faults on demand inside a real SGLang server: `$DRAFTSMITH_TEST_FAULT` is `<fault>:<n>:<marker file>`.

The fault happens once, at the n-th prefill of captured requests, and leaves the marker file behind. Two are none.
"slow": every prefill takes SLOW_S, and the marker holds the number of prompts that the plugin has parts of; once it is
there, prefills wait for a file of the same name with the suffix ".go". "timed": the marker has a line for every
captured prefill: its tokens, and the seconds of run_batch without and in our hook.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

TARGET = "sglang.srt.managers.scheduler.Scheduler.run_batch"
COPY = "models.capture.sglang.plugin.Capture.copy"
SUBMIT = "models.capture.sglang.plugin.Capture.submit"
WRITE = "models.capture.sglang.writer.Writer.write"
SLOW_S = 0.1
_seen: list[None] = []
_in_hook: list[float] = []


def _captures(batch: Any) -> bool:
    keys = ((request.sampling_params.custom_params or {}).get("draftsmith") for request in batch.reqs)
    return batch.forward_mode.is_extend() and any(keys)


def _marker() -> Path:
    return Path(os.environ["DRAFTSMITH_TEST_FAULT"].split(":")[2])


def _due() -> bool:
    """Whether this is the prefill at which the fault is to happen."""
    count = int(os.environ["DRAFTSMITH_TEST_FAULT"].split(":")[1])
    _seen.append(None)
    if len(_seen) < count or _marker().exists():
        return False
    _marker().touch()
    return True


def kill_in_prefill(_scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    if _captures(batch) and _due():
        os.kill(os.getpid(), signal.SIGKILL)


def kill_before_reply(write: Any, writer: Any, prefill: Any) -> None:
    """The objects are written, nobody knows of them."""
    if _due():
        for part in prefill.parts:
            writer._write(part, prefill.copy)
        os.kill(os.getpid(), signal.SIGKILL)
    write(writer, prefill)


def hang(_scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    if _captures(batch) and _due():
        time.sleep(3600)


def fail_in_hook(copy: Any, *arguments: Any) -> Any:
    if _due():
        raise RuntimeError("broken on purpose")
    return copy(*arguments)


def end_writer(write: Any, writer: Any, prefill: Any) -> None:
    """Its thread ends, which nothing that is written does."""
    if _due():
        raise RuntimeError("broken on purpose")
    write(writer, prefill)


def slow(_scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    if not batch.forward_mode.is_extend():
        return
    time.sleep(SLOW_S)
    deadline = time.monotonic() + 200
    while _marker().exists() and not _marker().with_suffix(".go").exists() and time.monotonic() < deadline:
        time.sleep(SLOW_S)


def count_parts(write: Any, writer: Any, prefill: Any) -> None:
    write(writer, prefill)
    _marker().with_suffix(".new").write_text(str(len(writer.assembly)))
    _marker().with_suffix(".new").rename(_marker())


def time_hook(part: Any, *arguments: Any) -> Any:
    begun = time.perf_counter()
    try:
        return part(*arguments)
    finally:
        _in_hook.append(time.perf_counter() - begun)


def time_prefill(run_batch: Any, scheduler: Any, batch: Any, *arguments: Any, **named: Any) -> Any:
    _in_hook.clear()
    begun = time.perf_counter()
    result = run_batch(scheduler, batch, *arguments, **named)
    if batch.forward_mode.is_extend():
        seconds, hook = time.perf_counter() - begun, sum(_in_hook)
        with _marker().open("a") as file:
            file.write(f"{sum(batch.extend_lens)} {seconds - hook} {hook}\n")
    return result


def register() -> None:
    fault = os.environ.get("DRAFTSMITH_TEST_FAULT", "").partition(":")[0]
    if not fault:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    timed = [(COPY, time_hook, HookType.AROUND), (SUBMIT, time_hook, HookType.AROUND)]
    hooks = {
        "killed in prefill": [(TARGET, kill_in_prefill, HookType.BEFORE)],
        "killed before the reply": [(WRITE, kill_before_reply, HookType.AROUND)],
        "hung": [(TARGET, hang, HookType.BEFORE)],
        "hook raising": [(COPY, fail_in_hook, HookType.AROUND)],
        "writer ended": [(WRITE, end_writer, HookType.AROUND)],
        "slow": [(TARGET, slow, HookType.BEFORE), (WRITE, count_parts, HookType.AROUND)],
        "timed": [(TARGET, time_prefill, HookType.AROUND), *timed],
    }[fault]
    for target, hook, kind in hooks:
        HookRegistry.register(target, hook, kind)
