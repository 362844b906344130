"""`python -m models.regeneration.regenerate RUN`: lets the target answer the recipe's prompts.

Writes RUN/regenerated.json. The answers, as text and as the token ids that the engine read and emitted, are in the
cache under the hash of their inputs. They are appended to a file as they are generated, so that another process can
resume after a crash.
"""

import hashlib
import json
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedTokenizerBase

from infra.files.atomic import replacing, sync_folder, write_atomically
from infra.files.folders import private_mode
from infra.files.lines import as_line, each_object, places_by
from infra.files.locks import LockHeldError, hold
from infra.files.private import keep_private, mark, mark_of
from infra.files.run_folder import RunFolder
from infra.processes.exit import run_main
from infra.records.data_path import RegeneratedRecord, TargetRecord
from infra.refusal import Refusal
from infra.run.gpu_use import measured_use
from infra.settings import cache_folder
from models.config.data import NO_TEMPLATE, DataConfig
from models.config.recipe import read_config
from models.data.chat_template import open_chat_template
from models.data.conversations import source_hash, source_revision, training_documents
from models.data.dialogue import Dialogue, check_answerable
from models.data.images import images_hash
from models.data.media import as_text
from models.data.outcomes import SHOWN_REFUSALS, check_refused
from models.data.prepare import check_unchanged, tokenizer_hash
from models.data.sources import private_since
from models.data.tokenizer import read_tokenizer
from models.progress_bars import bars
from models.regeneration.engines import recipe_prompter, regeneration_settings, start_text_engine
from models.run import RunWithTarget

FORMAT = 8
"""Increment when the same input gives other prompts."""
REFUSED = ".refused.jsonl"
"""Suffix of the list of dialogues that ended before their first answer, with the reasons."""
LOCK_WAIT_S = 24 * 3600.0  # another run may be regenerating the same text
LEAST_BEFORE = 32
"""Fewest dialogues that are answered before the training, with data.regeneration.capture."""
SPARE = 1.1
"""Dialogues that are asked for each one that data.max_samples needs: some are refused, too long or alike."""
SYNC_S = 1.0
"""Seconds of answers that a power failure may cost; a killed process loses none that is finished."""


def regenerate(run: RunWithTarget) -> RegeneratedRecord:
    """Regenerate the run's text, or take it from the cache. Raises Refusal for a faulty setup or source."""
    begun = time.monotonic()
    source = run.config.data.source
    content = source_hash(source)
    file = cache_folder() / "regenerated" / f"{_key(run, content)}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    since = private_since(source)
    if since is not None:
        mark(mark_of(file), since)
    mode = 0o666 if since is None else 0o666 & private_mode(file.parent)
    distinct = list(_distinct(run).values())
    check_unchanged(source, content)
    dialogues = _needed(run.config.data, distinct)
    refused = file.with_suffix(REFUSED)

    def is_there() -> bool:
        return file.is_file() and refused.is_file()

    if not is_there():
        try:
            with hold(file.with_suffix(".lock"), wait_s=LOCK_WAIT_S):
                if since is not None:
                    mark(mark_of(file), since)  # again: clean-up may have removed it meanwhile
                if not is_there():
                    _answer_all(run, dialogues, file, mode)
        except LockHeldError as error:
            raise Refusal(f"another process has been regenerating {file} for a day: stop it") from error
    for path in (file, refused):
        os.utime(path)  # clean-up removes files that are not used
    refusals = [one["fault"] for one in each_object(refused)]
    check_refused(refusals, len(dialogues), run.config.data)
    counts = Counter[str]()
    for one in each_object(file):
        counts.update(
            open=_is_open(one), documents=not _is_open(one), early=bool(one["fault"]), tokens=one["tokens"],
            cut=one["cut"],
        )  # fmt: skip
    return RegeneratedRecord(
        path=str(file),
        documents=counts["documents"],
        unanswered=counts["open"],
        duplicates=sum(1 for _ in training_documents(run.config.data)) - len(distinct),
        not_asked=len(distinct) - len(dialogues),
        tokens=counts["tokens"],
        cut=counts["cut"],
        refused=len(refusals),
        refusals=tuple(refusals[:SHOWN_REFUSALS]),
        ended_early=counts["early"],
        engine=run.config.generator.engine,
        settings=regeneration_settings(run).model_dump(mode="json", exclude={"capture"}),
        wall_s=time.monotonic() - begun,
        source_revision=source_revision(source),
    )


def _key(run: RunWithTarget, content: str) -> str:
    """Hash of all inputs of the answers; `content` is that of the source."""
    config = run.config
    tokenizer: PreTrainedTokenizerBase = read_tokenizer(run.target.path)
    template = open_chat_template(tokenizer, config.data.chat_template, config.data.template_arguments)
    served = config.generator.sglang
    # Left out where they are not set, so that older caches stay valid.
    optional: list[object] = [served.context_length]
    if config.generator.engine == "sglang":
        optional += [served.quantization, served.arguments]
    parts = [
        FORMAT,
        content,
        run.target.revision,
        regeneration_settings(run).model_dump(mode="json"),
        tokenizer_hash(Path(run.target.path)),
        NO_TEMPLATE if template is None else template.hash,
        config.data.max_tokens,
        config.target.add_bos,
        config.generator.engine,
        config.capture_dtype,
        config.seed,
        config.data.answered_before,
        config.data.turns,
        _most_dialogues(config.data),
        *([] if config.data.images is None else [images_hash(config.data.images)]),
        *([optional] if any(optional) else []),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _distinct(run: RunWithTarget) -> dict[str, Dialogue]:
    """The distinct dialogues by hash, in the order of the source.

    A log of requests holds a dialogue once for each of its turns: the longest gets the answers of all of them, but for
    one that is captured while its last turn is answered.
    """
    data = run.config.data
    whole = data.turns == "all" and data.answered_before == 1
    dialogues, continued = dict[str, Dialogue](), set[str]()
    for document in training_documents(data):
        check_answerable(document)
        dialogue = Dialogue(document, data.images is not None)
        dialogues.setdefault(dialogue.asked, dialogue)
        if whole:
            continued |= dialogue.asked_before
    return {asked: dialogue for asked, dialogue in dialogues.items() if asked not in continued}


def _most_dialogues(data: DataConfig) -> int | None:
    """Dialogues that give `data.max_samples` training samples and their held-out part; None: all there are."""
    if data.max_samples is None:
        return None
    return max(LEAST_BEFORE, math.ceil(SPARE * data.max_samples / (1 - data.heldout_share)))


def _needed(data: DataConfig, dialogues: list[Dialogue]) -> list[Dialogue]:
    """The dialogues that are asked at all: an answer is dear, and training takes `data.max_samples` of them."""
    most = _most_dialogues(data)
    if most is None or most >= len(dialogues):
        return dialogues
    asked, _ = _parted(dialogues, most)
    if len(asked) < len(dialogues):
        print(
            f"{len(asked):,} of {len(dialogues):,} dialogues are asked: data.max_samples={data.max_samples} needs no "
            "more",
            flush=True,
        )
    return asked


def _answer_all(run: RunWithTarget, dialogues: list[Dialogue], file: Path, mode: int) -> None:
    """Write the answers of all dialogues in order, with the file mode `mode`; answers of a crashed process are kept."""
    part = file.with_suffix(".part")
    part.touch(mode)
    places = places_by("asked", part)
    before, later = _divided(run, dialogues)
    unanswered = [dialogue for dialogue in before if dialogue.asked not in places]
    if places:
        print(f"{len(before) - len(unanswered)} of {len(before)} documents were regenerated before", flush=True)
    with (
        TemporaryDirectory() as images, closing(start_text_engine(run, Path(images))) as engine,
        part.open("ab") as written, bars() as bar,
    ):  # fmt: skip
        advance, synced = bar("regenerated documents", len(unanswered)), time.monotonic()
        for dialogue in engine.finished(iter(unanswered)):
            places[dialogue.asked] = written.tell()
            written.write(as_line(_as_record(dialogue)).encode())
            written.flush()
            if time.monotonic() - synced > SYNC_S:
                os.fsync(written.fileno())
                synced = time.monotonic()
            advance(1)
    with TemporaryDirectory() as images, part.open("ab") as written:
        prompter = recipe_prompter(run, Path(images))
        for dialogue in later:
            prompter.leave_open(dialogue)
            places[dialogue.asked] = written.tell()
            written.write(as_line(_as_record(dialogue)).encode())
    # Refusals first: where the answers are, all is there.
    refusals = file.with_suffix(REFUSED)
    with part.open("rb") as lines, replacing(file, mode) as answers, replacing(refusals, mode) as refused:
        for dialogue in dialogues:
            lines.seek(places[dialogue.asked])
            line = lines.readline()
            record = json.loads(line)
            if record["generated"]:
                answers.write(line)
            elif record["fault"]:
                refused.write(as_line({"fault": record["fault"]}).encode())
    part.unlink()
    sync_folder(file.parent)


def _divided(run: RunWithTarget, dialogues: list[Dialogue]) -> tuple[list[Dialogue], list[Dialogue]]:
    """The dialogues that are answered now, and those left for later."""
    return _parted(dialogues, max(LEAST_BEFORE, math.ceil(run.config.data.answered_before * len(dialogues))))


def _parted(dialogues: list[Dialogue], count: int) -> tuple[list[Dialogue], list[Dialogue]]:
    """`count` dialogues or a few more, which do not depend on the source's order, and the others; both in order.

    Those that begin with the same question stay together, as they do in the held-out part, which needs answers.
    """
    beginnings = [dialogue.document.dialogue_hash for dialogue in dialogues]
    last = max(sorted(beginnings)[:count], default="")
    first, others = list[Dialogue](), list[Dialogue]()
    for dialogue, beginning in zip(dialogues, beginnings, strict=True):
        (first if beginning <= last else others).append(dialogue)
    return first, others


def _is_open(line: Mapping[str, Any]) -> bool:
    return any(sample.get("room") for sample in line["generated"])


def _as_record(dialogue: Dialogue) -> dict[str, object]:
    """The record from which `read_documents` reads the document with its tokens."""
    document = dialogue.so_far()
    if document.plain:
        record: dict[str, object] = {"text": document.text}
    else:
        tools = {"tools": [dict(tool) for tool in document.tools]} if document.tools else {}
        # Images are those of the tokens; in the turns their places are left.
        turns = [replace(message, images=()).as_dict() for message in document.messages]
        record = {"messages": turns, **tools}
    generated = [
        {"input_ids": sample.ids, "loss_mask": sample.mask}
        | ({"room": sample.room} if sample.room else {})
        | ({"images": [as_text(image) for image in sample.images]} if sample.images else {})
        for sample in dialogue.samples
    ]
    counts = {"asked": dialogue.asked, "tokens": dialogue.tokens, "cut": dialogue.cut, "fault": dialogue.fault}
    return counts | record | {"generated": generated}


def kept_answers(run: RunFolder) -> RegeneratedRecord | None:
    """The answers that a resumed run began with, whatever its source holds by now; None where they are gone."""
    try:
        record: RegeneratedRecord = RegeneratedRecord.read(run.regenerated)
        os.utime(record.path)  # clean-up removes files that are not used
    except (FileNotFoundError, Refusal):
        return None
    return record


def main() -> None:
    folder = RunFolder(Path(sys.argv[1]).absolute())
    config, record = read_config(folder.config), kept_answers(folder)
    if (since := private_since(config.data.source)) is not None:
        keep_private(folder.path, since)
    if record is None:
        with measured_use(folder, "inference"):
            record = regenerate(RunWithTarget(folder, config, TargetRecord.read(folder.target)))
    write_atomically(folder.regenerated, record)
    print(record.summary, flush=True)


if __name__ == "__main__":
    run_main(main)
