"""Engines that answer dialogues with the target: SGLang on all GPUs of the pool, or transformers."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from infra.processes.process import Owner
from infra.refusal import Refusal
from infra.sglang.client import SGLangClient
from infra.sglang.command import ServerSpec, server_environment, serving_command
from infra.sglang.config import SLOWEST_TOKEN_S, SGLangConfig, decoding_requests
from infra.sglang.server import SGLangServer
from models.config.data import PLAIN_BATCH, RegenerationConfig
from models.config.recipe import RunConfig
from models.data.chat_template import open_chat_template
from models.data.dialogue import Dialogue, Prompter
from models.data.images import ImageProcessor, ImageShelf, asked_with
from models.data.media import Prompt
from models.data.tokenizer import read_tokenizer
from models.decoding.after_images import continue_seen
from models.decoding.continuations import continue_batch
from models.devices import compute_device, leased_bytes
from models.drafts.sampling import Sampling
from models.dtypes import DTYPES
from models.run import RunWithTarget
from models.targets.architecture import context_length, read_model_config
from models.targets.model import TargetModel


class PlainTextEngine:
    """Answers by the recipe's sampling settings. The target in transformers: the next answers of up to `PLAIN_BATCH`
    dialogues in one batch."""

    def __init__(self, run: RunWithTarget, images: Path):
        self._path, config = Path(run.target.path), run.config
        dtype, sees = DTYPES[config.capture_dtype], config.data.images is not None
        self._settings, self._prompter = regeneration_settings(run), recipe_prompter(run, images)
        self._target = TargetModel.load(self._path, config.target.aux_layer_ids, dtype, compute_device(), sees=sees)
        self._ends, self._media_ids = frozenset(run.target.eos_ids), frozenset(run.target.media_ids)
        self._random = torch.Generator(self._target.device).manual_seed(config.seed)

    def finished(self, dialogues: Iterator[Dialogue]) -> Iterator[Dialogue]:
        """Answer all turns of all dialogues; yields each when it is over, in any order, perhaps with a fault."""
        active: list[Dialogue] = []
        while True:
            active += islice(dialogues, PLAIN_BATCH - len(active))
            if not active:
                return
            prompts = [self._prompter.next(dialogue) for dialogue in active]
            asked = [(dialogue, prompt) for dialogue, prompt in zip(active, prompts, strict=True) if prompt is not None]
            yield from (dialogue for dialogue, prompt in zip(active, prompts, strict=True) if prompt is None)
            active = [dialogue for dialogue, _ in asked]
            answers = self._answers([prompt for _, prompt in asked])
            for (dialogue, prompt), tokens in zip(asked, answers, strict=True):
                self._prompter.answer(dialogue, prompt, tokens)

    def _answers(self, prompts: Sequence[Prompt]) -> Iterator[list[int]]:
        """Prompts of text together; those with images, or near the end of the context, one by one."""
        sampling = Sampling(self._settings.temperature, self._settings.top_p, self._random)
        most, rooms = self._settings.max_new_tokens, [self._prompter.room(prompt) for prompt in prompts]
        alike = [
            prompt.tokens for prompt, room in zip(prompts, rooms, strict=True) if room == most and not prompt.images
        ]
        plain = iter(continue_batch(self._target, alike, most, self._ends, sampling, batch_size=PLAIN_BATCH))
        for prompt, room in zip(prompts, rooms, strict=True):
            if prompt.images:
                tokens = torch.tensor(prompt.tokens)
                seen = self._images.inputs(tokens, prompt.images, self._target.head_weight)
                yield continue_seen(self._target, tokens, seen, room, self._ends | self._media_ids, sampling)
            elif room == most:
                yield next(plain)
            else:
                yield from continue_batch(self._target, [prompt.tokens], room, self._ends, sampling)

    @cached_property
    def _images(self) -> ImageProcessor:
        return ImageProcessor(self._path)

    def close(self) -> None:
        """Nothing to stop."""


def copies_on(config: RunConfig, gpus: list[int]) -> tuple[SGLangConfig, int]:
    """As many copies as the GPUs hold, each on as many as a generator's copy has.

    Args:
        config: the recipe.
        gpus: bytes of each leased GPU; empty on the CPU.

    Returns:
        The settings of one server with a copy of the target on each group of GPUs, and requests in flight over all.
    """
    settings = config.generator.sglang
    if not gpus:
        return settings, settings.requests_in_flight
    count = max(1, len(gpus) // config.gpus_per_copy)
    shared = settings.model_copy(update={"tensor_parallel": config.gpus_per_copy, "data_parallel": count})
    return shared, count * decoding_requests(min(gpus))


class SGLangTextEngine:
    """Starts its own server. A thread answers a dialogue to its end, so that no request waits for another's answer."""

    def __init__(self, run: RunWithTarget, images: Path):
        config, settings, path = run.config.generator, regeneration_settings(run), Path(run.target.path)
        served, self._in_flight = copies_on(run.config, leased_bytes())
        longest = run.config.data.max_tokens + settings.max_new_tokens
        spec = ServerSpec(path, run.config.capture_dtype, longest, self._in_flight)
        self._server = SGLangServer(
            lambda port: serving_command(spec, served, (), port),
            "sglang-regenerate",
            Owner(run.folder.name, run.folder.logs),
            server_environment(served, config.threads),
            config.sglang.start_timeout_s,
            spec.machines,
        )
        timeout_s = config.sglang.request_timeout_s + settings.max_new_tokens * SLOWEST_TOKEN_S
        self._client = SGLangClient(self._server, timeout_s, config.sglang.start_timeout_s)
        self._prompter, self._tokenizing = recipe_prompter(run, images), Lock()
        self._media_ids = run.target.media_ids
        self._sampling: dict[str, Any] = {
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "stop_token_ids": list(run.target.eos_ids),
        }

    def finished(self, dialogues: Iterator[Dialogue]) -> Iterator[Dialogue]:
        """See `PlainTextEngine.finished`."""
        done: SimpleQueue[Future[Dialogue]] = SimpleQueue()
        threads, waiting = ThreadPoolExecutor(self._in_flight), 0
        try:
            # Twice as many as are in flight: a thread that is done finds the next one.
            for dialogue in islice(dialogues, 2 * self._in_flight):
                threads.submit(self._finish, dialogue).add_done_callback(done.put)
                waiting += 1
            while waiting:
                finished = done.get().result()  # A request has a time limit.
                waiting -= 1
                for dialogue in islice(dialogues, 1):
                    threads.submit(self._finish, dialogue).add_done_callback(done.put)
                    waiting += 1
                yield finished
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            self.close()  # Ends the requests that threads still wait for.
            threads.shutdown()

    def _finish(self, dialogue: Dialogue) -> Dialogue:
        while True:
            # A tokenizer changes its own settings while it works.
            with self._tokenizing:
                prompt = self._prompter.next(dialogue)
            if prompt is None:
                return dialogue
            asked, more = asked_with(prompt, self._media_ids)
            sampling = self._sampling | {"max_new_tokens": self._prompter.room(prompt)}
            tokens = self._client.generate(asked, sampling, **more).tokens
            with self._tokenizing:
                self._prompter.answer(dialogue, prompt, tokens)

    def close(self) -> None:
        """Stop the server. Idempotent."""
        self._server.stop()
        self._client.close()


def recipe_prompter(run: RunWithTarget, images: Path) -> Prompter:
    """What makes the run's prompts; it keeps their images in the folder `images`.

    Raises Refusal for a chat template that cannot be used.
    """
    data, path = run.config.data, Path(run.target.path)
    tokenizer: PreTrainedTokenizerBase = read_tokenizer(path)
    ends = frozenset(run.target.eos_ids)
    prompter = Prompter(
        tokenizer,
        open_chat_template(tokenizer, data.chat_template, data.template_arguments, ends),
        regeneration_settings(run),
        add_bos=run.config.target.add_bos,
        max_tokens=data.max_tokens,
        ends=ends,
        media_ids=run.target.media_ids,
        shelf=None if data.images is None else ImageShelf(data.images, images, ImageProcessor(path)),
    )
    prompter.vocabulary = run.target.vocab_size
    own = context_length(read_model_config(path).get_text_config())
    prompter.context = run.config.generator.sglang.context_length or own
    return prompter


def start_text_engine(run: RunWithTarget, images: Path) -> PlainTextEngine | SGLangTextEngine:
    """The engine of the run's configuration; see `recipe_prompter`. Raises Refusal for a faulty setup."""
    kind = SGLangTextEngine if run.config.generator.engine == "sglang" else PlainTextEngine
    return kind(run, images)


def regeneration_settings(run: RunWithTarget) -> RegenerationConfig:
    """The recipe's settings. Raises Refusal if there are none."""
    settings = run.config.data.regeneration
    if settings is None:
        raise Refusal("the recipe does not regenerate: set data.regeneration, {} for its defaults")
    return settings
