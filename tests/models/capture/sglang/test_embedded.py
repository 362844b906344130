"""What the plugin captures for drafts that read the embeddings of images."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_engine import AUX, HIDDEN, FakeRequest, fake_scheduler, prefill

from infra.config import TransportConfig
from infra.records.data_path import CaptureSpec
from models.capture.sglang import plugin
from models.capture.sglang.plugin import Capture, keep_embedded


@pytest.fixture
def spec(tmp_path: Path) -> CaptureSpec:
    transport = TransportConfig(kind="files", folder=str(tmp_path))
    sizes = {"aux_count": AUX // HIDDEN, "hidden_size": HIDDEN}
    return CaptureSpec(transport=transport, run=tmp_path, dtype="float32", top_token=False, embedded=True, **sizes)


@pytest.fixture
def capture(spec: CaptureSpec, monkeypatch: pytest.MonkeyPatch) -> Iterator[Capture]:
    monkeypatch.setattr(plugin, "_parallel", lambda: SimpleNamespace(attn_tp_rank=0, attn_cp_rank=0, attn_cp_size=1))
    made = Capture(spec)
    yield made
    made.close()


def output_of(hidden: Any, embedded: torch.Tensor | None) -> Any:
    return SimpleNamespace(
        hidden_states=hidden.aux, last_hidden_states=hidden.last, mm_input_embeds=embedded, next_token_logits=None
    )


def test_rows_of_images_have_their_embeddings_and_places(capture: Capture) -> None:
    seen = FakeRequest("1", 9, multimodal_inputs=SimpleNamespace(mrope_positions=torch.randint(40, (3, 9))))
    text = FakeRequest("2", 12)
    # The second piece of one prompt, and the whole of another.
    batch, hidden = prefill((seen, 4, 5), (text, 0, 12))
    embedded = torch.randn(17, HIDDEN)
    copy = capture.copy(fake_scheduler(), output_of(hidden, embedded), batch)
    assert copy is not None
    assert copy.hidden.embedded is embedded
    assert copy.hidden.places is not None
    assert torch.equal(copy.hidden.places[:5].long(), seen.multimodal_inputs.mrope_positions[:, 4:].T)
    assert torch.equal(copy.hidden.places[5:].long(), torch.arange(12)[:, None].expand(-1, 3))


def test_a_batch_of_text_has_nothing_to_embed(capture: Capture) -> None:
    batch, hidden = prefill((FakeRequest("1", 9), 3, 6))
    copy = capture.copy(fake_scheduler(), output_of(hidden, None), batch)
    assert copy is not None
    assert copy.hidden.embedded is not None
    assert not copy.hidden.embedded.any()
    assert copy.hidden.places is not None
    assert copy.hidden.places[:, 0].tolist() == list(range(3, 9))


def test_the_engine_may_overwrite_what_its_first_layer_read() -> None:
    batch, embedded = SimpleNamespace(mm_input_embeds=None), torch.ones(3, HIDDEN)

    def prepare(*_: Any, **named: Any) -> torch.Tensor:
        named["forward_batch"].mm_input_embeds = embedded
        return embedded

    found = keep_embedded(prepare, torch.arange(3), forward_batch=batch)
    assert found is embedded
    embedded.zero_()  # as a fused norm does
    assert batch.mm_input_embeds.all()
