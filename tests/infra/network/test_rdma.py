"""Which NICs are near a GPU, on machines made of folders."""

from pathlib import Path

import pytest
from rdma_devices import put_rdma_device

from infra.network.rdma import active_devices, nearest_devices

GPU_A, GPU_B = "0000:18:00.0", "0000:9a:00.0"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Two sockets: GPU and NIC below one switch on the first; on the second apart, and a NIC that is down."""
    devices = {
        GPU_A: ("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0", 0),
        GPU_B: ("pci0000:97/0000:97:01.0/0000:9a:00.0", 1),
    }
    nics = {
        "mlx5_0": ("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:19:00.0", 0, "ACTIVE"),
        "mlx5_1": ("pci0000:37/0000:37:01.0/0000:38:00.0", 0, "ACTIVE"),
        "mlx5_2": ("pci0000:b0/0000:b0:01.0/0000:b1:00.0", 1, "ACTIVE"),
        "mlx5_3": ("pci0000:97/0000:97:01.0/0000:9b:00.0", 1, "DOWN"),
    }
    for address, (place, node) in devices.items():
        put(tmp_path, place, node, tmp_path / "sys/bus/pci/devices" / address)
    for name, (place, node, state) in nics.items():
        put_rdma_device(tmp_path, name, f"4: {state}")
        put(tmp_path, place, node, tmp_path / "sys/class/infiniband" / name / "device")
    return tmp_path


def put(root: Path, place: str, node: int, link: Path) -> None:
    folder = root / "sys/devices" / place
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{node}\n")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)


@pytest.mark.parametrize(
    ("gpus", "nearest"),
    [
        ([GPU_A], ["mlx5_0"]),  # below the same switch
        ([GPU_B], ["mlx5_2"]),  # nothing shared, but the socket
        ([GPU_A, GPU_B], ["mlx5_0", "mlx5_2"]),
        ([], ["mlx5_0", "mlx5_1", "mlx5_2"]),
    ],
)
def test_the_nearest_of_the_active(machine: Path, gpus: list[str], nearest: list[str]) -> None:
    assert nearest_devices(gpus, machine) == nearest


def test_devices_that_carry_nothing_do_not_count(tmp_path: Path) -> None:
    """A port without a link, one of a kind that Mooncake does not speak, and a device that a container lacks."""
    put_rdma_device(tmp_path, "mlx5_0", "1: DOWN")
    put_rdma_device(tmp_path, "rdmap_1", layer="Unspecified")  # EFA
    file = put_rdma_device(tmp_path, "mlx5_2", layer="InfiniBand")
    assert active_devices(tmp_path) == ["mlx5_2"]
    file.unlink()
    assert active_devices(tmp_path) == []


def test_a_machine_without_any(tmp_path: Path) -> None:
    assert active_devices(tmp_path) == []
    assert nearest_devices([GPU_A], tmp_path) == []
