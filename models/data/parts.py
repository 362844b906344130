"""Tokenizes a large source in parts, several at once, and keeps each in a file until all are done.

Reading and comparing documents stays in this process, so the samples are those of one process. After a kill only the
parts that are missing are tokenized.
"""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

from infra.files.private import keep_private
from infra.processes.control_groups import cores
from infra.settings import use_one_tokenizer_thread
from models.data.benchmark_prompts import BenchmarkPrompts
from models.data.conversations import Document
from models.data.outcomes import Outcome, read_outcomes, write_outcomes
from models.data.samples import PART, SampleEncoder
from models.data.tokenizer import read_tokenizer

FEW = 8 * PART
"""Fewer documents than these are tokenized in this process: another one would start later than they are done."""
PARTS = ".parts"
"""End of the name of the folder that holds the parts."""
AHEAD = 4
"""Parts per process that wait to be tokenized."""


MakeEncoder = Callable[[], SampleEncoder]
"""Makes a process's encoder; it can be pickled."""


def make_encoder(target: str, prompts: Iterable[str], **settings: Any) -> SampleEncoder:
    """An encoder with the target's tokenizer that leaves these prompts out; `settings` as of SampleEncoder."""
    return SampleEncoder(read_tokenizer(target), excluded=BenchmarkPrompts(prompts), **settings)


def outcomes_in_parts(
    documents: Iterable[Document], make: MakeEncoder, folder: Path, private_since: float | None = None
) -> Iterator[Outcome]:
    """What becomes of all documents, in order; their parts are kept in `folder`, private as in `build_once`."""
    ordered = iter(documents)
    first = list(islice(ordered, FEW))
    if len(first) < FEW and not folder.is_dir():
        yield from make().outcomes(first)
        return
    folder.mkdir(parents=True, exist_ok=True)
    if private_since is not None:
        keep_private(folder, private_since)
    rest = chain(first, ordered)
    parts = zip(count(), iter(lambda: list(islice(rest, PART)), []))
    processes = max(1, cores() - 1)
    with worker_pool(processes, make) as pool:
        ahead = deque[tuple[Path, Future[None] | None]]()
        for number, part in parts:
            path = folder / f"{number:07d}.npz"
            ahead.append((path, None if path.is_file() else pool.submit(_tokenize, path, part)))
            if len(ahead) > AHEAD * processes:
                yield from _finished(*ahead.popleft())
        for path, future in ahead:
            yield from _finished(path, future)


def worker_pool(processes: int, make: MakeEncoder | None) -> ProcessPoolExecutor:
    """Processes that tokenize, each with such an encoder; they end with this one, also where it is killed."""
    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _open, (make,))


def _finished(path: Path, future: Future[None] | None) -> Iterator[Outcome]:
    if future is not None:
        future.result()
    yield from read_outcomes(path)


_encoders: list[SampleEncoder] = []
"""The one of this process."""


def _open(make: MakeEncoder | None) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    use_one_tokenizer_thread()
    if make is not None:
        _encoders.append(make())


def _end_with_parent() -> None:
    """A worker of a killed process would wait for work for ever: it holds both ends of its queue."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _tokenize(path: Path, documents: Sequence[Document]) -> None:
    write_outcomes(path, list(_encoders[0].outcomes(documents)))
