"""Cores near a GPU and the GPU of a rank, on machines made of folders."""

import os
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from infra.pools import binding
from infra.settings import own_gpus

GPU, ADDRESS = "GPU-aa", "0000:18:00.0"


@pytest.mark.parametrize(
    ("node", "cores", "near"),
    [("1", "0-1,64", {0, 1}), ("1", "200-300", None), ("-1", "0", None), (None, "0", None)],
    ids=["near", "none of ours", "one node", "unknown"],
)
def test_cores_of_the_gpus_numa_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str | None, cores: str, near: set[int] | None
) -> None:
    answers = {
        "Init": lambda: None,
        "Shutdown": lambda: None,
        "DeviceGetCount": lambda: 1,
        "DeviceGetHandleByIndex": lambda index: index,
        "DeviceGetUUID": lambda _: GPU,
        "DeviceGetMigMode": lambda _: (0, 0),
        "DeviceGetMemoryInfo": lambda _, **_version: SimpleNamespace(),
        "DeviceGetPciInfo": lambda _: SimpleNamespace(busId="0000" + ADDRESS),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", answer)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    device, list_of_node = tmp_path / "sys/bus/pci/devices" / ADDRESS, tmp_path / "sys/devices/system/node/node1"
    for folder in (device, list_of_node):
        folder.mkdir(parents=True)
    (list_of_node / "cpulist").write_text(f"{cores}\n")
    if node is not None:
        (device / "numa_node").write_text(f"{node}\n")
    assert binding.near_cores(GPU, tmp_path) == (near or {0, 1, 2, 3})


def test_a_gpu_that_nvml_does_not_know_binds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert binding.near_cores("0") == os.sched_getaffinity(0)


def test_a_rank_has_one_of_its_machines_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert own_gpus() == ["4", "5"]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_gpus() == ["5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert own_gpus() == []
