"""The command line of a server, by its settings and machines."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from infra.records.servers import ServerMachines, ServerOrder
from infra.refusal import Refusal
from infra.sglang.command import ServerSpec, capture_command, draft_arguments, serving_command, sglang_python
from infra.sglang.config import SGLangConfig
from infra.sglang.machines import newest_order, part_of

TWO = ServerMachines(meeting=Path("/meeting"), count=2, address="10.0.0.1")


def arguments(gpus: int, machines: ServerMachines | None = None, **settings: Any) -> dict[str, str]:
    spec = ServerSpec(Path("/target"), "bfloat16", 100, 32, Path("/python"), gpus, machines)
    command = serving_command(spec, SGLangConfig(**settings), (), 30000)
    return dict(zip(command, [*command[1:], ""], strict=True))


@pytest.mark.parametrize(
    ("gpus", "machines", "settings", "ranks"),
    [(8, None, {}, 8), (8, TWO, {}, 16), (8, None, {"data_parallel": 2}, 4), (0, TWO, {"tensor_parallel": 2}, 2)],
)
def test_ranks_are_all_gpus_of_all_machines(gpus: int, machines: Any, settings: dict[str, int], ranks: int) -> None:
    assert arguments(gpus, machines, **settings)["--tensor-parallel-size"] == str(ranks)


def test_ranks_with_requests_of_their_own_keep_the_head_together() -> None:
    found = arguments(8, attention_data_parallel=8, expert_parallel=8, tensor_parallel=8)
    assert (found["--attn-dp-size"], found["--expert-parallel-size"]) == ("8", "8")
    assert "--enable-dp-lm-head" in found
    assert not {"--attn-dp-size", "--enable-dp-lm-head", "--expert-parallel-size"} & set(arguments(8))


@pytest.mark.parametrize(("groups", "sleeps"), [(1, True), (2, False)])
def test_groups_that_wait_for_each_other_do_not_sleep(groups: int, sleeps: bool) -> None:
    spec = ServerSpec(Path("/target"), "bfloat16", 100, 32, Path("/python"), gpus=2)
    command = capture_command(spec, SGLangConfig(attention_data_parallel=groups), (1, 2), 30000)
    assert ("--sleep-on-idle" in command) == sleeps


def test_copies_and_groups_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match="SGLang takes one of them"):
        SGLangConfig(data_parallel=2, attention_data_parallel=2)


def test_the_newest_order_holds_until_it_is_revoked(tmp_path: Path) -> None:
    assert newest_order(tmp_path) is None
    orders = [
        ServerOrder(
            serial=serial, role="sglang-0", command=("serve",), environment={}, start_timeout_s=1.0,
            ranks_at="10.0.0.1:21000",
        )
        for serial in (9, 10)
    ]  # fmt: skip
    for order in orders:
        (tmp_path / f"order-{order.serial}.json").write_text(order.model_dump_json())
    assert newest_order(tmp_path) == orders[1]
    (tmp_path / "order-10.json").unlink()
    assert newest_order(tmp_path) == orders[0]
    assert part_of(orders[0], 1, 2) == ["--nnodes", "2", "--node-rank", "1", "--dist-init-addr", "10.0.0.1:21000"]


@pytest.mark.parametrize(
    ("place", "taken"),
    [
        ("/runs/mistral-7b-eagle3-20261129-1200/export", True),
        ("/served/draft-Mistral-EAGLE/3", True),
        ("/runs/mistral-small-4-20261129-1200/export", True),
        ("/runs/mistral-7b-20261129-1200/export", False),
        ("/eagle/runs/qwen3-8b/export", False),
    ],
)
def test_no_draft_is_taken_for_one_in_mistrals_own_format(place: str, taken: bool) -> None:
    if taken:
        with pytest.raises(Refusal, match=f"does not start with a draft in {place}: .*choose another name"):
            draft_arguments(Path(place))
    else:
        assert draft_arguments(Path(place)) == ("--speculative-draft-model-path", place)


START_METHOD = "import multiprocessing as mp; mp.set_start_method('spawn', force=True); print(mp.get_start_method())"


@pytest.mark.parametrize(
    ("arguments", "variables", "method"),
    [
        (("--device", "cpu"), {}, "fork"),
        (("--device", "cpu"), {"DRAFTSMITH_TEST_SPAWN": "1"}, "spawn"),
        (("--device", "cuda"), {}, "spawn"),
        ((), {}, "spawn"),
    ],
)
def test_servers_of_tests_fork_on_a_cpu_alone(
    arguments: tuple[str, ...], variables: dict[str, str], method: str
) -> None:
    command = [str(sglang_python()), "-c", START_METHOD, *arguments]
    said = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=True, timeout=60
    )
    assert said.stdout.strip() == method
