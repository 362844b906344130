"""Every class of error that a person can mend: one clear message with its remedy, exit status 2, before any pool.

A row names the step at which it is found. All of these steps come before the flow leases its first pool.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from infra.files.atomic import write_atomically
from infra.files.locks import hold
from infra.files.run_folder import RunFolder
from infra.processes.exit import run_main
from infra.records.data_path import SamplesRecord, TargetRecord
from infra.records.sharing import Sharing
from infra.transport.mooncake import environment as mooncake
from models import preflight
from models.config.recipe import RunConfig, load_recipe
from models.data import prepare as data
from models.targets import prepare as targets
from tasks.prepare import refuse_small_stores

ROOT = Path(__file__).parents[1]
TINY = ROOT / "recipes" / "tiny.yaml"
TURN = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day to you, Sir."}]}

Refuse = Callable[[Callable[[], object]], str]


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Runs a main, which must end with status 2 and one message; returns the message."""

    def run(main: Callable[[], object]) -> str:
        with pytest.raises(SystemExit) as ended:
            run_main(lambda: (main(), None)[1])
        assert ended.value.code == 2
        said = capsys.readouterr().err.strip()
        assert said.startswith("error: ")
        assert "Traceback" not in said
        return said

    return run


SHARED = ["training.ranks=2", "training.context_parallel_size=2"]
DFLASH = "draft={method: dflash, num_heads: 4, num_kv_heads: 2, head_dim: 8, intermediate_size: 64}"
RECIPES = [
    ("not a mapping", "- a list\n", [], "holds no settings", "a recipe is a YAML mapping"),
    ("broken YAML", "name: [tiny\n", [], "is not valid YAML", "line"),
    ("unknown setting", None, ["training.learning_rat=1"], "training.learning_rat: no such setting", ""),
    ("wrong type", None, ["training.epochs=many"], "training.epochs", "valid integer"),
    ("out of range", None, ["training.learning_rate=-1"], "training.learning_rate", "greater than 0"),
    ("unknown method", None, ["draft.method=eagle9"], "draft.method: known methods are", "eagle3, "),
    ("setting of another method", None, ["draft.method=medusa"], "draft.num_kv_heads: no such setting", ""),
    ("contradiction in a method", None, ["draft.norm_before_fc=true"], "draft: fc_norm and norm_before_fc", "set one"),
    ("missing section", "name: tiny\n", [], "target: Field required", ""),
    ("name with a slash", None, ["name=a/b"], "becomes a folder", "use lower-case letters"),
    (
        "fewer generators at most than at first",
        None,
        ["generator.count=3", "generator.max_count=2"],
        "max_count is 2 and count 3",
        "raise max_count",
    ),
    ("layers out of order", None, ["target.aux_layer_ids=[2, 1]"], "must be ascending", "aux_layer_ids"),
    ("lookahead beyond the walk", None, ["benchmark.lookahead=9"], "must not exceed", "benchmark.max_lookahead"),
    ("ranks left over", None, [*SHARED, "training.ranks=3"], "ranks 3 is no multiple", "change one of the two"),
    ("shared samples of DFlash", None, [*SHARED, DFLASH], "read features of the whole", "set it to 1 and lower"),
    (
        "shared samples by GPUDirect",
        None,
        [*SHARED, "transport.receive=device"],
        "by GPUDirect (transport.receive=device) samples arrive whole",
        "set transport.receive=host",
    ),
    (
        "ranks without GPUs",
        None,
        ["pools.training_gpus=3", "training.ranks=2"],
        "a rank needs one GPU",
        "make them equal",
    ),
    ("shared memory of two machines", None, ["pools.kind=ray"], "shared memory is of one", "transport.kind=mooncake"),
    ("nowhere to keep", None, ["transport.kind=stored"], "say where by transport.folder", ""),
    ("password", None, ["ledger.url=postgresql://me:secret@db/x"], "me:***@db/x holds a password", "$PGPASSWORD"),
    ("password among options", None, ["data.source=s3://b/x?password=secret"], "password=*** holds", "by the environ"),
    ("password in another place", None, ["name=a://me:secret@b"], "becomes a folder", "a://me:***@b"),
    ("override of no form", None, ["seed"], "is not of the form section.field=value", ""),
    ("override into a value", None, ["name.deep=1"], "name is a value, not a section", ""),
]


@pytest.mark.parametrize(
    ("text", "overrides", "what", "remedy"), [row[1:] for row in RECIPES], ids=[r[0] for r in RECIPES]
)
def test_recipes(
    refuse: Refuse, tmp_path: Path, text: str | None, overrides: list[str], what: str, remedy: str
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(TINY.read_text() if text is None else text)
    said = refuse(lambda: load_recipe(path, overrides))
    assert what in said
    assert remedy in said
    assert "secret" not in said


def prepare() -> None:
    """As the flow does it."""
    preflight.main()
    data.main()


def run_folder(tmp_path: Path, *overrides: str) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    write_atomically(folder.config, load_recipe(TINY, list(overrides)))
    return folder


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


TARGETS = [
    ("no such folder", None, "./nowhere", "there is no folder ./nowhere", "looked in"),
    ("no such user", None, "~nobody-here/x", "target.name '~nobody-here/x'", "write the folder's whole path"),
    ("not a target", lambda folder: (folder / "config.json").unlink(), None, "no Hugging Face folder", "config.json"),
    (
        "no weights",
        lambda folder: (folder / "model.safetensors").unlink(),
        None,
        "holds no model.safetensors",
        "save_pretrained",
    ),
    (
        "unknown architecture",
        lambda folder: edit(folder / "config.json", model_type="t9000"),
        None,
        "not a causal language model",
        "",
    ),
    ("no decoder", lambda folder: edit(folder / "config.json", model_type="bert"), None, "", ""),
    ("no tokenizer", lambda folder: (folder / "tokenizer.json").unlink(), None, "with a tokenizer", ""),
]


@pytest.mark.parametrize(
    ("damage", "name", "what", "remedy"), [row[1:] for row in TARGETS], ids=[r[0] for r in TARGETS]
)
def test_targets(
    refuse: Refuse, tmp_path: Path, tiny_target: TargetRecord, monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None] | None, name: str | None, what: str, remedy: str,
) -> None:  # fmt: skip
    copy = tmp_path / "target"
    shutil.copytree(tiny_target.path, copy)
    if damage:
        damage(copy)
    folder = run_folder(tmp_path, "target.source=huggingface", f"target.name={name or copy}")
    monkeypatch.setattr(sys, "argv", ["prepare", str(folder.path)])
    said = refuse(targets.main)
    assert what in said
    assert remedy in said


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["target.source=gguf-package", "target.name=no-such-package"], "pip install no-such-package"),
        (["target.aux_layer_ids=[0, 1, 9]"], "the target has layers 0..3"),
    ],
)
def test_targets_that_recipes_name_wrongly(
    refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], what: str
) -> None:
    folder = run_folder(tmp_path, *overrides)
    monkeypatch.setattr(sys, "argv", ["prepare", str(folder.path)])
    assert what in refuse(targets.main)


def jsonl(*records: object) -> str:
    return "".join(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records)


TOKENS = {"input_ids": [5] * 9, "loss_mask": [1] * 9}
UNNAMED = {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}
LONG = "A question of more than eight words that a benchmark asks"

DATA = [
    ("missing file", None, ["data.source=nowhere.jsonl"], "there is no such file", "looked in"),
    ("unknown kind", None, ["data.source=prompts.docx"], "is of no known kind", "use a .jsonl"),
    ("empty", "", [], "is empty", "at least one document"),
    (
        "broken JSON",
        jsonl({"text": "whole"}, "{broken\n"),
        [],
        ".jsonl:2: not valid JSON",
        "write one JSON object per line",
    ),
    ("not text", b"\xff\xfe\x00", [], "is not UTF-8 text", "convert it"),
    ("unknown keys", jsonl({"prompt": "Hi"}), [], "its keys are ['prompt']", "Rename"),
    ("no turns", jsonl({"messages": []}), [], ".jsonl:1: the conversation has no turns", "leave the line out"),
    ("unknown role", jsonl({"messages": [{"role": "wizard", "content": "Hm"}]}), [], "the role 'wizard'", "known are"),
    ("half a turn", jsonl({"messages": [{"role": "user"}]}), [], "turn 1 needs 'role' and 'content'", "got"),
    ("Hub's address", None, ["data.source=hf://some/set"], "is not of the form hf://datasets/OWNER/NAME", "config=C"),
    ("no list of records", None, ["data.source=run/config.json"], "a dict, not a list of records", "write [...]"),
    ("no Parquet", None, ["data.source=broken.parquet"], "cannot be read as Parquet", "write or fetch it again"),
    ("empty folder", None, ["data.source=empty"], "holds no file of a known kind", "convert the files"),
    ("call without name", jsonl(UNNAMED), [], "turn 1 has a tool call without a function's name", "Correct or remove"),
    ("tools of no form", jsonl(TURN | {"tools": "none"}), [], "tools is not a list", "leave the key out"),
    ("no mask", jsonl({"input_ids": [1, 2]}), [], ".jsonl:1: input_ids need a loss_mask", "add it"),
    ("odd mask", jsonl({"input_ids": [1], "loss_mask": [2]}), [], "loss_mask holds 0 and 1", "correct the record"),
    ("foreign tokens", jsonl(TOKENS | {"input_ids": [9**6] * 9}), [], "but the target knows 1024", "give the text"),
    (
        "foreign tokenizer",
        jsonl(TOKENS | {"tokenizer_hash": "0" * 64}),
        [],
        "made with the tokenizer 000",
        "target's own",
    ),
    (
        "tokens and text",
        jsonl(TOKENS, {"text": "words"}),
        [],
        ".jsonl:2: a plain text, and the first",
        "make two sources",
    ),
    (
        "tokens as prompts",
        jsonl(TOKENS),
        ["data.source=python-docs", "data.exclude=[prompts.jsonl]"],
        ".jsonl:1: tokens cannot be compared",
        "give the prompts' text",
    ),
    (
        "nothing but benchmarks",
        jsonl(*({"text": f"{number} {LONG}"} for number in range(9))),
        ["promotion.suites={own: prompts.jsonl}"],
        "9 of 9 documents hold prompts of the benchmarks",
        "Train on other text",
    ),
    ("no template", jsonl(TURN), ["data.chat_template=tokenizer"], "has no chat template", "set data.chat_template"),
    ("no template file", jsonl(TURN), ["data.chat_template=own.jinja"], "there is no such file", "give a Jinja file"),
    (
        "arguments without a template",
        None,
        ["data.template_arguments={enable_thinking: false}"],
        "data.chat_template is none",
        "remove one",
    ),
    ("one document", jsonl({"text": "One long document of words. " * 9}), [], "at least two", "data.source needs"),
    ("too short", jsonl(*({"text": f"{i}"} for i in range(20))), [], "no sample is left", ""),
    ("large draft vocabulary", None, ["draft.vocab_size=2000"], "exceeds the target's vocabulary", "at most 1024"),
    ("impossible prompts", None, ["benchmark.prompt_tokens=1"], "give a prompt of", "raise benchmark.prompt_tokens"),
]


@pytest.mark.parametrize(
    ("text", "overrides", "what", "remedy"), [row[1:] for row in DATA], ids=[row[0] for row in DATA]
)
def test_data(
    refuse: Refuse, tmp_path: Path, tiny_target: TargetRecord, monkeypatch: pytest.MonkeyPatch,
    text: str | bytes | None, overrides: list[str], what: str, remedy: str,
) -> None:  # fmt: skip
    source = tmp_path / "prompts.jsonl"
    if text is not None:
        source.write_bytes(text if isinstance(text, bytes) else text.encode())
        overrides = [f"data.source={source}", *overrides]
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.parquet").write_text("PAR1")
    folder = run_folder(tmp_path, "data.max_samples=40", *overrides)
    write_atomically(folder.target, tiny_target)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["prepare", str(folder.path)])
    said = refuse(prepare)
    assert what in said
    assert remedy in said


def test_a_full_disk(
    refuse: Refuse, tmp_path: Path, tiny_target: TargetRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder(tmp_path, "data.max_samples=40")
    write_atomically(folder.target, tiny_target)
    monkeypatch.setattr(sys, "argv", ["prepare", str(folder.path)])
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=2**20))
    said = refuse(prepare)
    assert "0.0 GiB free" in said
    assert "lower training.keep_checkpoints" in said


def test_sglang_that_is_not_there(
    refuse: Refuse, tmp_path: Path, tiny_target: TargetRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder(tmp_path, "data.max_samples=40", "generator.engine=sglang")
    write_atomically(folder.target, tiny_target)
    monkeypatch.setattr(sys, "argv", ["prepare", str(folder.path)])
    monkeypatch.setenv("DRAFTSMITH_SGLANG", str(tmp_path / "nowhere"))
    said = refuse(prepare)
    assert f"there is no sglang in {tmp_path / 'nowhere'}" in said
    assert "`make sglang` sets it up" in said


PLACES = [
    (["transport.kind=mooncake"], "no mooncake", "Mooncake is not installed", "pip install --editable '.[mooncake]'"),
    (["transport.kind=mooncake"], "no libibverbs", "needs libibverbs.so.1 (libibverbs1)", "install it"),
    (
        ["transport.kind=mooncake", "transport.protocol=rdma"],
        "",
        "no RDMA device",
        "set transport.protocol=auto or tcp",
    ),
    (
        ["ledger.url=postgresql://me@127.0.0.1:9/x"],
        "",
        "me@127.0.0.1:9/x does not let us in",
        "Start the server",
    ),
]


@pytest.mark.parametrize(("overrides", "missing", "what", "remedy"), PLACES)
def test_places_that_are_not_there(
    refuse: Refuse,
    tmp_path: Path,
    tiny_target: TargetRecord,
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    missing: str,
    what: str,
    remedy: str,
) -> None:
    folder = run_folder(tmp_path, "data.max_samples=40", *overrides)
    write_atomically(folder.target, tiny_target)
    monkeypatch.setattr(sys, "argv", ["prepare", str(folder.path)])
    monkeypatch.chdir(tmp_path)
    if overrides[0] == "transport.kind=mooncake":
        monkeypatch.setattr(mooncake, "find_spec", lambda _name: None if missing == "no mooncake" else "there")
        libraries = dict.fromkeys(mooncake.LIBRARIES, 0)
        if missing == "no libibverbs":
            del libraries["libibverbs.so.1"]
        monkeypatch.setattr(mooncake.ctypes, "CDLL", lambda name: found(libraries, name))
        monkeypatch.setattr(mooncake, "active_devices", lambda _root: [])
    said = refuse(prepare)
    assert what in said
    assert remedy in said
    assert "secret" not in said


def found(libraries: dict[str, int], name: str) -> int:
    """As the loader answers."""
    if name not in libraries:
        raise OSError(name)
    return libraries[name]


def test_a_recipe_that_does_not_regenerate(tmp_path: Path) -> None:
    said = draftsmith(tmp_path, "regenerate", str(TINY))
    assert "does not regenerate" in said
    assert "add data.regeneration={}" in said


SAMPLES = SamplesRecord(
    path="", dataset_hash="", template_hash="", train_samples=40, heldout_samples=4, train_tokens=4000, longest=256,
    supervised_share=1.0, dropped=0, truncated=0, unusable=0,
)  # fmt: skip


def budget(config: RunConfig) -> Sharing:
    return Sharing(mode="apart", why="", budget_bytes=config.transport.budget_mib * 2**20)


def test_a_small_budget(refuse: Refuse, tiny_target: TargetRecord) -> None:
    config = load_recipe(TINY, ["transport.budget_mib=1", "generator.max_count=3"])
    said = refuse(lambda: refuse_small_stores(config, tiny_target, SAMPLES, budget(config)))
    assert "budget of 1.0 MiB is too small" in said
    assert "27 being captured" in said  # by as many generators as there may be: 8 leased and 1 in the engine of each
    assert "Set transport.budget_mib=" in said


def test_a_small_folder_for_kept_hidden_states(
    refuse: Refuse, tiny_target: TargetRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_recipe(TINY, ["transport.kind=stored", f"transport.folder={tmp_path / 'kept'}"])
    refuse_small_stores(config, tiny_target, SAMPLES, budget(config))
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=2**20))
    said = refuse(lambda: refuse_small_stores(config, tiny_target, SAMPLES, budget(config)))
    assert "GiB of hidden states" in said
    assert "lower data.max_samples" in said


def draftsmith(tmp_path: Path, *arguments: str, **environment: str) -> str:
    """The command's message; it must end with status 2 before the flow begins."""
    command = [sys.executable, "-c", "from flows.command_line import main; main()", *arguments]
    variables = os.environ | {"DRAFTSMITH_RUNS": str(tmp_path / "runs"), "PREFECT_HOME": str(tmp_path / "prefect")}
    ended = subprocess.run(
        command, cwd=ROOT, env=variables | environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert (ended.returncode, ended.stdout) == (2, ""), ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list((tmp_path / "runs").glob("*/logs"))
    return ended.stderr


def test_versions_that_clash(tmp_path: Path) -> None:
    clash = tmp_path / "site" / "fastapi-0.200.0.dist-info"
    clash.mkdir(parents=True)
    (clash / "METADATA").write_text("Metadata-Version: 2.1\nName: fastapi\nVersion: 0.200.0\n")
    said = draftsmith(tmp_path, "retrain", str(TINY), PYTHONPATH=str(tmp_path / "site"))
    assert "fastapi 0.200.0: Prefect's server dies at import" in said
    assert "Mend it with: pip install 'fastapi" in said


def test_a_run_that_is_no_recipes(tmp_path: Path) -> None:
    assert "no run nowhere" in draftsmith(tmp_path, "retrain", "--resume", "nowhere")
    assert "no runs in" in draftsmith(tmp_path, "status")
    folder = tmp_path / "runs" / "old"
    folder.mkdir(parents=True)
    tree = yaml.safe_load(TINY.read_text()) | {"from_the_past": 1}
    (folder / "config.json").write_text(json.dumps(tree))
    assert "from_the_past: no such setting" in draftsmith(tmp_path, "retrain", "--resume", "old")


def test_a_run_that_somebody_owns(tmp_path: Path) -> None:
    """The second of two resumes says so and does nothing."""
    folder = RunFolder(tmp_path / "runs" / "tiny-1")
    write_atomically(folder.config, load_recipe(TINY))
    with hold(folder.run_lock):
        said = draftsmith(tmp_path, "retrain", "--resume", "tiny-1")
    assert "run tiny-1 is owned by another process" in said
    assert "wait until it ends, or stop it" in said
