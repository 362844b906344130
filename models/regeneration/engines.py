"""Text engines for regeneration: the target in transformers, or an SGLang server."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch

from infra.processes.process import Owner
from infra.refusal import Refusal
from infra.sglang.client import SGLangClient
from infra.sglang.command import ServerSpec, server_environment, serving_command
from infra.sglang.server import SGLangServer
from models.config.data import RegenerationConfig
from models.decoding.plain import continue_batch
from models.dtypes import DTYPES
from models.run import RunWithTarget
from models.targets.model import TargetModel, eos_ids

ROUNDS = 8
"""Prompts per call in multiples of the server's concurrency: each call waits for its slowest prompt."""


def regeneration_settings(run: RunWithTarget) -> RegenerationConfig:
    """The recipe's settings. Raises Refusal if there are none."""
    settings = run.config.data.regeneration
    if settings is None:
        raise Refusal("the recipe does not regenerate: set data.regeneration, {} for its defaults")
    return settings


class TextEngine(Protocol):
    """Continues prompts with the target and the recipe's sampling settings."""

    batch_size: int
    """Prompts per call that keep the engine busy."""

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Token ids of the continuations, including an end-of-text token."""
        ...

    def close(self) -> None:
        """Stop the engine. Idempotent."""
        ...


class PlainTextEngine:
    """The target in transformers, all prompts in one batch."""

    batch_size = 16

    def __init__(self, run: RunWithTarget):
        path, config = Path(run.target.path), run.config
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = DTYPES[config.generator.compute_dtype]
        self._settings = regeneration_settings(run)
        self._target = TargetModel.load(path, config.target.aux_layer_ids, dtype, device)
        self._ends = eos_ids(path)
        self._random = torch.Generator(self._target.device).manual_seed(config.seed)

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        settings = self._settings
        return continue_batch(
            self._target,
            prompts,
            settings.max_new_tokens,
            settings.temperature,
            self._ends,
            self._random,
            top_p=settings.top_p,
            batch_size=self.batch_size,
        )

    def close(self) -> None:
        """Nothing to stop."""


class SGLangTextEngine:
    """Starts its own server."""

    def __init__(self, run: RunWithTarget):
        config, settings, path = run.config.generator, regeneration_settings(run), Path(run.target.path)
        self._in_flight = config.sglang.requests_in_flight
        self.batch_size = ROUNDS * self._in_flight
        longest = run.config.data.max_tokens + settings.max_new_tokens
        spec = ServerSpec(path, config.compute_dtype, longest, self._in_flight)
        self._server = SGLangServer(
            lambda port: serving_command(spec, config.sglang, (), port),
            "sglang-regenerate",
            Owner(run.folder.name, run.folder.logs),
            server_environment(config.sglang, config.threads),
            config.sglang.start_timeout_s,
        )
        self._client = SGLangClient(self._server, config.sglang.request_timeout_s)
        self._sampling: dict[str, Any] = {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_new_tokens": settings.max_new_tokens,
            "stop_token_ids": sorted(eos_ids(path)),
        }

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        with ThreadPoolExecutor(self._in_flight) as threads:
            return list(threads.map(self._one, prompts))

    def _one(self, prompt: Sequence[int]) -> list[int]:
        return self._client.generate(prompt, self._sampling).tokens

    def close(self) -> None:
        self._server.stop()
        self._client.close()


def start_text_engine(run: RunWithTarget) -> TextEngine:
    """The engine of the run's configuration. Raises Refusal for a faulty setup."""
    return SGLangTextEngine(run) if run.config.generator.engine == "sglang" else PlainTextEngine(run)
