"""A server that shares its GPU with a trainer keeps to the planner's part of the memory."""

from pathlib import Path

from infra.records.sharing import Sharing
from infra.sglang.command import ServerSpec, capture_command
from infra.sglang.config import SGLangConfig
from models.capture.sglang.engine import within_share

GIB = 2**30
SHARED = Sharing(
    mode="share", why="", budget_bytes=1, generator_bytes=20 * GIB, static_bytes=17 * GIB, cache_tokens=16384,
    trainer_bytes=60 * GIB,
)  # fmt: skip


def test_a_server_is_given_its_fraction_and_a_bound_of_its_cache() -> None:
    spec = ServerSpec(Path("/target"), "bfloat16", 2048, 4, Path("python"), gpus=1)
    command = capture_command(spec, within_share(SGLangConfig(), SHARED), [1], 30000)
    assert command[command.index("--mem-fraction-static") + 1] == "0.85"
    assert command[command.index("--max-total-tokens") + 1] == "16384"


def test_a_person_s_own_fraction_and_arguments_are_kept() -> None:
    own = SGLangConfig(memory_fraction=0.5, arguments=("--max-total-tokens", "99"))
    settings = within_share(own, SHARED)
    assert settings.memory_fraction == 0.5
    assert settings.arguments[-2:] == ("--max-total-tokens", "99")  # the last one counts
    assert within_share(own, Sharing(mode="apart", why="", budget_bytes=1)) == own
