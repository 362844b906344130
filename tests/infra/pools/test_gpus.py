"""The inventory of GPUs, with a stand-in for NVIDIA's library: there is no GPU here."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from infra.doctor import devices
from infra.pools.base import PoolBusyError, PoolSpec
from infra.pools.gpus import pci_addresses, read_gpus, visible_gpus
from infra.pools.local import LocalPools
from infra.processes.process import Owner

GIB = 2**30


@dataclass
class Card:
    """What NVML says of one GPU."""

    uuid: str
    bus: str
    used: int = 0
    processes: tuple[tuple[int, int], ...] = ()


CARDS = [
    Card("GPU-aa", "00000000:18:00.0"),
    Card("GPU-bb", "00000000:2A:00.0", 30 * GIB, ((4_000_000, 29 * GIB),)),
    Card("GPU-cc", "00000000:9A:00.0", 5 * GIB),
    Card("GPU-dd", "00000000:AB:00.0"),
]


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> list[Card]:
    """Two pairs with NVLink inside, each at a socket of its own."""

    def answer(name: str, function: Callable[..., object]) -> None:
        monkeypatch.setattr(pynvml, f"nvml{name}", function)

    def not_supported(_card: Card) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    pair = {card.uuid: index // 2 for index, card in enumerate(CARDS)}
    linked, system = pynvml.NVML_P2P_STATUS_OK, pynvml.NVML_TOPOLOGY_SYSTEM
    answer("Init", lambda: None)
    answer("Shutdown", lambda: None)
    answer("SystemGetDriverVersion", lambda: "580.1")
    answer("SystemGetCudaDriverVersion_v2", lambda: 13000)
    answer("DeviceGetCount", lambda: len(CARDS))
    answer("DeviceGetHandleByIndex", lambda index: CARDS[index])
    answer("DeviceGetHandleByUUID", lambda uuid: next(card for card in CARDS if card.uuid == uuid))
    answer("DeviceGetUUID", lambda card: card.uuid)
    answer("DeviceGetName", lambda _card: "H100")
    answer("DeviceGetMemoryInfo", lambda card: SimpleNamespace(total=80 * GIB, free=80 * GIB - card.used))
    answer("DeviceGetMigMode", not_supported)
    answer("DeviceGetPciInfo", lambda card: SimpleNamespace(busId=card.bus))
    answer("DeviceGetTopologyCommonAncestor", lambda _one, _other: system)
    answer("DeviceGetP2PStatus", lambda one, other, _kind: linked if pair[one.uuid] == pair[other.uuid] else linked + 1)
    answer(
        "DeviceGetComputeRunningProcesses",
        lambda card: [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in card.processes],
    )
    return CARDS


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A `/` with the GPUs' and two NICs' places in /sys."""
    root = tmp_path / "root"
    for index, card in enumerate(CARDS):
        device = root / "sys/bus/pci/devices" / card.bus.lower()[4:]
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{index // 2}\n")
    for number in range(2):
        nic = root / f"sys/class/infiniband/mlx5_{number}"
        (nic / "ports/1").mkdir(parents=True)
        (nic / "ports/1/state").write_text("4: ACTIVE\n")
        (nic / "device").mkdir()
        (nic / "device/numa_node").write_text(f"{number}\n")
    return root


def test_the_inventory_says_what_is_near(cards: list[Card], machine: Path) -> None:
    found = read_gpus(machine)
    assert found is not None
    assert [gpu.uuid for gpu in found.gpus] == list(visible_gpus()) == [card.uuid for card in cards]
    assert pci_addresses(["GPU-bb"]) == ["0000:2a:00.0"] == [found.gpus[1].pci]
    assert [(gpu.numa, gpu.nics) for gpu in found.gpus[1:3]] == [("0", ("mlx5_0",)), ("1", ("mlx5_1",))]
    assert found.gpus[0].links == ("", "NVLink", "other NUMA nodes", "other NUMA nodes")
    said = [finding.found for finding in devices.gpus(found)]
    assert "NUMA node 0, RDMA by mlx5_0, NVLink to GPU 1, GPU 2, 3 through other NUMA nodes" in said[0]
    assert "in use by process 4000000 (29 GiB)" in said[1]


def test_gpus_that_strangers_use_are_left_alone(cards: list[Card], tmp_path: Path) -> None:
    first, second = (LocalPools(locks=tmp_path / "locks") for _ in range(2))
    (pool,) = first.acquire([PoolSpec("training", 2)], Owner("one", tmp_path))
    assert pool.gpus == ("GPU-aa", "GPU-dd")
    first.release("one")
    (pool,) = first.acquire([PoolSpec("training", 1)], Owner("one", tmp_path))
    with pytest.raises(PoolBusyError) as raised:
        second.acquire([PoolSpec("training", 2)], Owner("two", tmp_path))
    for said in (
        "of this machine's 4, 1 are held by other runs",
        "GPU-bb is in use by process 4000000 (29 GiB)",
        "GPU-cc is in use by processes that cannot be seen from here",
    ):
        assert said in str(raised.value)
    first.release("one")
