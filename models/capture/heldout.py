"""The held-out texts of a run: the target's continuations of a few held-out prompts, with its hidden states.

One generator makes them, once per run, another one where it is lost; the trainer simulates acceptance on them.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from infra.files.atomic import replacing, sync_file
from infra.files.locks import LockHeldError, hold
from models.capture.engine import CaptureEngine, Continued
from models.data.media import Prompt
from models.data.prompts import heldout_prompts, seen_prompts
from models.run import PreparedRun
from models.tensor_file import write_tensors


def wanted(run: PreparedRun) -> bool:
    """Whether training is long enough for at least one measurement."""
    every = run.config.training.heldout_steps
    return 0 < every <= run.config.training.total_steps(run.samples.train_samples)


def lacks_heldout(run: PreparedRun) -> bool:
    """Whether the run needs the texts and has none. A damaged file counts as texts until `read_heldout` removes it."""
    return wanted(run) and not run.folder.heldout.exists()


def make_heldout(run: PreparedRun, engine: CaptureEngine) -> None:
    """Continue the prompts and write the texts, unless the run already has them or another generator makes them now.

    Texts are at most as long as the longest sample, for which engines are configured.
    """
    if not lacks_heldout(run):
        return
    path = run.folder.heldout
    with suppress(LockHeldError), hold(path.with_name(f".{path.name}.lock")):
        if lacks_heldout(run):
            write_heldout(path, _continue(run, engine))


def _continue(run: PreparedRun, engine: CaptureEngine) -> list[Continued]:
    settings, longest = run.config.benchmark, run.samples.longest
    samples, most = run.open_samples("heldout"), run.config.training.heldout_prompts
    prompts = [Prompt(tuple(prompt)) for prompt in heldout_prompts(samples, settings) if len(prompt) + 2 <= longest]
    prompts = prompts[:most] + seen_prompts(samples, most, longest)
    room = longest - max((len(prompt.tokens) for prompt in prompts), default=0)
    return engine.continue_greedily(prompts, min(settings.max_new_tokens, room))


def write_heldout(path: Path, texts: Sequence[Continued]) -> None:
    """Write the texts atomically."""
    tensors = {f"aux.{index}": text.aux.contiguous() for index, text in enumerate(texts)}
    for index, text in enumerate(texts):
        named = {"embedded": text.embedded, "places": text.places}
        tensors |= {f"{name}.{index}": rows.contiguous() for name, rows in named.items() if rows is not None}
    tokens = [[list(text.prompt), list(text.continuation), text.shown] for text in texts]
    # By its name: `save` would take the size of the file twice in memory.
    with replacing(path) as file:
        write_tensors(Path(file.name), tensors, {"texts": json.dumps(tokens), "sha256": _sha256(tensors)})
        sync_file(Path(file.name))  # not the file that was opened, which is replaced


def read_heldout(path: Path) -> list[Continued] | None:
    """The texts in a file of `write_heldout`; None if it is missing.

    So too if it is damaged: then it is removed, so that a generator makes the texts again.
    """
    if not path.exists():  # it may come at any moment, and is not removed then
        return None
    texts = _read_whole(path)
    if texts is None:
        path.unlink(missing_ok=True)
    return texts


def _read_whole(path: Path) -> list[Continued] | None:
    try:
        with safe_open(path, framework="pt") as file:
            texts, sha256 = json.loads(file.metadata()["texts"]), file.metadata()["sha256"]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dictionary)
    except (FileNotFoundError, SafetensorError, KeyError, ValueError):
        return None
    if _sha256(tensors) != sha256:
        return None
    return [
        Continued(
            tuple(prompt),
            tuple(continuation),
            tensors[f"aux.{index}"],
            shown,
            tensors.get(f"embedded.{index}"),
            tensors.get(f"places.{index}"),
        )
        for index, (prompt, continuation, shown) in enumerate(texts)
    ]


def _sha256(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.hexdigest()
