"""`python -m models.regeneration.regenerate RUN`: lets the target answer the recipe's prompts.

Writes RUN/regenerated.json. The text is in the cache under the hash of its inputs. Answers are appended to a file as
they are generated, so that another process can resume after a crash.
"""

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoTokenizer

from infra.files.atomic import sync_folder, write_atomically
from infra.files.lines import as_line, read_objects, write_objects
from infra.files.locks import LockHeldError, hold
from infra.files.run_folder import RunFolder
from infra.processes.exit import run_main
from infra.processes.process import Owner
from infra.records.data_path import RegeneratedRecord, TargetRecord
from infra.refusal import Refusal
from infra.settings import cache_folder
from infra.sglang.client import SGLangClient
from infra.sglang.command import ServerSpec, server_environment, serving_command
from infra.sglang.server import SGLangServer
from models.config.data import RegenerationConfig
from models.config.recipe import read_config
from models.data.conversations import Document, read_documents, source_hash, source_revision
from models.data.dialogue import Dialogue, Prompter, check_answerable
from models.decoding.plain import continue_batch
from models.devices import compute_device
from models.dtypes import DTYPES
from models.progress_bars import Advance, bars
from models.run import RunWithTarget
from models.targets.model import TargetModel, eos_ids

FORMAT = 2
"""Increment when the same input gives other prompts."""
LOCK_WAIT_S = 24 * 3600.0  # another run may be regenerating the same text
ROUNDS = 8
"""Prompts per call in multiples of the server's concurrency: each call waits for its slowest prompt."""


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
        dtype = DTYPES[config.generator.compute_dtype]
        self._settings = regeneration_settings(run)
        self._target = TargetModel.load(path, config.target.aux_layer_ids, dtype, compute_device())
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


def regeneration_settings(run: RunWithTarget) -> RegenerationConfig:
    """The recipe's settings. Raises Refusal if there are none."""
    settings = run.config.data.regeneration
    if settings is None:
        raise Refusal("the recipe does not regenerate: set data.regeneration, {} for its defaults")
    return settings


def regenerate(run: RunWithTarget) -> RegeneratedRecord:
    """Regenerate the run's text, or take it from the cache. Raises Refusal for a faulty setup or source."""
    begun = time.monotonic()
    file = cache_folder() / "regenerated" / f"{_key(run)}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    dialogues = _distinct(run)
    if not file.is_file():
        try:
            with hold(file.with_suffix(".lock"), wait_s=LOCK_WAIT_S):
                if not file.is_file():
                    _answer_all(run, list(dialogues.values()), file)
        except LockHeldError as error:
            raise Refusal(f"another process has been regenerating {file} for a day: stop it") from error
    else:
        os.utime(file)  # clean-up removes files that are not used
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return RegeneratedRecord(
        path=str(file),
        documents=len(lines),
        duplicates=sum(1 for _ in read_documents(run.config.data.source)) - len(dialogues),
        tokens=sum(line["tokens"] for line in lines),
        cut=sum(line["cut"] for line in lines),
        engine=run.config.generator.engine,
        settings=regeneration_settings(run).model_dump(mode="json"),
        wall_s=time.monotonic() - begun,
        source_revision=source_revision(run.config.data.source),
    )


def _key(run: RunWithTarget) -> str:
    """Hash of all inputs of the answers."""
    config = run.config
    parts = [
        FORMAT,
        source_hash(config.data.source),
        run.target.revision,
        regeneration_settings(run).model_dump(mode="json"),
        config.data.chat_template,
        config.target.add_bos,
        config.generator.engine,
        config.generator.compute_dtype,
        config.seed,
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _distinct(run: RunWithTarget) -> dict[str, Dialogue]:
    """The distinct dialogues by hash, in the order of the source."""
    dialogues: dict[str, Dialogue] = {}
    for document in read_documents(run.config.data.source):
        check_answerable(document)
        dialogue = Dialogue(document)
        dialogues.setdefault(dialogue.asked, dialogue)
    return dialogues


def _answer_all(run: RunWithTarget, dialogues: list[Dialogue], file: Path) -> None:
    """Write the answers of all dialogues in order; answers of a crashed process are kept."""
    part = file.with_suffix(".part")
    # Of a crashed process; a torn last line is removed.
    answered = read_objects(part)
    write_objects(part, answered)
    done = {one["asked"]: as_line(one) for one in answered}
    unanswered = iter([dialogue for dialogue in dialogues if dialogue.asked not in done])
    config = run.config
    prompter = Prompter(
        AutoTokenizer.from_pretrained(run.target.path),
        regeneration_settings(run),
        templated=config.data.chat_template == "tokenizer",
        add_bos=config.target.add_bos,
    )
    with closing(start_text_engine(run)) as engine, part.open("a") as written, bars() as bar:
        advance = bar("regenerated documents", len(dialogues))
        advance(len(done))
        for asked, line in _in_rounds(engine, prompter, unanswered, advance):
            done[asked] = line
            written.write(line)
            written.flush()
            os.fsync(written.fileno())
    write_atomically(file, "".join(done[dialogue.asked] for dialogue in dialogues))
    part.unlink()
    sync_folder(file.parent)


def _in_rounds(
    engine: TextEngine, prompter: Prompter, waiting: Iterator[Dialogue], advance: Advance
) -> Iterator[tuple[str, str]]:
    """Hash and line of every finished dialogue; a round generates the next answer of up to `engine.batch_size`."""
    active: list[Dialogue] = []
    while True:
        active += [dialogue for dialogue in islice(waiting, engine.batch_size - len(active)) if dialogue.advance()]
        if not active:
            return
        prompts = [prompter.prompt(dialogue.so_far()) for dialogue in active]
        for dialogue, prompt, tokens in zip(active, prompts, engine.generate(prompts), strict=True):
            prompter.answer(dialogue, prompt, tokens)
        finished = [dialogue for dialogue in active if dialogue.document.plain or not dialogue.advance()]
        active = [dialogue for dialogue in active if dialogue not in finished]
        for dialogue in finished:
            answered = {"asked": dialogue.asked, "tokens": dialogue.tokens, "cut": dialogue.cut}
            yield dialogue.asked, as_line(answered | _as_record(dialogue.so_far()))
        advance(len(finished))


def _as_record(document: Document) -> dict[str, object]:
    """The record from which `read_documents` reads the document."""
    if document.plain:
        return {"text": document.text}
    tools = {"tools": [dict(tool) for tool in document.tools]} if document.tools else {}
    return {"messages": [message.as_dict() for message in document.messages], **tools}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    folder = RunFolder(parser.parse_args().run.absolute())
    record = regenerate(RunWithTarget(folder, read_config(folder.config), TargetRecord.read(folder.target)))
    write_atomically(folder.regenerated, record)
    print(record.summary, flush=True)


if __name__ == "__main__":
    run_main(main)
