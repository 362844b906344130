"""The follower over real SGLang servers, with drafts that nobody trained: starts, drains, reports, answers."""

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.serving.config import CanaryConfig, ServerConfig
from infra.sglang.command import ServerSpec, serving_command
from infra.sglang.config import SGLangConfig
from models.config.recipe import load_recipe
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.export.served_target import read_served_target
from models.export.sglang import write_export
from models.targets.weights import read_target_head
from tests.infra.serving.serving_world import Clients, ServingWorld, serving_world

LOOKAHEAD = 4
RECIPE = Path(__file__).parents[3] / "recipes" / "tiny.yaml"


@pytest.fixture
def world(path_in_memory: Path, registry_in_memory: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServingWorld]:
    monkeypatch.setenv("SGLANG_PLATFORM", "draftsmith_test_cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with serving_world(path_in_memory, registry_in_memory, 2) as world:
        world.swaps = True
        yield world


def with_other_weights(export: Path, place: Path) -> Path:
    """A version that differs from another in its weights alone."""
    shutil.copytree(export, place)
    tensors = load_file(place / "model.safetensors")
    tensors["fc.weight"].mul_(1.01)
    save_file(tensors, place / "model.safetensors")
    return place


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_real_servers_follow_a_promotion_and_a_withdrawal(world: ServingWorld, tiny_target, tmp_path) -> None:
    config, place = load_recipe(RECIPE), Path(tiny_target.path)
    head = read_target_head(place, torch.float32)
    whole = DraftVocabulary.by_frequency(torch.ones(len(head.embedding)), len(head.embedding))
    draft = build_draft(config.draft, head.embedding, whole, config.target.aux_layer_ids)
    write_export(draft, tmp_path / "export", {}, read_served_target(place))
    spec = ServerSpec(place, "float32", 256, 4)
    arguments = config.draft.engine_arguments(LOOKAHEAD)
    commands = [shlex.join(serving_command(spec, SGLangConfig(), ["--sleep-on-idle"], port)) for port in world.ports]
    commands[1] = f"env DRAFTSMITH_TEST_SPAWN=1 {commands[1]}"  # as on GPUs
    servers = [
        ServerConfig(url=f"http://127.0.0.1:{port}", command=command)
        for port, command in zip(world.ports, commands, strict=True)
    ]
    follower = world.follower(
        servers=tuple(servers), arguments=tuple(arguments), start_timeout_s=300.0, unhealthy_s=60.0, drain_s=60.0,
        canary=CanaryConfig(steps=20, wait_s=20.0),
    )  # fmt: skip
    version = world.register(export=tmp_path / "export")
    world.settle(follower, timeout_s=300.0)
    assert world.running() == [0, 0]
    world.promote(version)
    with Clients(world.ports) as clients:
        world.settle(follower, timeout_s=300.0)
    assert world.running() == [version] * 2
    assert clients.lost == []
    before = len(world.said)
    world.promote(other := world.register(export=with_other_weights(tmp_path / "export", tmp_path / "other")))
    world.settle(follower, timeout_s=300.0)
    assert world.running() == [other] * 2
    said = "\n".join(world.said[before:])
    assert (said.count("took the weights"), said.count("starts with")) == (2, 0), said
    follower.stop_servers()
    assert world.servers() == []
