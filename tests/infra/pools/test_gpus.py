"""The inventory of GPUs, with a stand-in for NVIDIA's library: there is no GPU here."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
from rdma_devices import put_rdma_device

from infra.doctor import devices
from infra.pools.base import PoolBusyError, PoolSpec
from infra.pools.gpus import named_by_position, pci_addresses, read_gpus, visible_gpus
from infra.pools.local import LocalPools
from infra.processes.control_groups import memory
from infra.processes.process import Owner
from infra.refusal import Refusal
from infra.settings import permitted_gpus

GIB = 2**30


@dataclass
class Card:
    """What NVML says of one GPU."""

    uuid: str
    bus: str
    used: int = 0
    processes: tuple[tuple[int, int], ...] = ()
    slices: tuple["Card", ...] = ()


RESERVED = GIB // 2
"""What the driver keeps for itself on every card."""
CALLS = ("HandleByIndex", "UUID", "MigMode", "MemoryInfo")
"""What is asked of every GPU, in this order."""
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

    def fail(code: int) -> None:
        raise pynvml.NVMLError(code)

    def memory(card: Card, version: int = 0) -> SimpleNamespace:
        """The first version of the call counts what the driver keeps as used; the second has it apart."""
        found = SimpleNamespace(total=80 * GIB, free=80 * GIB - RESERVED - card.used)
        if version:
            found.reserved = RESERVED
        return found

    def mig_mode(card: Card) -> tuple[int, int]:
        return (int(bool(card.slices)),) * 2 if "GPU" in card.uuid else fail(pynvml.NVML_ERROR_NOT_SUPPORTED)  # type: ignore[return-value]

    def mig_device(card: Card, index: int) -> Card:
        return card.slices[index] if index < len(card.slices) else fail(pynvml.NVML_ERROR_NOT_FOUND)  # type: ignore[return-value]

    def whole(card: Card) -> Card:
        parents = [parent for parent in CARDS if card in parent.slices]
        return parents[0] if parents else fail(pynvml.NVML_ERROR_INVALID_ARGUMENT)  # type: ignore[return-value]

    pair = {card.uuid: index // 2 for index, card in enumerate(CARDS)}
    linked = pynvml.NVML_P2P_STATUS_OK
    answer("Init", lambda: None)
    answer("Shutdown", lambda: None)
    answer("SystemGetDriverVersion", lambda: "580.1")
    answer("SystemGetCudaDriverVersion_v2", lambda: 13000)
    answer("DeviceGetCount", lambda: len(CARDS))
    answer("DeviceGetHandleByIndex", lambda index: CARDS[index])
    answer("DeviceGetUUID", lambda card: card.uuid)
    answer("DeviceGetName", lambda _card: "H100")
    answer("DeviceGetMemoryInfo", memory)
    answer("DeviceGetMigMode", mig_mode)
    answer("DeviceGetCudaComputeCapability", lambda _card: (9, 0))
    answer("DeviceGetMaxMigDeviceCount", lambda _card: 7)
    answer("DeviceGetMigDeviceHandleByIndex", mig_device)
    answer("DeviceGetDeviceHandleFromMigDeviceHandle", whole)
    answer("DeviceGetPciInfo", lambda card: SimpleNamespace(busId=card.bus))
    answer("DeviceGetP2PStatus", lambda one, other, _kind: linked if pair[one.uuid] == pair[other.uuid] else linked + 1)
    answer(
        "DeviceGetComputeRunningProcesses",
        lambda card: [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in card.processes],
    )
    return CARDS


@pytest.fixture
def slices(cards: list[Card], monkeypatch: pytest.MonkeyPatch) -> tuple[Card, ...]:
    """The first card, divided by MIG; somebody computes on the first slice."""
    found = (Card("MIG-11", "", GIB, ((4_000_001, GIB),)), Card("MIG-22", ""), Card("MIG-33", ""))
    monkeypatch.setattr(cards[0], "slices", found)
    return found


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A `/` with the GPUs' and two NICs' places in /sys."""
    root = tmp_path / "root"
    for index, card in enumerate(CARDS):
        device = root / "sys/bus/pci/devices" / card.bus.lower()[4:]
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{index // 2}\n")
    for number in range(2):
        put_rdma_device(root, f"mlx5_{number}")
        nic = root / f"sys/class/infiniband/mlx5_{number}"
        (nic / "device").mkdir()
        (nic / "device/numa_node").write_text(f"{number}\n")
    return root


def test_the_inventory_says_what_is_near(cards: list[Card], machine: Path) -> None:
    found = read_gpus(machine)
    assert found is not None
    assert [gpu.uuid for gpu in found.gpus] == list(visible_gpus()) == [card.uuid for card in cards]
    assert pci_addresses(["GPU-bb"]) == ["0000:2a:00.0"]
    assert [(gpu.numa, gpu.nics) for gpu in found.gpus[1:3]] == [("0", ("mlx5_0",)), ("1", ("mlx5_1",))]
    assert found.gpus[0].links == (1,)
    said = [finding.found for finding in devices.gpus(found)]
    assert "NUMA node 0, RDMA by mlx5_0, NVLink to GPU 1" in said[0]
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
        "of this machine's 4, 1 are held by other runs or followers now",
        "GPU-bb is in use by process 4000000 (29 GiB)",
        "GPU-cc is in use by processes that cannot be seen from here",
    ):
        assert said in str(raised.value)
    first.release("one")


@pytest.mark.parametrize(
    ("visible", "leasable"),
    [
        ("3,0", ("GPU-dd", "GPU-aa")),
        ("GPU-c, GPU-dd", ("GPU-cc", "GPU-dd")),
        ("GPU-aa,GPU-zz,GPU-bb", ("GPU-aa",)),  # CUDA reads up to the first that is not there
        ("9", ()),
        ("", ()),
        ("NoDevFiles", ()),
    ],
)
def test_an_allocation_is_not_left(
    cards: list[Card], monkeypatch: pytest.MonkeyPatch, visible: str, leasable: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == LocalPools().gpus == leasable
    monkeypatch.setenv("DRAFTSMITH_GPUS", "GPU-aa,GPU-cc")
    assert set(LocalPools().gpus) == set(leasable) & {"GPU-aa", "GPU-cc"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert LocalPools().gpus == ("GPU-aa", "GPU-cc")


@pytest.mark.parametrize("names", ["GPU-aa, GPU-cc ,", "0,2", "GPU-a,GPU-c,0"])
def test_permitted_gpus_are_leased_by_their_uuids(
    cards: list[Card], monkeypatch: pytest.MonkeyPatch, names: str, tmp_path: Path
) -> None:
    """Whatever the names are: the locks are named by UUIDs, and so are those that strangers use."""
    monkeypatch.setenv("DRAFTSMITH_GPUS", names)
    pools = LocalPools(locks=tmp_path)
    assert pools.gpus == ("GPU-aa", "GPU-cc")
    with pytest.raises(PoolBusyError, match="2, 0 are held by other runs or followers now; GPU-cc is in use"):
        pools.acquire([PoolSpec("training", 2)], Owner("run", tmp_path))
    left = re.escape(f"this machine has 2 that $DRAFTSMITH_GPUS={','.join(permitted_gpus())} leaves: lower")
    with pytest.raises(Refusal, match=left):
        pools.check([PoolSpec("training", 3)])


@pytest.mark.parametrize("name", ["GPU-zz", "GPU-", "4"])
def test_a_permitted_gpu_that_is_not_there_is_refused(
    cards: list[Card], monkeypatch: pytest.MonkeyPatch, name: str, tmp_path: Path
) -> None:
    monkeypatch.setenv("DRAFTSMITH_GPUS", f"GPU-aa,{name}")
    pools = LocalPools(locks=tmp_path)
    pools.check([PoolSpec("training", 0)])
    with pytest.raises(Refusal, match=rf"\$DRAFTSMITH_GPUS: {name}: no GPU .* `nvidia-smi -L`"):
        pools.acquire([PoolSpec("training", 1)], Owner("run", tmp_path))
    hide_the_first(cards, monkeypatch)
    pools.check([PoolSpec("training", 1)])  # it may be what is hidden
    assert LocalPools().gpus == ()


def test_too_small_an_allocation_is_named(cards: list[Card], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    with pytest.raises(Refusal, match=r"wants 3 GPUs and this machine has 2 that \$CUDA_VISIBLE_DEVICES=0,3 leaves"):
        LocalPools(locks=tmp_path).acquire([PoolSpec("training", 3)], Owner("run", tmp_path))


def test_names_of_ray_and_slurm_have_places_too(cards: list[Card], slices: tuple[Card, ...]) -> None:
    assert pci_addresses(["1", "GPU-d"]) == ["0000:2a:00.0", "0000:ab:00.0"]
    assert pci_addresses(["MIG-22"]) == ["0000:18:00.0"]
    with pytest.raises(pynvml.NVMLError):
        pci_addresses(["7"])


def hide_the_first(cards: list[Card], monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(index: int) -> Card:
        if index == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return cards[index]

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)


def test_a_gpu_that_a_control_group_hides_does_not_count(cards: list[Card], monkeypatch: pytest.MonkeyPatch) -> None:
    hide_the_first(cards, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert visible_gpus() == ("GPU-bb", "GPU-dd")


@pytest.mark.parametrize(
    ("call", "code"),
    [
        *product(CALLS, (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)),
        # As of a GPU that MIG divides into no slices yet, whose memory only root may read.
        *product(CALLS[1:], (pynvml.NVML_ERROR_NO_PERMISSION,)),
    ],
)
def test_a_lost_gpu_leaves_the_others_their_positions(
    cards: list[Card], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: str, code: int
) -> None:
    working = getattr(pynvml, f"nvmlDeviceGet{call}")

    def lost(card: Card | int, *arguments: object, **options: object) -> object:
        if card in (0, cards[0]):
            raise pynvml.NVMLError(code)
        return working(card, *arguments, **options)

    monkeypatch.setattr(pynvml, f"nvmlDeviceGet{call}", lost)
    inventory = read_gpus()
    assert inventory is not None
    assert inventory.lost == {0: str(pynvml.NVMLError(code))}
    assert [gpu.uuid for gpu in inventory.gpus] == ["GPU-bb", "GPU-cc", "GPU-dd"] == list(visible_gpus())
    with pytest.raises(Refusal, match=r"wants 4 GPUs and this machine has 3; GPU 0 does not answer \(.+\): lower"):
        LocalPools(locks=tmp_path / "locks").check([PoolSpec("training", 4)])
    assert [finding.name for finding in devices.gpus(inventory)] == ["GPU 1", "GPU 2", "GPU 3", "GPU 0"]
    assert str(pynvml.NVMLError(code)) in devices.gpus(inventory)[3].found
    assert "NVLink to GPU 2" in devices.gpus(inventory)[2].found  # 2 and 3 are linked by NVLink
    monkeypatch.setenv("DRAFTSMITH_GPUS", "GPU-aa,GPU-dd")
    pools = LocalPools(locks=tmp_path / "locks")
    assert pools.acquire([PoolSpec("training", 1)], Owner("run", tmp_path))[0].gpus == ("GPU-dd",)
    with pytest.raises(PoolBusyError, match="GPU-aa does not answer"):
        pools.acquire([PoolSpec("training", 1)], Owner("other", tmp_path))
    pools.release("run")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert visible_gpus() == ("GPU-cc",)
    assert named_by_position(["GPU-dd"]) == {}


def test_where_all_gpus_are_lost_nothing_is_leased(
    cards: list[Card], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def lost(_index: int) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lost)
    with pytest.raises(Refusal, match="this machine's GPUs do not answer"):
        LocalPools(("GPU-aa",), tmp_path).acquire([PoolSpec("training", 1)], Owner("run", tmp_path))


def test_a_driver_that_does_not_fit_its_kernel_module_is_named_where_gpus_are_wanted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def mismatch() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", mismatch)
    for permitted in ("", "GPU-aa"):
        monkeypatch.setenv("DRAFTSMITH_GPUS", permitted)
        pools = LocalPools(locks=tmp_path / "locks")
        pools.acquire([PoolSpec("training", 0)], Owner("on the CPU", tmp_path))
        with pytest.raises(Refusal, match=r"GPUs do not answer \(.*mismatch\.\).*upgrade of NVIDIA's driver"):
            pools.acquire([PoolSpec("training", 1)], Owner("run", tmp_path))


def test_slices_are_leased_in_place_of_their_gpu(
    cards: list[Card], slices: tuple[Card, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert visible_gpus()[:4] == ("MIG-11", "MIG-22", "MIG-33", "GPU-bb")
    found = read_gpus()
    assert found is not None
    assert "MIG is on: 3 slices can be leased, each by one process" in devices.gpus(found)[0].found
    for variable in ("CUDA_VISIBLE_DEVICES", "DRAFTSMITH_GPUS"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "0")
            assert LocalPools().gpus == ("MIG-11", "MIG-22", "MIG-33")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-11,MIG-2,MIG-33")
    pools = LocalPools(locks=tmp_path / "locks")
    (pool,) = pools.acquire([PoolSpec("inference", 2, parts=2)], Owner("run", tmp_path))
    assert pool.gpus == ("MIG-22", "MIG-33")
    pools.release("run")
    with pytest.raises(Refusal, match=r"training_gpus=2: a process can use one MIG slice only: set it to 1"):
        pools.acquire([PoolSpec("training", 2)], Owner("run", tmp_path))


def test_a_gpu_with_mig_and_no_slice_is_not_leased(
    cards: list[Card], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CUDA cannot use it, and only root may read its memory."""
    readable = pynvml.nvmlDeviceGetMemoryInfo

    def others_only(card: Card, version: int = 0) -> object:
        if card is cards[0]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return readable(card, version)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMigMode", lambda card: (int(card is cards[0]),) * 2)
    for memory_info in (readable, others_only):
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", memory_info)
        found = read_gpus()
        assert found is not None
        assert "MIG is on without a slice" in devices.gpus(found)[0].found
        assert [gpu.uuid for gpu in found.devices] == list(visible_gpus()) == ["GPU-bb", "GPU-cc", "GPU-dd"]
        with pytest.raises(Refusal, match=r"this machine has 3; GPU-aa has MIG and no slice: lower"):
            LocalPools(locks=tmp_path).check([PoolSpec("training", 4)])


def test_a_gpu_whose_compute_mode_prohibits_its_use_is_left_alone(
    cards: list[Card], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    modes = [pynvml.NVML_COMPUTEMODE_PROHIBITED, 0, 0, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS]
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeMode", lambda card: modes[cards.index(card)], raising=False)
    found = read_gpus()
    assert found is not None
    assert [gpu.most_processes for gpu in found.gpus] == [0, None, None, 1]
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    (tmp_path / "control").touch()  # NVIDIA's MPS is the one process
    shared = read_gpus()
    assert shared is not None
    assert [gpu.most_processes for gpu in shared.gpus] == [0, None, None, None]
    with pytest.raises(PoolBusyError, match="GPU-aa has the compute mode Prohibited"):
        LocalPools(locks=tmp_path).acquire([PoolSpec("training", 2)], Owner("run", tmp_path))


def test_memory_that_the_driver_keeps_is_not_in_use(cards: list[Card], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards[0], "used", 700 * 2**20)  # a display; with what the driver keeps it is over 1 GiB
    found = read_gpus()
    assert found is not None
    assert found.gpus[0].held is None
    monkeypatch.setenv("DRAFTSMITH_GPU_IGNORED_MIB", "512")
    assert found.gpus[0].held == "processes that cannot be seen from here (700 MiB)"
    assert found.gpus[2].held == "processes that cannot be seen from here (5 GiB)"
    monkeypatch.setenv("DRAFTSMITH_GPU_IGNORED_MIB", str(30 * 1024))
    assert [gpu.held for gpu in found.gpus] == [None] * 4


def test_memory_by_a_driver_that_knows_the_first_call_only(cards: list[Card], monkeypatch: pytest.MonkeyPatch) -> None:
    second = pynvml.nvmlDeviceGetMemoryInfo

    def first_only(card: Card, version: int = 0) -> object:
        if version:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return second(card)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", first_only)
    found = read_gpus()
    assert found is not None
    assert (found.gpus[0].held, found.gpus[0].reserved) == (None, 0)


def test_a_gpu_without_memory_of_its_own_has_the_machines(cards: list[Card], monkeypatch: pytest.MonkeyPatch) -> None:
    def not_supported(_card: Card, version: int = 0) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", not_supported)
    found = read_gpus()
    assert found is not None
    assert {(gpu.total, gpu.unified) for gpu in found.gpus} == {(memory(), True)}
    assert [gpu.held for gpu in found.gpus] == [None, "process 4000000 (29 GiB)", None, None]
    assert found.gpus[0].free == memory()


def test_a_divided_gpu_whose_memory_only_root_may_read(
    cards: list[Card], slices: tuple[Card, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    readable = pynvml.nvmlDeviceGetMemoryInfo

    def of_slices_only(card: Card, version: int = 0) -> object:
        if card is cards[0]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return readable(card, version)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", of_slices_only)
    found = read_gpus()
    assert found is not None
    assert (found.gpus[0].uuid, found.gpus[0].total) == ("GPU-aa", 3 * 80 * GIB)


def test_whole_gpus_are_named_by_position(cards: list[Card], monkeypatch: pytest.MonkeyPatch) -> None:
    by_position = {"CUDA_VISIBLE_DEVICES": "2,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert named_by_position(["GPU-cc", "GPU-aa"]) == by_position
    assert named_by_position([]) == {}
    assert named_by_position(["MIG-1"]) == {}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(cards) + 1)
    handle = pynvml.nvmlDeviceGetHandleByIndex

    def hidden(index: int) -> Card:
        if index == len(cards):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return handle(index)  # type: ignore[return-value]

    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", hidden)
    assert named_by_position(["GPU-aa"]) == {}
