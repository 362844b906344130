"""The command line, run as a person runs it."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import yaml
from mlflow.exceptions import MlflowException
from typer.testing import CliRunner

from flows.command_line import app, main
from infra.files.atomic import write_atomically
from infra.files.locks import hold
from infra.files.run_folder import RunFolder
from infra.ledger.ledger import Ledger
from infra.ledger.trainers import RepeatedCrash, resume_run
from infra.refusal import Refusal
from infra.settings import tracking_uri
from infra.tracking import registry, runs
from models.config.recipe import RunConfig, load_recipe
from tests.infra.tracking.test_client import Broken, guarded_server

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where runs and the registry of these tests lie."""
    return tmp_path_factory.mktemp("home")


def started(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`draftsmith ARGUMENTS`, as a shell runs it."""
    environment = {**os.environ, "DRAFTSMITH_RUNS": str(home / "runs"), "COLUMNS": "160", "NO_COLOR": "1"}
    environment.pop("MLFLOW_TRACKING_URI", None)
    command = [sys.executable, "-c", "from flows.command_line import main; main()", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False)


def draftsmith(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The same in this process, which need not import everything once more; without what its children print."""
    status, streams = 0, (StringIO(), StringIO())
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        for name, value in (("DRAFTSMITH_RUNS", str(home / "runs")), ("COLUMNS", "160"), ("NO_COLOR", "1")):
            patch.setenv(name, value)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", ["draftsmith", *arguments])
        patch.setattr(sys, "excepthook", sys.excepthook)  # typer sets its own
        try:
            main()
        except SystemExit as ended:
            status = int(ended.code or 0)
    return subprocess.CompletedProcess(arguments, status, *(stream.getvalue() for stream in streams))


Run = Callable[..., "subprocess.CompletedProcess[str]"]


def refusal(home: Path, *arguments: str, run: Run = draftsmith) -> str:
    ended = run(home, *arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "Traceback" not in ended.stderr
    return ended.stderr


def test_help_loads_nothing_heavy() -> None:
    script = """
import sys
from typer.testing import CliRunner
from flows.command_line import app
result = CliRunner().invoke(app, ["retrain", "--help"])
assert result.exit_code == 0 and "--resume" in result.output, result.output
heavy = {"torch", "prefect", "mlflow", "transformers", "lightning", "pandas"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, timeout=300, check=True, env={**os.environ, "COLUMNS": "160"}
    )


def test_a_terminal_of_few_characters_is_enough_for_pages_and_not_for_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As LANG=en_US without .UTF-8 makes it."""
    for name, value in (("PYTHONUTF8", "0"), ("PYTHONCOERCECLOCALE", "0"), ("LC_ALL", "C")):
        monkeypatch.setenv(name, value)
    shown = started(tmp_path, "retrain", "recipes/tiny.yaml", "--plan")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert refusal(tmp_path, "retrain", "recipes/tiny.yaml", run=started) == (
        "error: the locale's encoding is ANSI_X3.4-1968, and a run's files are in UTF-8: set $PYTHONUTF8 to 1, or "
        "$LC_ALL to C.UTF-8\n"
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_plan_prints_every_recipe_in_full(tmp_path: Path, recipe: Path) -> None:
    ended = draftsmith(tmp_path, "retrain", str(recipe), "training.learning_rate=0.5", "--plan")
    assert (ended.returncode, ended.stderr) == (0, "")
    settings, plan = ended.stdout.split("---\n")
    printed = RunConfig.model_validate(yaml.safe_load(settings))
    assert printed == load_recipe(recipe, ["training.learning_rate=0.5"])
    assert "stall_s" in ended.stdout
    assert f"{printed.name}: " in plan
    assert all(f"{name}: " in plan for name in ("Memory", "Speed", "Split", "Time"))
    assert not (tmp_path / "runs").exists()


def test_a_plan_loads_no_library_of_tensors() -> None:
    script = """
import sys
from typer.testing import CliRunner
from flows.command_line import app
result = CliRunner().invoke(app, ["retrain", "recipes/qwen3-8b.yaml", "--plan"])
assert result.exit_code == 0 and "4 + 4" in result.output, result.output
heavy = {"torch", "prefect", "mlflow", "transformers", "lightning", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, timeout=300, check=True, env={**os.environ, "COLUMNS": "160"}
    )


def test_plan_prints_the_slurm_job_too(tmp_path: Path) -> None:
    settings = ["pools.kind=slurm", "pools.slurm.partition=gpu", "transport.kind=mooncake"]
    ended = draftsmith(tmp_path, "retrain", str(RECIPES[0]), *settings, "--plan")
    assert ended.returncode == 0, ended.stderr
    recipe, script, plan = ended.stdout.split("---\n")
    assert "inference + 1 training" in plan
    assert RunConfig.model_validate(yaml.safe_load(recipe)).pools.slurm.partition == "gpu"
    assert "#SBATCH --partition=gpu" in script


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which recipe?"),
        (
            ["recipes/nowhere.yaml"],
            "no recipe at recipes/nowhere.yaml: give a YAML file, for instance recipes/quickstart.yaml",
        ),
        (["recipes/tiny.yaml", "training.max_stepz=3", "--plan"], "training.max_stepz: no such setting"),
        (["recipes/tiny.yaml", "training.max_steps=0"], "training.max_steps: Input should be greater"),
        (["recipes/tiny.yaml", "pools.training_gpus=3", "training.ranks=2"], "a rank needs one GPU"),
        (["recipes/tiny.yaml", "transport.budget_mib=1", "--plan"], "nearest possible recipe: transport.budget_mib=12"),
        (["recipes/tiny.yaml", "rubbish"], "section.field=value"),
        (["--resume", "nowhere"], "no run nowhere"),
    ],
)
def test_refusals_of_retrain(home: Path, arguments: list[str], message: str) -> None:
    assert message in refusal(home, "retrain", *arguments)


def test_a_run_is_resumed_as_it_is(home: Path) -> None:
    folder = home / "runs" / "tiny-1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(load_recipe(ROOT / "recipes" / "tiny.yaml", ["seed=7"]).model_dump_json())
    for name in ("tiny-1", str(folder)):
        ended = draftsmith(home, "retrain", "--resume", name, "--plan")
        assert yaml.safe_load(ended.stdout.split("---\n")[0])["seed"] == 7
    overridden = refusal(home, "retrain", "recipes/tiny.yaml", "seed=8", "--resume", "tiny-1")
    assert "resumed with its own configuration" in overridden
    assert "is a run of the recipe tiny" in refusal(home, "retrain", "recipes/quickstart.yaml", "--resume", "tiny-1")


def test_resuming_a_run_that_another_process_owns_changes_nothing(home: Path) -> None:
    """Its crashes stay counted: the fourth trainer in a row that begins anew is still refused."""
    folder = RunFolder(home / "runs" / "tiny-live")
    write_atomically(folder.config, load_recipe(ROOT / "recipes" / "tiny.yaml"))
    with Ledger.open(folder.ledger_url, folder.name) as ledger:
        ledger.create_run(budget_bytes=100, bytes_per_token=10, lease_seconds=60, max_attempts=2, order="strict")
        for _ in range(3):
            resume_run(ledger, lambda _: True, lambda _: True)
        with hold(folder.run_lock):
            assert "run tiny-live is owned by another process" in refusal(
                home, "retrain", "--resume", "tiny-live", run=started
            )
        with pytest.raises(RepeatedCrash):
            resume_run(ledger, lambda _: True, lambda _: True)


def test_drafts_are_listed_promoted_and_rolled_back(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_RUNS", str(home / "runs"))
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def drafts(*arguments: str) -> str:
        return CliRunner().invoke(app, ["drafts", *arguments], catch_exceptions=False).output

    with pytest.raises(ValueError, match="no draft is registered"):
        drafts("promote", "1")
    uri = tracking_uri()
    assert f"no drafts in {uri} yet" in drafts("list")
    run = runs.start_run(home / "tracking.json", uri, "draftsmith", "tiny-1", {}, {})
    (home / "export").mkdir()
    (home / "export" / "config.json").write_text("{}")
    for number in (1, 2):
        model_id = runs.log_folder(run, home / "export", "draft", 1, "draft")
        tags = {registry.RUN: f"tiny-{number}", registry.ACCEPTANCE: "3.25", "beats_prompt_lookup": "true"}
        registry.register(uri, "draft-tiny", model_id, run.run_id, tags)
        assert f"draft-tiny version {number} is champion" in drafts("promote", str(number))
    rows = [line.split("│")[1:-1] for line in drafts("list").splitlines() if "draft-tiny" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["draft-tiny", "2", "champion", "3.25", "yes", "tiny-2"],
        ["draft-tiny", "1", "", "3.25", "yes", "tiny-1"],
    ]
    with pytest.raises(ValueError, match="has no version 9"):
        drafts("promote", "9")
    assert "version 2 is withdrawn: version 1 is champion again" in drafts("rollback", "--reason", "slow in service")
    drafts("promote", "1", "--reason", "it is to stay")
    rows = [line.split("│")[1:-1] for line in drafts("history").splitlines() if "│" in line]
    assert [[cell.strip() for cell in row[1:4]] for row in rows] == [
        ["1", "promoted", ""],
        ["2", "promoted", "1"],
        ["2", "rolled back", "2"],
        ["1", "promoted", "1"],
    ]
    assert [row[-1].strip() for row in rows[-2:]] == ["slow in service", "it is to stay"]
    assert "version 1 is withdrawn: no version serves" in drafts("rollback", "--name", "draft-tiny")
    with pytest.raises(ValueError, match="no champion to roll back"):
        drafts("rollback", "--name", "draft-tiny")


def test_drafts_of_an_mlflow_that_fails_are_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "7")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    with guarded_server(answers=Broken) as place:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{place}")
        Broken.asked = 0
        assert isinstance(CliRunner().invoke(app, ["drafts", "list"]).exception, MlflowException)
    assert Broken.asked <= 4, "two to see who answers, and two for the drafts"


def test_a_user_without_a_home_folder_is_refused_before_mlflow_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda _user: {}["no such user"])
    result = CliRunner().invoke(app, ["drafts", "list"])
    assert isinstance(result.exception, Refusal)
    assert "no home folder" in str(result.exception)


def test_a_bench_that_cannot_start_ends_with_its_status(home: Path) -> None:
    arguments = ["--target", str(home / "no"), "--draft", str(home / "no"), "--prompts", str(home / "no.txt")]
    ended = started(home, "bench", *arguments)
    assert ended.returncode == 2
    assert "error:" in ended.stderr


def test_a_bench_has_one_opponent(home: Path) -> None:
    arguments = ["--target", "any", "--draft", str(home), "--champion", str(home), "--champion-of", "draft-none"]
    ended = started(home, "bench", *arguments)
    assert ended.returncode == 2
    assert "leave one of them out" in ended.stderr


def test_a_bench_explains_its_options(home: Path) -> None:
    shown = draftsmith(home, "bench", "--help")
    assert shown.returncode == 0
    assert "--champion-of MODEL" in shown.stdout
    wrong = draftsmith(home, "bench", "--target", "any", "--draft", str(home), "--repeats", "1")
    assert wrong.returncode == 2
    assert "--repeats: 1 is less than 3" in wrong.stderr


def test_a_bench_against_a_champion_that_there_is_not_is_refused(home: Path) -> None:
    arguments = ["--target", "any", "--draft", str(home), "--suite", "gsm8k", "--champion-of", "draft-none"]
    ended = started(home, "bench", *arguments)
    assert ended.returncode == 2
    assert "no version is champion" in ended.stderr
    assert "draftsmith drafts list" in ended.stderr


def test_a_recipe_is_made_for_a_target_and_text(home: Path, tiny_target, tmp_path: Path) -> None:
    source = tmp_path / "text.jsonl"
    source.write_text('{"text": "Some words of a document."}\nbroken\n{"text": "And of another one."}\n')
    recipe = tmp_path / "own.yaml"
    made = draftsmith(home, "init", tiny_target.path, str(source), "--name", "own", "--output", str(recipe))
    assert made.returncode == 0, made.stderr
    assert f"draftsmith retrain {recipe} --plan" in made.stdout
    config = load_recipe(recipe)
    assert (config.data.chat_template, config.draft.vocabulary_size(1024)) == ("none", 1024)
    assert "remove it, or name another file" in refusal(
        home, "init", tiny_target.path, str(source), "--output", str(recipe)
    )
    planned = started(home, "retrain", str(recipe), "--plan", "data.max_broken_share=0.5")
    assert planned.returncode == 0, planned.stderr
    assert "data: 2 plain texts; 1 broken record left out" in planned.stdout
    refused = started(home, "retrain", str(recipe), "--plan")
    assert (refused.returncode, "data.max_broken_share=0.2 allows" in refused.stderr) == (2, True)


@pytest.mark.parametrize(("hidden", "rate", "samples"), [(1024, 1e-4, 16), (512, 1e-3, 8)])
def test_a_large_target_s_recipe_has_the_rate_of_the_shipped_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: int, rate: float, samples: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("Some words of a document.\n")
    Path("target").mkdir()
    shape = {"hidden_size": hidden, "num_hidden_layers": 8, "vocab_size": 1000, "num_attention_heads": 8}
    Path("target", "config.json").write_text(json.dumps(shape | {"intermediate_size": 2048, "model_type": "llama"}))
    result = CliRunner().invoke(app, ["init", "target", "a.txt"])
    assert result.exit_code == 0, result.output
    training = load_recipe(Path("target.yaml")).training
    assert (training.learning_rate, training.samples_per_step) == (rate, samples)
    assert ("# The default learning rate" in Path("target.yaml").read_text()) == (hidden == 1024)


def test_the_commands_that_init_prints_can_be_run(home: Path, tiny_target, tmp_path: Path) -> None:
    source = tmp_path / "my text.txt"
    source.write_text("Some words of a document.\n\nAnd of another one.\n")
    recipe = tmp_path / "my own.yaml"
    made = started(home, "init", tiny_target.path, str(source), "--output", str(recipe))
    assert made.returncode == 0, made.stderr
    check, plan, _ = (shlex.split(line)[1:] for line in made.stdout.partition("next:\n")[2].splitlines())
    assert check[2] == str(source)
    checked = started(home, *check)
    assert checked.returncode == 0, checked.stderr
    assert plan == ["retrain", str(recipe), "--plan"]


def test_a_recipe_is_named_after_its_target_s_folder(
    tiny_target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("Some words of a document.\n")
    for folder, message in (("Small One", ""), ("模型", "choose a --name")):
        shutil.copytree(tiny_target.path, tmp_path / folder)
        monkeypatch.chdir(tmp_path / folder)
        result = CliRunner().invoke(app, ["init", ".", "../a.txt"])
        assert message in str(result.exception or "")
        assert (result.exit_code == 0) == (not message)
    assert load_recipe(tmp_path / "Small One" / "small-one.yaml").name == "small-one"


def test_a_recipe_in_a_folder_that_is_not_there_is_refused(home: Path, tiny_target, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Some words of a document.\n")
    written = tmp_path / "none" / "a.yaml"
    said = refusal(home, "init", tiny_target.path, str(tmp_path / "a.txt"), "--output", str(written))
    assert f"{written} cannot be written (No such file or directory): name a file in a folder" in said
    page = refusal(home, "drafts", "overview", "--page", str(tmp_path / "none" / "a.html"))
    assert "a.html cannot be written" in page


def test_a_target_of_a_user_that_is_not_there_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Some words of a document.\n")
    said = refusal(home, "init", "~nobody-here/x", str(tmp_path / "a.txt"))
    assert "target.name '~nobody-here/x'" in said
    assert "write the folder's whole path" in said


def test_a_working_folder_that_is_gone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A batch system removes a job's folder under a shell that is still in it."""
    gone = tmp_path / "job"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "argv", ["draftsmith", "status"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "(No such file or directory): start in a folder that you may enter" in capsys.readouterr().err


def test_a_negative_number_of_samples_is_refused(home: Path) -> None:
    assert "--samples" in refusal(home, "data", "check", "a.txt", "--target", "x", "--samples", "-1")


def test_data_are_checked(home: Path, tmp_path: Path) -> None:
    source = tmp_path / "talk.jsonl"
    source.write_text('{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}\n[]\n')
    checked = started(home, "data", "check", str(source))
    assert checked.returncode == 1
    assert f"broken: {source}:2: write a JSON object" in checked.stdout
    assert "data: 1 conversation (turns: 1 assistant, 1 user); 1 broken record left out" in checked.stdout
    missing = str(tmp_path / "none.jsonl")
    assert "there is no such file" in refusal(home, "data", "check", missing, run=started)
