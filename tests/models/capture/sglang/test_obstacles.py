"""Servers that keep no hidden states, or only parts of them, say so when a run attaches."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engine import FakeRequest, fake_scheduler, prefill

from infra.config import TransportConfig
from infra.records.data_path import CaptureSpec
from infra.records.live import Attach, LiveRule
from infra.refusal import Refusal
from models.capture.sglang import plugin
from models.capture.sglang.plugin import Capture
from models.capture.sglang.tap import Tap
from models.config.live import LiveServerConfig

BLOCKS = ("DFLASH", "DSPARK")
ONE_MACHINE = {
    "attn_tp_rank": 0, "attn_cp_rank": 0, "attn_cp_size": 1, "pp_rank": 0, "pp_size": 1, "nnodes": 1, "dp_rank": None,
    "attn_dp_rank": 0, "num_dp_ranks": 1,
}  # fmt: skip


def scheduler_with(algorithm: str, eagle: bool = False, blocks: bool = False) -> Any:
    """A scheduler that speculates so; which layers its target's model was told to capture."""
    aux = SimpleNamespace(eagle_use_aux_hidden_state=eagle, dflash_use_aux_hidden_state=blocks)
    named = SimpleNamespace(
        name=algorithm, is_none=lambda: algorithm == "NONE", is_dflash_family=lambda: algorithm in BLOCKS
    )
    return SimpleNamespace(
        spec_algorithm=named,
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(spec_aux_config=aux)),
        disaggregation_mode=SimpleNamespace(value="null"),
        is_fully_idle=lambda: True,
    )


def wanted(run: Path) -> Attach:
    spec = CaptureSpec(
        transport=TransportConfig(kind="files", folder=str(run)), run=run, aux_count=3, hidden_size=4, dtype="float32",
        top_token=False, embedded=False,
    )  # fmt: skip
    return Attach(spec=spec, rule=LiveRule(share=1.0, longest=64))


@pytest.fixture
def attach(tmp_path: Path, path_in_memory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Starts a server that listens for runs, and attaches one."""

    def attach(scheduler: Any, **parallel: int) -> None:
        socket = path_in_memory / "live.sock"  # a short path
        (tmp_path / f"draftsmith-{tmp_path.name}").mkdir()
        monkeypatch.setattr(plugin, "_LIVE", [])
        monkeypatch.setattr(plugin, "live_socket", lambda: socket)
        monkeypatch.setattr(plugin, "_parallel", lambda: SimpleNamespace(**ONE_MACHINE | parallel))
        plugin.listen_for_runs(None, scheduler)
        try:
            Tap(LiveServerConfig(address="http://127.0.0.1:1", socket=socket), wanted(tmp_path)).close()
        finally:
            plugin._LIVE[0].close()

    return attach


@pytest.mark.parametrize(
    ("algorithm", "captures", "refused"),
    [
        ("EAGLE3", {"eagle": True}, ""),
        ("NONE", {"eagle": True}, ""),
        ("NONE", {"blocks": True}, ""),
        ("DFLASH", {"blocks": True}, "it speculates with DFLASH, and SGLang 0.5.23 keeps no hidden states"),
        ("DSPARK", {"blocks": True}, "it speculates with DSPARK"),
        ("EAGLE", {}, r"it speculates with EAGLE \(NEXTN, MTP\)"),
        ("EAGLE3", {}, "it speculates with EAGLE3"),
        ("NGRAM", {}, "it speculates with NGRAM, .*--enable-return-aux-hidden-states as in docs/live.md, or train on"),
        ("NONE", {}, "it keeps no hidden states: start it with an EAGLE-3 draft, or without"),
    ],
)
def test_a_server_whose_worker_keeps_no_hidden_states(
    attach: Callable[..., None], algorithm: str, captures: dict[str, bool], refused: str
) -> None:
    if refused:
        with pytest.raises(Refusal, match=refused):
            attach(scheduler_with(algorithm, **captures))
    else:
        attach(scheduler_with(algorithm, **captures))


def test_a_server_whose_ranks_divide_a_text(attach: Callable[..., None]) -> None:
    with pytest.raises(Refusal, match=r"context parallelism.*: start it without --attn-cp-size"):
        attach(scheduler_with("EAGLE3", eagle=True), attn_cp_size=2)


def test_an_engine_of_a_run_whose_ranks_divide_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those ranks, the first one has only its own rows, and would be refused for their number."""
    monkeypatch.setattr(plugin, "_parallel", lambda: SimpleNamespace(**ONE_MACHINE | {"attn_cp_size": 2}))
    capture = Capture(wanted(tmp_path).spec)
    batch, hidden = prefill((FakeRequest("1", 5), 0, 5))
    output = SimpleNamespace(hidden_states=hidden.aux, last_hidden_states=hidden.last)
    with pytest.raises(Refusal, match=r"leave --attn-cp-size out of generator\.sglang\.arguments"):
        capture.copy(fake_scheduler(), output, batch)
    capture.close()


def test_a_rank_that_divides_texts_with_others_writes_nothing() -> None:
    ranks = [SimpleNamespace(attn_tp_rank=rank % 2, attn_cp_rank=rank // 2) for rank in range(4)]
    assert [plugin._writes(rank) for rank in ranks] == [True, False, False, False]


class Norm(torch.nn.Module):
    """Gemma 3's on CUDA: with a residual it works in place."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return hidden * 10
        hidden += residual
        hidden *= 10
        return hidden, residual


@pytest.mark.parametrize(("captured", "kept"), [([1, 3], True), ([1, 2], False)])
def test_the_last_layer_s_output_of_gemma_3_survives_the_final_norm(captured: list[int], kept: bool) -> None:
    body = SimpleNamespace(layers=[SimpleNamespace() for _ in range(3)], norm=Norm(), layers_to_capture=captured)
    for _ in range(2):
        plugin.mark_layers(None, SimpleNamespace(model=body))
    hidden = torch.ones(2)
    output, _ = body.norm(hidden, torch.ones(2))
    assert output.tolist() == [20, 20]
    assert hidden.tolist() == ([1, 1] if kept else [20, 20])
    assert len(body.norm._forward_pre_hooks) == kept
    assert body.norm(hidden).tolist() == (hidden * 10).tolist()
