"""Leased GPUs that torch cannot use are refused; nothing falls back to the CPU in silence."""

from types import SimpleNamespace

import pynvml
import pytest
import torch

from infra.pools.gpus import Gpu, Gpus
from infra.refusal import Refusal
from models.devices import compute_device, device_with, leased_bytes, limit_memory


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


def test_a_process_keeps_to_its_part_of_a_shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 * 2**30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _device: limits.append(share))
    limit_memory(None)
    limit_memory(int(41.5 * 2**30))
    assert limits == [0.5]  # CUDA keeps 1.5 GiB beside torch's allocator


def test_what_a_gpu_has_no_room_for_goes_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8 * 2**30, 24 * 2**30))
    assert device_with(8 * 2**30) == torch.device("cuda", 0)
    assert device_with(8 * 2**30 + 1) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_with(2**50) == torch.device("cpu")


def test_a_broken_driver_concerns_only_processes_that_leased_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def mismatch() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", mismatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert leased_bytes() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    with pytest.raises(Refusal, match="GPUs do not answer"):
        leased_bytes()


def test_a_slice_has_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpu(uuid: str, gib: int, slices: tuple[Gpu, ...] = ()) -> Gpu:
        return Gpu("H100", gib * 2**30, gib * 2**30, uuid=uuid, mig=bool(slices), slices=slices)

    inventory = Gpus((gpu("GPU-1", 80, (gpu("MIG-1", 10),)), gpu("GPU-2", 80)), "580", 13)
    monkeypatch.setattr("models.devices.read_gpus", lambda: inventory)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,GPU-2")
    assert leased_bytes() == [10 * 2**30, 80 * 2**30]
