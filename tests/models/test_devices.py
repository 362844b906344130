"""Leased GPUs that torch cannot use are refused; nothing falls back to the CPU in silence."""

import pytest
import torch

from models.devices import compute_device


def test_a_lease_of_gpus_is_never_served_by_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1,GPU-2")
    with pytest.raises(ValueError, match=r"the GPUs GPU-1, GPU-2 .*cannot use them: install a torch for CUDA"):
        compute_device()


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_whoever_hides_all_gpus_gets_the_cpu(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert compute_device() == torch.device("cpu")
