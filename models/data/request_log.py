"""`python -m models.data.request_log CONFIG.json FOLDER`: fresh prompts from request logs, without private data.

Samples distinct requests without private data from the JSONL logs of `RequestLogConfig`. Writes them to
FOLDER/prompts-<hash>.jsonl, a possible `data.source`, and their record to FOLDER/prompts.json. This is a separate
process because it reads a lot, and because Presidio loads torch if it is installed.

Logs are read from the newest hour until there are enough prompts, because the drifted traffic is the newest. Files that
were written last in the same hour are read together: servers, replicas and tenants may have a log each. Within an hour
each request has a key, -ln(u) / weight, where u in (0, 1] is a hash of seed and text, and the smallest keys are
kept: weighted sampling without replacement (Efraimidis and Spirakis, 2006, section 2). It does not depend on order, nor
on how often a request was sent, and only requests that would be kept are searched for private data. The weight is the
verification steps per token that the engine counted: what accepted little teaches a draft most.
"""

import argparse
import errno
import hashlib
import heapq
import json
import lzma
import math
import re
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import fsspec

from infra.drift.config import RequestLogConfig
from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.records.prompts import PromptsRecord
from infra.refusal import Refusal
from models.data.message import joined
from models.data.tools import check_json, parsed

LOGS = re.compile(r"\.jsonl([.-]\d[\d_.-]*)?(\.(gz|bz2|xz))?$")
"""Ends of the names of logs, as logrotate and Python's handlers give them: a.jsonl, a.jsonl.2.gz, a.jsonl-20261129."""
OF_ONE_FILE = {None, errno.ENOENT, errno.EACCES, errno.EPERM, errno.EBUSY}
"""Errors of a file that was rotated away, that others may read, that changes, or that is damaged (without a number)."""
EXPORTED = "sglang-request-metrics-"
"""SGLang's own files, of --export-metrics-to-file. They hold the text of requests to /generate alone."""
IDS_ALONE = "with token ids alone (a chat in SGLang's own file: log requests at your gateway)"
ASSUMED_LENGTH = 2.0
"""Tokens a step of a request whose steps were not logged."""
HASHES = 2**128
RECORD = "prompts.json"

BESIDE = ("tools", "functions", "system")
"""Keys of a request, beside its messages, that its prompt depends on."""
OF_A_MESSAGE = ("name", "tool_call_id", "reasoning_content", "tool_calls", "function_call")
"""Keys of a message, beside role and content, that its prompt depends on."""
Request = dict[str, Any]
"""`{"messages": [{"role", "content", ...}, ...], ...}` with the keys above, or `{"text": ...}`."""


@dataclass(frozen=True)
class Logged:
    """A line of a log."""

    request: Request
    steps_per_token: float
    """Verification steps per generated token."""


def parse(line: bytes) -> Logged | str:
    """The request in one line of a log, or the reason why it gives no prompt."""
    try:
        logged = json.loads(line)
        if isinstance(logged, dict) and isinstance(logged.get("request_parameters"), str):  # SGLang's own file
            asked = json.loads(logged["request_parameters"])
            logged = {**logged, "prompt": asked.get("text")}
            if logged["prompt"] is None and asked.get("input_ids"):
                return IDS_ALONE
    except (ValueError, AttributeError, RecursionError):
        return "not JSON"
    if not isinstance(logged, dict):
        return "not a request"
    request = _request(logged)
    if isinstance(request, str):
        return request
    try:
        json.dumps(request, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "with half a surrogate pair"
    return Logged(request, _steps_per_token(logged))


def _request(logged: dict[str, Any]) -> Request | str:
    if isinstance(logged.get("prompt"), str):
        return {"text": logged["prompt"]} if logged["prompt"].strip() else "empty"
    if not isinstance(logged.get("messages"), list) or not logged["messages"]:
        return "not a request"
    messages = []
    for message in logged["messages"]:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return "not only text"
        kept = {key: message[key] for key in OF_A_MESSAGE if message.get(key)}
        content = message.get("content")
        if content is None and ("tool_calls" in kept or "function_call" in kept):
            content = ""  # as in OpenAI's API
        if isinstance(content, list) and _are_texts(content):
            content = [{"type": "text", "text": part["text"]} for part in content]
        elif not isinstance(content, str):
            return "not only text"
        messages.append({"role": message["role"], "content": content, **kept})
    request = {"messages": messages, **{key: logged[key] for key in BESIDE if logged.get(key)}}
    try:
        check_json("", _beside_texts(request))
    except Refusal:
        return "nested too deeply"
    return request if any(text.strip() for text in texts(request)) else "empty"


def _steps_per_token(logged: dict[str, Any]) -> float:
    """As SGLang counts; at most 1, which a step without a proposal gives."""
    counts = {**meta, **logged} if isinstance(meta := logged.get("meta_info"), dict) else logged
    steps, tokens = counts.get("spec_verify_ct"), counts.get("completion_tokens")
    if not isinstance(steps, int) or not isinstance(tokens, int) or steps < 1 or tokens < 1:
        return 1 / ASSUMED_LENGTH
    return min(1.0, steps / tokens)


def _are_texts(parts: list[Any]) -> bool:
    return all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts)


def texts(request: Request) -> list[str]:
    """The text of each message, or that of the prompt."""
    if "text" in request:
        return [request["text"]]
    contents = (message["content"] for message in request["messages"])
    return [one if isinstance(one, str) else joined([part["text"] for part in one]) for one in contents]


def searched_texts(request: Request) -> list[str]:
    """All texts of a request: of its messages, tools and tool calls."""
    values = [_unfolded(value) for value in _beside_texts(request)]
    leaves = ("\n".join(_leaves(value)) for value in values)
    # In JSON a name stands beside its value; alone, a value has no escaped characters.
    return [*texts(request), *(json.dumps(value, ensure_ascii=False) for value in values), *leaves]


def _beside_texts(request: Request) -> list[Any]:
    """What a request holds beside the texts of its messages."""
    of_messages = [message.get(key) for message in request.get("messages", ()) for key in OF_A_MESSAGE]
    return [value for value in [*(request.get(key) for key in BESIDE), *of_messages] if value]


def _unfolded(value: Any) -> Any:
    """A JSON value with the values of the JSON texts in it, such as the arguments of calls."""
    value = parsed(value)
    if isinstance(value, dict):
        return {key: _unfolded(item) for key, item in value.items()}
    return [_unfolded(item) for item in value] if isinstance(value, list) else value


def _leaves(value: Any) -> Iterator[str]:
    """The texts and numbers in a JSON value."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    elif value is not None:
        yield str(value)


def logged_texts(log: Path | str) -> list[str]:
    """All texts of one log, in its order. Raises Refusal if it cannot be read or has no text."""
    try:
        with fsspec.open(str(log), "rb", compression="infer") as file:
            requests = [logged.request for line in file if not isinstance(logged := parse(line), str)]
    except (OSError, EOFError) as error:
        raise Refusal(f"{log}: {error}: give a .jsonl or .jsonl.gz file of requests") from error
    found = [text for request in requests for text in texts(request)]
    if not found:
        raise Refusal(f"{log} has no request: its lines need `messages` or `prompt`, as in OpenAI's API")
    return found


class PromptSample:
    """Keeps the newest requests without private data that have the smallest keys."""

    def __init__(self, config: RequestLogConfig, find: Callable[[list[str]], set[str]]):
        self._config, self._find = config, find
        self._heap: list[tuple[int, float, str]] = []
        """Negated age, negated key and JSON: the largest key of the oldest hour is on top."""
        self._seen: set[int] = set()
        self.dropped: Counter[str] = Counter()
        self.read = self.searched = 0

    @property
    def full(self) -> bool:
        return len(self._heap) == self._config.prompts

    def add(self, line: bytes, age: int = 0) -> None:
        """Add one line of a log; `age` is that of its file in hours, 0 for the newest."""
        if not line.strip():
            return
        self.read += 1
        logged = parse(line)
        if isinstance(logged, str):
            self.dropped[logged] += 1
            return
        request = logged.request
        if sum(map(len, [*texts(request), *map(json.dumps, _beside_texts(request))])) > self._config.longest_characters:
            self.dropped["too long"] += 1
            return
        document = json.dumps(request, ensure_ascii=False)
        place = int.from_bytes(hashlib.blake2b(f"{self._config.seed} {document}".encode(), digest_size=16).digest())
        if place in self._seen:
            self.dropped["duplicate"] += 1
            return
        self._seen.add(place)
        key = -math.log((place + 1) / HASHES) / logged.steps_per_token**self._config.low_acceptance
        if self.full and (-age, -key) <= self._heap[0][:2]:
            return
        self.searched += 1
        private = self._find(searched_texts(request))
        if private:
            self.dropped.update(private)
            return
        heapq.heappush(self._heap, (-age, -key, document))
        if len(self._heap) > self._config.prompts:
            heapq.heappop(self._heap)

    def documents(self) -> list[str]:
        """The requests of the more frequent kind: a dataset has one template."""
        chosen = [document for *_, document in sorted(self._heap, reverse=True)]
        plain = [document for document in chosen if "text" in json.loads(document)]
        chats = [document for document in chosen if "messages" in json.loads(document)]
        kept, rarer = (plain, chats) if len(plain) > len(chats) else (chats, plain)
        self.dropped["of the rarer kind (prompt or messages)"] += len(rarer)
        return kept


def recent_logs(config: RequestLogConfig, now: float, damaged: list[str]) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Age and lines of each recent log, newest log first; the rest of one that cannot be read is left out and named in
    `damaged`. The age is in whole hours from the newest log's. Raises Refusal if there are no recent logs."""
    files, root = fsspec.core.url_to_fs(config.folder)
    listed: dict[str, dict[str, Any]] = files.find(root, detail=True)
    logs = sorted(path for path in listed if LOGS.search(path) or Path(path).name.startswith(EXPORTED))
    fresh = [path for path in logs if now - _changed(listed[path]) <= config.hours * 3600]
    fresh.sort(key=lambda path: _changed(listed[path]), reverse=True)
    if not fresh:
        raise Refusal(
            f"{config.folder} has {len(logs)} request logs (.jsonl, also rotated or packed: .jsonl.2.gz), none of "
            f"the last {config.hours:g} hours: correct requests.folder or raise requests.hours"
        )
    for path in fresh:
        hours = (_changed(listed[fresh[0]]) - _changed(listed[path])) // 3600
        yield int(hours), _lines(files, path, damaged)


def _lines(files: Any, path: str, damaged: list[str]) -> Iterator[bytes]:
    try:
        with files.open(path, "rb", compression="infer") as file:
            yield from file
    except EOFError:  # a compressed log that is still being written
        return
    except (OSError, zlib.error, lzma.LZMAError) as error:
        away = isinstance(error, ConnectionError | TimeoutError)
        if isinstance(error, OSError) and (away or error.errno not in OF_ONE_FILE):
            raise
        damaged.append(f"{path} cannot be read ({error})")
        print(f"{damaged[-1]}: left out", flush=True)


def _changed(info: dict[str, Any]) -> float:
    """Time of the last write, from S3's or a local file system's metadata."""
    changed = info.get("LastModified", info.get("mtime"))
    return changed.timestamp() if isinstance(changed, datetime) else float(changed or 0.0)


def sample_prompts(
    config: RequestLogConfig, folder: Path, find: Callable[[list[str]], set[str]], now: float
) -> PromptsRecord:
    """Write the dataset and its record. Raises Refusal if the logs give no prompt."""
    sample, damaged = PromptSample(config, find), list[str]()
    for age, logs in groupby(recent_logs(config, now, damaged), key=itemgetter(0)):
        for _, lines in logs:
            for line in lines:
                sample.add(line, age)
        if sample.full:
            break
    documents = sample.documents()
    if not documents:
        dropped = [f"{count} {kind}" for kind, count in sample.dropped.most_common()]
        why = ", ".join([*dropped, *damaged]) or "they are empty"
        raise Refusal(f"the request logs in {config.folder} give no prompt: {sample.read} lines read, {why}")
    data = "".join(f"{document}\n" for document in documents).encode()
    sha256 = hashlib.sha256(data).hexdigest()
    path = folder.absolute() / f"prompts-{sha256[:12]}.jsonl"
    write_atomically(path, data, mode=0o600)  # what users wrote
    record = PromptsRecord(
        path=str(path),
        sha256=sha256,
        prompts=len(documents),
        lines=sample.read,
        searched=sample.searched,
        dropped={kind: count for kind, count in sorted(sample.dropped.items()) if count},
        sampled=datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds"),
    )
    write_atomically(folder / RECORD, record)
    return record


def main() -> None:
    try:
        from models.data.private_data import find_private_data
    except ModuleNotFoundError as error:
        raise Refusal(
            f"{error.name} is missing: request logs are not read without a search for private data; "
            "pip install --editable '.[drift]' in the project's folder"
        ) from error
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    config = RequestLogConfig.model_validate_json(options.config.read_text())
    print(sample_prompts(config, options.folder, find_private_data, time.time()).summary, flush=True)


if __name__ == "__main__":
    run_main(main)
