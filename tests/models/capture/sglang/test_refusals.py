"""A server that would capture something wrong is refused before it captures anything, with the reason."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Olmo2Config, Olmo2ForCausalLM

from infra.records.data_path import TargetRecord
from models.capture.sglang.engine import SGLangEngine
from models.run import PreparedRun

pytestmark = pytest.mark.slow
TOKENS = torch.arange(10, 42)


@pytest.fixture(autouse=True)
def nothing_left(assert_no_segments_left: Callable[[], None]) -> Iterator[None]:
    """A refused server leaves no shared memory behind."""
    yield
    assert_no_segments_left()


class WithPrefixCache(SGLangEngine):
    def _command(self, port: int) -> list[str]:
        return [part for part in super()._command(port) if part != "--disable-radix-cache"]


class WithoutPlugin(SGLangEngine):
    def _environment(self) -> dict[str, str]:
        return super()._environment() | {"SGLANG_PLUGINS": "draftsmith_cpu"}


class WithoutItsPort(SGLangEngine):
    def _command(self, port: int) -> list[str]:
        self.stranger = socket.create_server(("127.0.0.1", port))
        return super()._command(port)


def test_a_port_that_another_program_took(
    sglang_run: Callable[..., PreparedRun], engine_of: Callable[..., SGLangEngine]
) -> None:
    with pytest.raises(ConnectionError, match=r"another program took port \d+ before sglang-0 listened there"):
        engine_of(sglang_run(), WithoutItsPort)


def test_an_active_prefix_cache(sglang_run: Callable[..., PreparedRun], engine_of: Callable[..., SGLangEngine]) -> None:
    engine = engine_of(sglang_run(), WithPrefixCache)
    with pytest.raises(ValueError, match="taken from a cache: start the server with --disable-radix-cache"):
        engine.check_canary(TOKENS)


@pytest.mark.long
def test_a_plugin_that_did_not_attach(
    sglang_run: Callable[..., PreparedRun], engine_of: Callable[..., SGLangEngine]
) -> None:
    engine = engine_of(sglang_run(), WithoutPlugin)
    with pytest.raises(ValueError, match="the capture plugin did not attach"):
        engine.check_canary(TOKENS)


def test_other_layers_than_the_run_s(
    sglang_run: Callable[..., PreparedRun], engine_of: Callable[..., SGLangEngine]
) -> None:
    run = sglang_run(
        'generator.sglang.arguments=["--return-aux-hidden-state-layer-ids", "1", "2"]', "target.aux_layer_ids=[0, 2]"
    )
    engine = engine_of(run)
    with pytest.raises(ValueError, match="layer 0 differs from a plain forward"):
        engine.check_canary(TOKENS)


@pytest.mark.long
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("target.aux_layer_ids=[0, 1, 9]",), r"SGLang refuses: .* \[9\] out of range for a target with 4 layers"),
        (('generator.sglang.arguments=["--no-such-flag"]',), "does not know these arguments: .*--no-such-flag"),
    ],
)
def test_settings_that_sglang_refuses(
    sglang_run: Callable[..., PreparedRun],
    engine_of: Callable[..., SGLangEngine],
    overrides: tuple[str, ...],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        engine_of(sglang_run(*overrides))


@pytest.mark.long
def test_a_target_that_is_gone(
    sglang_run: Callable[..., PreparedRun], engine_of: Callable[..., SGLangEngine], tiny_target: TargetRecord
) -> None:
    gone = tiny_target.model_copy(update={"path": "/no/such/target"})
    with pytest.raises(ValueError, match="SGLang finds no target at /no/such/target"):
        engine_of(sglang_run(target=gone))


@pytest.mark.long
def test_an_architecture_that_this_release_cannot_capture(
    sglang_run: Callable[..., PreparedRun],
    engine_of: Callable[..., SGLangEngine],
    tiny_target: TargetRecord,
    tmp_path: Path,
) -> None:
    model = Olmo2ForCausalLM(
        Olmo2Config(
            vocab_size=1024, hidden_size=192, intermediate_size=256, num_hidden_layers=4, num_attention_heads=6,
            bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_target.path).save_pretrained(tmp_path)
    other = tiny_target.model_copy(update={"path": str(tmp_path)})
    with pytest.raises(ValueError, match="cannot capture hidden states of Olmo2ForCausalLM"):
        engine_of(sglang_run(target=other))
