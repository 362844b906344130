"""Which versions a running server can take in place of another: those that differ in their weights alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from infra.refusal import Refusal
from infra.serving.swap import CannotSwapError, changed_weights
from models.export.swap import changed_tensors

EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 4}


def export(place: Path, tensors: dict[str, torch.Tensor], described: dict[str, Any] = EAGLE3) -> Path:
    """A draft's folder."""
    place.mkdir()
    save_file(tensors, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps(described))
    return place


def tensors() -> dict[str, torch.Tensor]:
    return {"fc.weight": torch.ones(4, 4), "embed_tokens.weight": torch.ones(8, 4), "d2t": torch.arange(4)}


def test_only_tensors_that_differ_are_sent(tmp_path: Path) -> None:
    old = export(tmp_path / "1", tensors(), EAGLE3 | {"draftsmith": {"run": "a"}})
    new = export(tmp_path / "2", tensors() | {"fc.weight": torch.zeros(4, 4)}, EAGLE3 | {"draftsmith": {"run": "b"}})
    changed = changed_tensors(old, new)
    assert list(changed) == ["fc.weight"]
    assert torch.equal(changed["fc.weight"], torch.zeros(4, 4))


@pytest.mark.parametrize(
    ("change", "described", "why"),
    [
        ({"d2t": torch.arange(1, 5)}, EAGLE3, "d2t differ"),
        ({"embed_tokens.weight": torch.zeros(8, 4)}, EAGLE3, "embed_tokens.weight differ"),
        ({"fc.weight": torch.ones(4, 8)}, EAGLE3, "names, shapes or dtypes"),
        ({"fc.weight": torch.ones(4, 4, dtype=torch.bfloat16)}, EAGLE3, "names, shapes or dtypes"),
        ({}, EAGLE3 | {"hidden_size": 8}, "config.json"),
    ],
)
def test_versions_that_differ_in_more_are_not_swapped(
    tmp_path: Path, change: dict[str, torch.Tensor], described: dict[str, Any], why: str
) -> None:
    old, new = export(tmp_path / "1", tensors()), export(tmp_path / "2", tensors() | change, described)
    with pytest.raises(Refusal, match=why):
        changed_tensors(old, new)


def cut_off(place: Path) -> None:
    file = place / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


@pytest.mark.parametrize("spoil", [cut_off, lambda place: (place / "config.json").unlink()])
def test_a_folder_that_cannot_be_read_is_not_swapped(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    old, new = export(tmp_path / "1", tensors()), export(tmp_path / "2", tensors())
    spoil(new)
    with pytest.raises(Refusal, match="cannot be read"):
        changed_tensors(old, new)


def test_other_methods_are_restarted(tmp_path: Path) -> None:
    places = [export(tmp_path / name, tensors(), {"architectures": ["SomethingNew"]}) for name in "12"]
    with pytest.raises(Refusal, match="SomethingNew"):
        changed_tensors(*places)


def test_the_follower_hears_why(tmp_path: Path) -> None:
    places = [export(tmp_path / name, tensors(), {"architectures": ["SomethingNew"]}) for name in "12"]
    with pytest.raises(CannotSwapError, match=r"^swaps of SomethingNew"):
        changed_weights(*places, ranks=1)


def test_too_much_for_one_request_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = export(tmp_path / "1", tensors())
    new = export(tmp_path / "2", tensors() | {"fc.weight": torch.zeros(4, 4)})
    monkeypatch.setattr("infra.serving.swap.MOST_BYTES", 3 * len(changed_weights(old, new, ranks=1)))
    changed_weights(old, new, ranks=3)
    with pytest.raises(CannotSwapError, match="to 4 ranks"):
        changed_weights(old, new, ranks=4)
