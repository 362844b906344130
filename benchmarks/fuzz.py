# ruff: noqa: E501 (tables of damaged input read better whole)
"""Damaged input of every kind: `python -m benchmarks.fuzz --cases 2000 [--json FILE]`.

Every case takes valid input, mutates it by a seed, and gives it to the code that reads it, in this process. It ends in
one of three ways: `ok`; `refused`, with a message that names a place and a remedy (`PLACE`, `REMEDY`); or `fault`:
another exception, a refusal without one of the two, or no end within `LIMIT_S`.
"""

import argparse
import copy
import json
import os
import random
import re
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlflow  # noqa: F401 (imported here, or the first case would take as long as the import)
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from flows.command_line import app
from infra.files.run_folder import RunFolder
from infra.provenance import git_sha
from infra.refusal import Refusal
from models.config.data import DataConfig
from models.config.recipe import load_recipe
from models.data.benchmark_prompts import read_excluded_prompts
from models.data.conversations import read_documents
from models.data.prompts import OWN_SUITE, read_questions
from models.data.samples import SampleEncoder
from models.export.published_settings import read_published
from tasks.plan import checked_plan

LIMIT_S = 10
DEEPEST = 40
RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.yaml"
PLACE = re.compile(r"[\w~-]+/[\w.]|\w+\.\w+|--\w+|'.+'|\bline \d+|\brecord \d+|\brow \d+")
REMEDY = re.compile(
    r"\b(correct|set|give|use|remove|write|restore|raise|lower|choose|leave|start|check|convert|make|rename|add|name|"
    r"change|move|shorten|flatten|mend|did you mean|install|create|try|take|wait|requires)\b",
    re.IGNORECASE,
)
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 10**18, 10**400, -(10**400), float("nan"), float("inf"), -0.0, 1e308, "", " ", "\0", "é" * 5000,
    "\u202e", "../../etc/passwd", "/", "~nobody-knows/x", "a" * 300, "[", "{}", "null", "http://[", "mysql://x/y", "s3://",
    "hf://x", "sqlite:///", "sqlite:////dev/null/x.db", "garbage", [], {}, [[]], [None], {"": None}, {"a": {"b": []}}, [1] * 2000,
)  # fmt: skip
PLAUSIBLE: tuple[Any, ...] = (
    1, 2, 3, 7, 16, 100, 1024, 0.5, 0.1, 1e-4, 1.0, False, "none", "any", "strict", "float32", "bfloat16", "eagle3", "dflash",
    "medusa", "stored", "files", "sglang", "local", "greedy", "tiny", [0, 1], [1, 2, 3], [0.9, 0.95], {},
)  # fmt: skip
"""What a person might write: accepted in one place, a contradiction in another."""
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
RECORDS: list[Any] = [
    {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n}."}]}
    for n in range(4)
] + [
    {"conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Good day"}], "system": "Be kind"},
    {"tools": [{"type": "function", "function": {"name": "f"}}],
     "messages": [{"role": "user", "content": "Call f"},
                  {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
                  {"role": "tool", "content": "4", "tool_call_id": "1"}, {"role": "assistant", "content": "4"}]},
    {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
    {"text": "Plain text of some words."},
    {"question": "How many?", "category": "math"},
]  # fmt: skip
PUBLISHED = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 1024, "draft_vocab_size": 256,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}  # fmt: skip


class HangError(BaseException):
    """No end within the limit; no handler of ordinary exceptions catches it."""


@contextmanager
def watched() -> Iterator[None]:
    """Raises HangError in the body after LIMIT_S."""

    def stop(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Ending:
    """Keeps how its body ended, whatever it raised, but for an interrupt."""

    error: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        self.error = error
        return not isinstance(error, KeyboardInterrupt)

    def judged(self) -> tuple[str, str]:
        if self.error is None:
            return "ok", ""
        if isinstance(self.error, HangError):
            return "fault", f"no end within {LIMIT_S} s"
        if not isinstance(self.error, Refusal):
            return "fault", "".join(traceback.format_exception(self.error))
        said = str(self.error)
        missing = [what for what, form in (("place", PLACE), ("remedy", REMEDY)) if not form.search(said)]
        return ("fault", f"no {' and no '.join(missing)}: {said}") if missing else ("refused", said)


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of the values inside a tree, but for the deepest."""
    if len(path) > DEEPEST:
        return []
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(deeper for key, value in inside for deeper in places(value, (*path, key)))]


def mutated(tree: Any, dice: random.Random) -> Any:
    """The tree with one to three values replaced, removed, doubled, nested, or given under another key."""
    tree = copy.deepcopy(tree)
    for _ in range(dice.randint(1, 3)):
        chosen = [path for path in places(tree) if path]
        if not chosen:
            return dice.choice(ODD)
        *above, key = dice.choice(chosen)
        parent = tree
        for part in above:
            parent = parent[part]
        change = dice.randrange(6)
        if change == 0:
            del parent[key]
        elif change == 1 and isinstance(parent, dict):
            parent[dice.choice([f"{key}x", "", "\0", 5])] = parent.pop(key)
        elif change == 2:
            value: Any = parent[key]
            for _ in range(dice.choice([1, 3, 70, 600])):
                value = [value] if dice.random() < 0.5 else {"a": value}
            parent[key] = value
        elif change == 3 and isinstance(parent, list):
            parent.extend([parent[key]] * dice.choice([1, 50]))
        else:
            parent[key] = copy.deepcopy(dice.choice(dice.choice([ODD, PLAUSIBLE])))
    return tree


def spoiled(data: bytes, dice: random.Random) -> bytes:
    """The bytes as they are, or truncated, with junk, or with a damaged encoding."""
    cut = dice.randrange(len(data) + 1)
    forms = (
        data,
        data,
        data,
        data[:cut],
        data[:cut] + dice.randbytes(9) + data[cut:],
        data[:cut] + b"\\ud800" + data[cut:],
        b"",
    )
    return dice.choice(forms)


def put(path: Path, data: bytes, dice: random.Random) -> Path:
    """The file at `path`; sometimes a folder, a dangling link or a loop in its place."""
    kind = dice.randrange(30)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        path.symlink_to(path.with_name("missing"))
    elif kind == 2:
        path.symlink_to(path)
    elif kind == 3:
        os.mkfifo(path)
    else:
        path.write_bytes(data)
    return path


def as_yaml(tree: Any) -> bytes:
    try:
        return yaml.safe_dump(tree, allow_unicode=True).encode()
    except (RecursionError, ValueError):
        return b"name: " + b"[" * 5000


def as_json(tree: Any) -> str:
    try:
        return json.dumps(tree)
    except (RecursionError, ValueError, TypeError):
        return "[" * 5000


def recipes(folder: Path, dice: random.Random) -> None:
    tree = mutated(yaml.safe_load(RECIPE.read_text()), dice)
    checked_plan(load_recipe(put(folder / "recipe.yaml", spoiled(as_yaml(tree), dice), dice)))


def overrides(folder: Path, dice: random.Random) -> None:
    config = load_recipe(RECIPE).model_dump(mode="json")
    keys = [".".join(map(str, path)) for path in places(config) if path]
    given = []
    for _ in range(dice.randint(1, 3)):
        key = dice.choice([dice.choice(keys), "a.b", "..", "=", "", "training", "seed.x"])
        given.append(
            f"{key}{dice.choice(['=', '=', '=', ''])}{dice.choice([as_json(dice.choice(ODD)), as_json(dice.choice(PLAUSIBLE)), '[', '1e8', '.inf', '*a', '!x y'])}"
        )
    checked_plan(load_recipe(RECIPE, given))


def data_file(folder: Path, dice: random.Random) -> str:
    """A source of mutated records, of any kind."""
    records = [
        mutated(record, dice) if dice.random() < 0.3 else record
        for record in dice.choices(RECORDS, k=dice.randint(1, 8))
    ]
    kind = dice.choice(["jsonl", "jsonl", "json", "txt", "parquet", "docx"])
    if kind == "parquet":
        import pyarrow as pa
        from pyarrow import parquet

        try:
            parquet.write_table(pa.Table.from_pylist(records), folder / "made.parquet")
            data = (folder / "made.parquet").read_bytes()
        except (pa.ArrowException, OverflowError, ValueError, TypeError, AttributeError, RecursionError):
            data = b"PAR1"
        (folder / "made.parquet").unlink(missing_ok=True)
    elif kind == "json":
        data = as_json(records).encode()
    else:
        data = "\n".join(as_json(record) for record in records).encode()
    return str(put(folder / f"data.{kind}", spoiled(data, dice), dice))


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word."""
    made = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[misc]
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", chat_template=CHAT)


def datasets(folder: Path, dice: random.Random) -> None:
    source = data_file(folder, dice)
    template = dice.choice(["tokenizer", "none"])
    encoder = SampleEncoder(tokenizer(), DataConfig(source=source, chat_template=template, min_tokens=2), add_bos=False)  # pyright: ignore[reportArgumentType]
    list(encoder.encode(read_documents(source)))


def prompts(folder: Path, dice: random.Random) -> None:
    source = data_file(folder, dice)
    list(read_questions(source, OWN_SUITE)) if dice.random() < 0.5 else list(read_excluded_prompts([source]))


def drafts(folder: Path, dice: random.Random) -> None:
    settings = mutated(PUBLISHED, dice)
    try:
        read_published(settings if isinstance(settings, dict) else {})
    except Refusal as refusal:
        raise Refusal(f"{folder / 'config.json'}: {refusal}") from refusal  # as its caller names the place


def run_folders(folder: Path, dice: random.Random) -> None:
    run = RunFolder(folder / "tiny-1")
    run.path.mkdir()
    run.config.write_text(load_recipe(RECIPE).model_dump_json())
    names = ["config.json", "target.json", "samples.json", "training.json", "metrics.jsonl", "generators.jsonl", "plan.json",
             "report.json", "ledger.sqlite", "export.json", "benchmark.json"]  # fmt: skip
    for name in dice.sample(names, dice.randint(1, 6)):
        (run.path / name).unlink(missing_ok=True)
        tree = mutated({"step": 2, "loss": 1.0, "rates": {}, "seconds": 1}, dice)
        put(run.path / name, spoiled(as_json(tree).encode(), dice), dice)
    invoke(["status", str(run.path)])


def command_lines(folder: Path, dice: random.Random) -> None:
    words = ["status", "drafts", "list", "promote", "history", "retrain", "--plan", "--resume", "--name", "o'brien", "a/b", "regenerate",
             str(RECIPE), "-1", "seed=x", "\u202e", "--run", "nowhere", "bench", "--repeats", "1", "--help", "é" * 300, "..", "/"]  # fmt: skip
    given = [
        dice.choice(["status", "drafts", "retrain", "bench", "regenerate"]),
        *dice.choices(words, k=dice.randint(0, 4)),
    ]
    if given[0] == "retrain":
        given.append("--plan")
    invoke(given)


def registries(folder: Path, dice: random.Random) -> None:
    database = put(folder / "mlflow.db", b"SQLite format 3\0"[: dice.randint(1, 16)] + dice.randbytes(200), dice)
    if not database.exists():
        database = folder  # a missing one would be created, which takes seconds
    uri = dice.choice(
        [
            f"sqlite:///{database}",
            f"sqlite:///{database}",
            "http://127.0.0.1:9",
            "garbage://x",
            "sqlite:////dev/null/x.db",
        ]
    )
    before = os.environ.get("MLFLOW_TRACKING_URI")
    os.environ["MLFLOW_TRACKING_URI"] = uri
    try:
        invoke(
            [
                "drafts",
                dice.choice(["list", "history", "rollback"]),
                "--name",
                dice.choice(["draft-tiny", "o'brien", "a/b", "x" * 999]),
            ]
        )
    finally:
        os.environ.pop("MLFLOW_TRACKING_URI")
        if before is not None:
            os.environ["MLFLOW_TRACKING_URI"] = before


def invoke(arguments: list[str]) -> None:
    """The command line in this process; what it refuses is raised."""
    result = CliRunner().invoke(app, arguments)
    if result.exit_code == 2 and not isinstance(result.exception, Refusal):
        raise Refusal(result.output)  # typer's own, which names the option and `--help`
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception


CATEGORIES: dict[str, Callable[[Path, random.Random], None]] = {
    "recipes": recipes, "overrides": overrides, "datasets": datasets, "prompts": prompts, "draft folders": drafts,
    "run folders": run_folders, "command lines": command_lines, "registries": registries,
}  # fmt: skip


def run_case(category: str, seed: int) -> tuple[str, str]:
    """(`ok`, `refused` or `fault`, what was said)."""
    dice = random.Random(f"{category} {seed}")
    before = os.environ.get("DRAFTSMITH_RUNS")
    with tempfile.TemporaryDirectory(prefix="draftsmith-fuzz-") as name:
        os.environ["DRAFTSMITH_RUNS"] = f"{name}/runs"
        ended = Ending()
        with ended, watched():
            CATEGORIES[category](Path(name), dice)
        os.environ.pop("DRAFTSMITH_RUNS")
        if before is not None:
            os.environ["DRAFTSMITH_RUNS"] = before
        return ended.judged()


def cases(count: int) -> Iterator[tuple[str, int]]:
    """Categories in turn, each with its own seeds."""
    names = list(CATEGORIES)
    return ((names[number % len(names)], number // len(names)) for number in range(count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    begun, counts = time.perf_counter(), Counter[tuple[str, str]]()
    for category, seed in cases(options.cases):
        outcome, said = run_case(category, seed)
        counts[category, outcome] += 1
        if outcome == "fault":
            print(f"--- {category} {seed}\n{said[-1500:]}", flush=True)
    outcomes = ("ok", "refused", "fault")
    table = {category: {outcome: counts[category, outcome] for outcome in outcomes} for category in CATEGORIES}
    result = {
        "commit": git_sha(),
        "date": time.strftime("%Y-%m-%d"),
        "conditions": {"cases": options.cases, "limit_s": LIMIT_S, "cpu_cores": os.cpu_count(), "in_process": True},
        "wall_s": round(time.perf_counter() - begun, 1),
        "counts": table,
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
