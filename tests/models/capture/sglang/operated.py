"""A real SGLang server with users, as its operator starts it, and how a run learns from it."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch

from infra.processes.process import Owner
from infra.sglang.command import ServerSpec, server_environment, serving_command
from infra.sglang.config import SGLangConfig
from infra.sglang.server import SGLangServer
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.export.served_target import read_served_target
from models.export.sglang import write_export
from models.run import PreparedRun
from models.targets.weights import read_target_head

LONGEST, ANSWER = 256, 24


PLAIN = SGLangConfig()


@dataclass(frozen=True)
class Operated:
    """A server that its operator has started."""

    address: str
    socket: Path

    def ask(self, tokens: list[int], **settings: Any) -> list[int]:
        """As a user does. Raises httpx.HTTPError."""
        sampling = {"max_new_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True} | settings.pop("sampling", {})
        body = {"input_ids": tokens, "sampling_params": sampling, **settings}
        answer = httpx.post(f"{self.address}/generate", json=body, timeout=60.0, trust_env=False)
        return answer.raise_for_status().json()["output_ids"]

    def overrides(self, samples: int, **live: Any) -> list[str]:
        """What makes the tiny recipe learn from its users."""
        named = {"servers": [{"address": self.address, "socket": str(self.socket)}]}
        settings = {"consent": "users of a test agreed", "retention_days": 1, "share": 1.0} | named | live
        data = ("data.source=live", f"data.max_samples={samples}", f"data.max_tokens={LONGEST}")
        learning = ("training.start_from=champion", "data.overlong=truncate", f"generator.live={json.dumps(settings)}")
        return ["generator.engine=serving", *data, *learning]


def write_untrained(plain: PreparedRun, place: Path) -> None:
    """Export the run's draft as nobody has trained it."""
    target = Path(plain.target.path)
    head = read_target_head(target, torch.float32)
    whole = DraftVocabulary.by_frequency(torch.ones(len(head.embedding)), len(head.embedding))
    draft = build_draft(plain.config.draft, head.embedding, whole, plain.config.target.aux_layer_ids)
    write_export(draft, place, {}, read_served_target(target))


@contextmanager
def operated_server(
    plain: PreparedRun, folder: Path, with_draft: bool, settings: SGLangConfig = PLAIN
) -> Iterator[Operated]:
    """A server of the run's target in `folder`."""
    path = folder / "live.sock"
    server = SGLangServer(*launch(plain, folder, path, with_draft, settings), 300.0)
    try:
        yield Operated(server.address, path)
    finally:
        server.stop()


def launch(
    plain: PreparedRun, folder: Path, path: Path, with_draft: bool, settings: SGLangConfig = PLAIN
) -> tuple[Callable[[int], list[str]], str, Owner, dict[str, str]]:
    """Command by port, name, owner and environment of a server that listens at `path` for runs."""
    if with_draft:
        write_untrained(plain, folder / "export")
        arguments = [*plain.config.draft.engine_arguments(3), "--speculative-draft-model-path", str(folder / "export")]
    else:
        arguments = ["--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3"]
        arguments += ["--return-aux-hidden-state-layer-ids", *map(str, plain.config.target.aux_layer_ids)]
    command = partial(serving_command, ServerSpec(Path(plain.target.path), "float32", LONGEST, 8), settings, arguments)
    environment = {"SGLANG_PLATFORM": "draftsmith_test_cpu", "DRAFTSMITH_LIVE": str(path)}
    return command, "operated", Owner("operated", folder), environment | server_environment(settings, 1)
