"""`python -m models.data.prepare RUN_FOLDER`: tokenizes the run's text and writes samples.json.

A sample set of the same source with the same content is taken from the cache.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from infra.files.atomic import sha256_file, write_atomically
from infra.files.cached_folder import build_once
from infra.files.private import keep_private
from infra.files.run_folder import RunFolder
from infra.processes.exit import run_main
from infra.records.data_path import Histogram, RegeneratedRecord, SamplesRecord, TargetRecord
from infra.refusal import Refusal
from infra.settings import cache_folder
from models.config.data import LIVE, NO_TEMPLATE, DataConfig
from models.config.recipe import RunConfig, read_config
from models.data.benchmark_prompts import read_excluded_prompts
from models.data.chat_template import open_chat_template
from models.data.conversations import source_hash, source_revision, training_documents
from models.data.encoded import EncodedSample
from models.data.images import FOLDER, ImageProcessor, ImageShelf, images_hash
from models.data.outcomes import SHOWN_REFUSALS, collect
from models.data.parts import PARTS, make_encoder, outcomes_in_parts
from models.data.prompts import heldout_prompts, suite_address
from models.data.rendered_turns import read_back
from models.data.sample_set import SampleSet, Split, read_manifest, write_sample_set
from models.data.samples import SampleEncoder, Splits, divide
from models.data.sources import private_since
from models.data.tokenizer import read_tokenizer
from models.progress_bars import counting

FORMAT = 9
"""Increment when the same input gives other samples."""

BINS = 24
REFUSED = "refused.txt"
"""Lists all broken records and refused conversations, in the folder of the samples."""
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.jinja")


def prepare_samples(config: DataConfig, target: TargetRecord, add_bos: bool) -> SamplesRecord:
    """Tokenize `config.source` with the target's tokenizer, or take the samples from the cache.

    Raises Refusal: no samples can be made with this text, template or limits.
    """
    content = source_hash(config.source)
    tokenizer: PreTrainedTokenizerBase = read_tokenizer(target.path)
    ends = frozenset(target.eos_ids)
    chat = open_chat_template(tokenizer, config.chat_template, config.template_arguments)
    template = NO_TEMPLATE if chat is None else chat.hash
    made_by = tokenizer_hash(Path(target.path))
    key = _hash(
        FORMAT,
        content,
        template,
        made_by,
        target.vocab_size,
        sorted(ends),
        target.media_ids,
        add_bos,
        # The source's name is part of this, because the record and `refused.txt` name places in it.
        config.model_dump(exclude={"exclude", "chat_template", "template_arguments"}),
        sorted({source_hash(source) for source in config.exclude}),
        images_hash(config.images),
    )
    folder = cache_folder() / "samples" / key[:32]
    parts, since = folder.with_name(f".{folder.name}{PARTS}"), private_since(config.source)
    processor = None if config.images is None else ImageProcessor(Path(target.path))

    def build(aside: Path) -> None:
        prompts = tuple(read_excluded_prompts(config.exclude))
        made_for = {"vocabulary": target.vocab_size, "ends": ends, "media_ids": target.media_ids}
        settings = {"config": config, "add_bos": add_bos, "tokenizer_hash": made_by, **made_for}
        make = partial(make_encoder, target.path, prompts, **settings)
        broken: list[str] = []
        documents = counting(training_documents(config, broken), "tokenizing")
        if config.images is not None and processor is not None:
            encoder = make(shelf=ImageShelf(config.images, aside / FOLDER, processor))
            samples = encoder.encode(documents)
        else:
            encoder = make()
            samples = collect(outcomes_in_parts(documents, make, parts, since), config, encoder.counts)
        with _unchanged(config.source, content, parts):
            splits = divide(samples, config, encoder.counts, aside)
        left_out = broken + encoder.counts.refusals
        record = _record(splits, encoder, template, content).model_copy(
            update={"broken": len(broken), "refusals": tuple(left_out[:SHOWN_REFUSALS])}
        )
        if left_out:
            write_atomically(aside / REFUSED, "\n".join(left_out) + "\n")
        write_sample_set(aside, splits, record)

    build_once(folder, build, private_since=since)
    shutil.rmtree(parts, ignore_errors=True)
    return read_manifest(folder).samples


@contextmanager
def _unchanged(source: str, content: str, parts: Path) -> Iterator[None]:
    """Raises Refusal, and removes what was tokenized, if `source` no longer has the hash `content` after reading."""
    try:
        yield
    except Refusal:  # such as half a line at the end of a file that is being written
        check_unchanged(source, content, parts)
        raise
    check_unchanged(source, content, parts)


def check_unchanged(source: str, content: str, parts: Path | None = None) -> None:
    """Raise Refusal, and remove the folder `parts`, if the source's hash is no longer `content`."""
    if source_hash(source) != content:
        if parts is not None:
            shutil.rmtree(parts, ignore_errors=True)
        raise Refusal(f"data.source {source!r} changed while it was read: copy it, and give the copy as data.source")


def prepare_live(run: RunFolder, config: DataConfig, target: TargetRecord, add_bos: bool) -> SamplesRecord:
    """Requests collected before training: half are held out. Of the others those are learned whose dialogue is not held
    out. Places for later requests follow.

    They stay in the run's folder: the cache would keep what users wrote.
    """
    folder, texts = run.path / "samples", []
    tokenizer: PreTrainedTokenizerBase = read_tokenizer(target.path)
    for line in run.live.read_text().splitlines():
        text = json.loads(line)
        tokens = np.array(text["input_ids"], dtype=np.int32)
        one = EncodedSample(tokens, np.arange(len(tokens)) >= text["prompt"], "", turns=1)
        texts.append(replace(one, document=read_back(tokenizer, text["input_ids"]).dialogue_hash))
    half, most = len(texts) // 2, config.max_samples
    heldout = texts[half:]
    held = {one.document for one in heldout}
    # The canary needs a text to learn.
    learned = [one for one in texts[:half] if one.document not in held] or texts[:half][:1]
    assert most is not None, "recipes with data.source=live say how many samples they learn"
    # A number in the first token tells the places apart; nobody reads it.
    numbered = (np.pad(np.array([at], dtype=np.int32), (0, config.max_tokens - 1)) for at in range(most - len(learned)))
    whole = np.ones(config.max_tokens, dtype=bool)
    places = [EncodedSample(tokens, whole, "", turns=1, prompt=-1) for tokens in numbered]
    splits = Splits(train=sorted((*learned, *places), key=lambda one: one.id), heldout=heldout)
    encoder = SampleEncoder(tokenizer, config, add_bos, tokenizer_hash=tokenizer_hash(Path(target.path)))
    template = NO_TEMPLATE if encoder.template is None else encoder.template.hash
    folder.mkdir(mode=0o700, exist_ok=True)
    write_sample_set(folder, splits, _record(splits, encoder, template, sha256_file(run.live)))
    return read_manifest(folder).samples


def recipe_data(config: RunConfig) -> DataConfig:
    """The recipe's data settings, with the suites of the gate excluded from training."""
    exclude = dict.fromkeys((*config.data.exclude, *map(suite_address, config.promotion.suites.values())))
    return config.data.model_copy(update={"exclude": tuple(exclude)})


def tokenizer_hash(folder: Path) -> str:
    """Hash of the tokenizer's files."""
    files = sorted({path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)})
    return _hash(*((path.name, sha256_file(path)) for path in files))


def _hash(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _ids_hash(*sides: Sequence[EncodedSample]) -> str:
    """`_hash` of the lists of their ids, of which it never holds more than one."""
    found = hashlib.sha256(b"[")
    for number, side in enumerate(sides):
        found.update(b", [" if number else b"[")
        for place, sample in enumerate(side):
            found.update(f'{", " if place else ""}"{sample.id}"'.encode())
        found.update(b"]")
    found.update(b"]")
    return found.hexdigest()


def _record(splits: Splits, encoder: SampleEncoder, template: str, content: str) -> SamplesRecord:
    train = splits.train
    lengths = np.array([len(sample.tokens) for sample in train])
    supervised = np.array([int(sample.loss_mask.sum()) for sample in train])
    turns = np.array([sample.turns for sample in train])
    return SamplesRecord(
        path="",
        dataset_hash=_ids_hash(train, splits.heldout),
        template_hash=template,
        tokenizer_hash=encoder.tokenizer_hash or "",
        source_hash=content,
        source_revision=source_revision(encoder.config.source),
        train_samples=len(train),
        heldout_samples=len(splits.heldout),
        train_tokens=int(lengths.sum()),
        unanswered=sum(bool(sample.prompt) for sample in train),
        longest=int(lengths.max()),
        supervised_share=int(supervised.sum()) / int(lengths.sum()),
        **{name: value for name, value in vars(encoder.counts).items() if name not in ("documents", "refusals")},
        refused=len(encoder.counts.refusals),
        compared_prompts=len(encoder.excluded),
        thinking=sum(sample.thinking for sample in train),
        with_images=sum(bool(sample.images) for sample in train),
        lengths=histogram(lengths),
        supervised=histogram(supervised),
        turns=histogram(turns) if turns.any() else None,
    )


def histogram(values: NDArray[np.int64]) -> Histogram:
    """At most `BINS` bins of a round width over values `[N]`, at least one and none negative."""
    low, high = int(values.min()), int(values.max())
    widths = (digit * 10**power for power in count() for digit in (1, 2, 5))
    width = next(width for width in widths if high // width - low // width < BINS)
    first = low // width
    counts = np.bincount(values // width - first)
    return Histogram(width=width, first=first * width, counts=tuple(counts.tolist()))


def summary(record: SamplesRecord) -> str:
    """One line, and one for each of the first conversations that were left out."""
    left_out = {
        "split": record.split,
        "truncated": record.truncated,
        "dropped for their length": record.dropped,
        "unusable": record.unusable,
        "broken": record.broken,
        "refused": record.refused,
        "left out as duplicates": record.duplicates,
        f"with one of {record.compared_prompts} benchmark prompts left out": record.benchmark_prompts,
    }
    notes = "".join(f", {count:,} {what}" for what, count in left_out.items() if count)
    if record.reasoning_dropped:
        notes += (
            f"; {record.reasoning_dropped} learned without their reasoning, for which the chat template has no place"
        )
    if record.unanswered:
        notes += f"; {record.unanswered} of them answered while they are captured, tokens are the most there may be"
    if record.with_images:
        notes += f"; {record.with_images} of them with images"
    has_more = record.broken + record.refused > len(record.refusals)
    more = f"\n  all of them: {Path(record.path) / REFUSED}" if has_more else ""
    return (
        f"samples: {record.train_samples:,} to train on ({record.train_tokens:,} tokens, longest {record.longest:,}, "
        f"{record.supervised_share:.1%} supervised), {record.heldout_samples:,} held out{notes}"
        + "".join(f"\n  left out: {refusal}" for refusal in record.refusals)
        + more
    )


def kept_samples(run: RunFolder) -> SamplesRecord | None:
    """The samples that a resumed run began with, whatever its source holds by now; None where they are not whole."""
    try:
        record: SamplesRecord = SamplesRecord.read(run.samples)
        for split in get_args(Split):
            SampleSet.open(Path(record.path), split)
    except (FileNotFoundError, Refusal, TypeError):  # the last for tensors of an older version
        return None
    with suppress(PermissionError):
        os.utime(record.path)  # clean-up removes what is not used
    return record


def _made_samples(folder: RunFolder, config: RunConfig) -> SamplesRecord:
    data, revision, target = recipe_data(config), {}, TargetRecord.read(folder.target)
    if data.regeneration is not None:
        regenerated: RegeneratedRecord = RegeneratedRecord.read(folder.regenerated)
        data = data.model_copy(update={"source": regenerated.path})
        revision = {"source_revision": regenerated.source_revision}
    if data.source == LIVE:
        return prepare_live(folder, data, target, config.target.add_bos)
    return prepare_samples(data, target, config.target.add_bos).model_copy(update=revision)


def main() -> None:
    folder = RunFolder(Path(sys.argv[1]).absolute())
    config = read_config(folder.config)
    if (since := private_since(config.data.source)) is not None:
        keep_private(folder.path, since)
    record = kept_samples(folder) or _made_samples(folder, config)
    heldout_prompts(SampleSet.open(Path(record.path), "heldout"), config.benchmark)  # refuses now, not after training
    write_atomically(folder.samples, record)
    print(summary(record))


if __name__ == "__main__":
    run_main(main)
