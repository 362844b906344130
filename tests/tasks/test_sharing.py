"""How generators and trainer share a machine: chosen from what the machine has, refused where it cannot be."""

import json
import os
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from flows.plan_command import print_plan
from infra.config import TransportConfig
from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.planner.page import plan_page
from infra.planner.refusals import refusals
from infra.planner.sharing import choose_sharing
from infra.planner.split import advice
from infra.records.data_path import SamplesRecord, TargetRecord
from infra.records.sharing import Sharing, SharingMode
from infra.refusal import Refusal
from infra.transport.choice import NoRoomError, objects_folder, open_transport, run_memory_folder
from infra.transport.files import FileTransport
from models.config.division import check_division
from models.config.recipe import as_recipe, load_recipe
from models.config.target_settings import completed
from tasks.division import division
from tasks.plan import check_gpus, checked_plan, on_this_machine, plan_recipe
from tasks.pools import leased_specs
from tasks.prepare import decide_sharing, plan_run
from tasks.run import OpenRun

RECIPES = Path(__file__).parents[2] / "recipes"
ONE = RECIPES / "one-gpu-80gb.yaml"
EPOCH = 10 * 2**30
DISK = SimpleNamespace(total=2 * 2**40, used=2**40, free=2**40)
"""Beside those GPUs, whatever this machine has."""

Machine = Callable[[str, int, int], None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Makes NVML say that this machine has GPUs: `machine("NVIDIA H100", count, memory_gib)`."""

    def become(name: str, count: int, memory_gib: int) -> None:
        total = memory_gib * 2**30

        def not_supported(*_: object) -> None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

        answers: dict[str, Callable[..., object]] = {
            "Init": lambda: None,
            "Shutdown": lambda: None,
            "SystemGetDriverVersion": lambda: "580.1",
            "SystemGetCudaDriverVersion_v2": lambda: 13000,
            "DeviceGetCount": lambda: count,
            "DeviceGetHandleByIndex": lambda index: index,
            "DeviceGetHandleByUUID": lambda uuid: int(uuid.removeprefix("GPU-")),
            "DeviceGetUUID": lambda index: f"GPU-{index}",
            "DeviceGetName": lambda _index: name,
            "DeviceGetMemoryInfo": lambda *_, **__: SimpleNamespace(total=total, free=total, used=0, reserved=0),
            "DeviceGetCudaComputeCapability": lambda _index: (9, 0),
            "DeviceGetMigMode": not_supported,
            "DeviceGetDeviceHandleFromMigDeviceHandle": not_supported,
            "DeviceGetPciInfo": lambda index: SimpleNamespace(busId=f"00000000:{index:02x}:00.0"),
            "DeviceGetTopologyCommonAncestor": lambda *_: pynvml.NVML_TOPOLOGY_SYSTEM,
            "DeviceGetP2PStatus": lambda *_: pynvml.NVML_P2P_STATUS_OK + 1,
            "DeviceGetComputeRunningProcesses": lambda _index: [],
        }
        for function, answer in answers.items():
            monkeypatch.setattr(pynvml, f"nvml{function}", answer)
        monkeypatch.setattr("shutil.disk_usage", lambda _place: DISK)
        if count:
            monkeypatch.setattr("tasks.plan.memory", lambda: 2 * (count + 1) * total)

    return become


@pytest.mark.parametrize(
    ("recipe", "gpu", "count", "memory_gib", "mode"),
    [
        ("one-gpu-24gb", "NVIDIA GeForce RTX 4090", 1, 24, "alternate"),
        ("one-gpu-24gb", "NVIDIA GeForce RTX 4090", 2, 24, "apart"),
        ("one-gpu-24gb", "NVIDIA H100 80GB HBM3", 1, 80, "share"),
        ("one-gpu-80gb", "NVIDIA H100 80GB HBM3", 1, 80, "share"),
        ("one-gpu-80gb", "NVIDIA GeForce RTX 5090", 1, 32, "alternate"),
        ("two-gpus", "NVIDIA H100 80GB HBM3", 2, 80, "apart"),
        ("two-gpus", "NVIDIA H100 80GB HBM3", 1, 80, "share"),
        ("qwen3-8b", "NVIDIA H200", 8, 141, "apart"),
        ("quickstart", "", 0, 0, "apart"),
        ("tiny", "", 0, 0, "apart"),
    ],
)
def test_every_recipe_passes_the_plan_of_its_hardware(
    machine: Machine, recipe: str, gpu: str, count: int, memory_gib: int, mode: str
) -> None:
    machine(gpu, count, memory_gib)
    plan = checked_plan(on_this_machine(load_recipe(RECIPES / f"{recipe}.yaml")))
    assert plan.job.sharing == mode
    assert plan.job.memory_bytes == memory_gib * 2**30 or not count
    assert f"**Sharing**: {mode}: " in plan_page(plan)


@pytest.mark.parametrize(("count", "mode"), [(1, "share"), (2, "apart")])
def test_make_quickstart_uses_a_gpu_where_there_is_one(machine: Machine, tmp_path: Path, count: int, mode: str) -> None:
    assert not quickstart_overrides(tmp_path, "exit 9")
    on_gpu = quickstart_overrides(tmp_path, "echo 580.65.06")
    machine("NVIDIA L4", count, 23)
    plan = checked_plan(on_this_machine(load_recipe(RECIPES / "quickstart.yaml", on_gpu)))
    assert plan.job.sharing == mode


def quickstart_overrides(folder: Path, nvidia_smi: str) -> list[str]:
    """What `make quickstart` adds to its recipe where nvidia-smi does this."""
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{nvidia_smi}\n")
    (folder / "nvidia-smi").chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["make", "--dry-run", "quickstart"]
    made = subprocess.check_output(command, cwd=RECIPES.parent, env=environment, text=True, timeout=300)
    (line,) = (line for line in made.splitlines() if "recipes/quickstart.yaml" in line)
    return line.split("recipes/quickstart.yaml")[1].split()


@pytest.mark.parametrize("recipe", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_every_recipe_can_be_planned_without_its_hardware(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    print_plan(load_recipe(RECIPES / f"{recipe}.yaml"))
    assert "Sharing: " in capsys.readouterr().out


def test_the_node_has_the_split_that_the_plan_finds() -> None:
    plan = plan_recipe(load_recipe(RECIPES / "qwen3-8b.yaml"))
    assert plan.best == plan.present


def test_a_machine_whose_gpus_are_not_in_the_table_is_planned_with_its_own_memory(machine: Machine) -> None:
    machine("NVIDIA RTX 6000 Ada Generation", 1, 48)
    job = plan_recipe(on_this_machine(load_recipe(ONE))).job
    assert job.memory_bytes == 48 * 2**30
    assert [note for note in job.assumptions if "with the speed and price of an H100" in note]


def test_a_gpu_that_one_process_at_a_time_may_use_is_used_by_turns(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("NVIDIA H100 80GB HBM3", 1, 80)
    exclusive = pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeMode", lambda _gpu: exclusive)
    job = plan_recipe(on_this_machine(load_recipe(ONE))).job
    assert (job.sharing, "Exclusive Process" in job.sharing_why) == ("alternate", True)
    with pytest.raises(Refusal, match=r"Exclusive Process .*nearest possible recipe: pools\.sharing=alternate"):
        checked_plan(on_this_machine(load_recipe(ONE, ["pools.sharing=share"])))


def test_the_memory_of_a_machine_that_its_gpu_shares_is_planned_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_supported(*_: object, **__: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    machine("NVIDIA GB10", 1, 128)
    assert not plan_recipe(on_this_machine(load_recipe(ONE))).job.unified
    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", not_supported)
    for place in ("infra.pools.gpus.memory", "tasks.plan.memory"):
        monkeypatch.setattr(place, lambda: 128 * 2**30)
    job = plan_recipe(on_this_machine(load_recipe(ONE))).job
    assert (job.memory_bytes, job.host_bytes, job.unified) == (128 * 2**30, 128 * 2**30, True)


def test_turns_take_the_time_of_both_sides_and_of_every_switch() -> None:
    plan = plan_recipe(load_recipe(ONE, ["pools.sharing=alternate", "transport.round_mib=16384"]))
    sample_s = 1 / plan.present.inference + 1 / plan.present.training
    assert plan.present.samples_per_s == pytest.approx(1 / sample_s)
    assert plan.job.rounds == -(-50_000 * 1200 * 32 * 2**10 // 2**34)
    assert plan.seconds == pytest.approx(50_000 * sample_s + 90 * plan.job.rounds)
    assert plan.job.devices == 1


def test_what_cannot_be_shared_is_refused_with_a_choice_that_works(machine: Machine, tmp_path: Path) -> None:
    machine("NVIDIA GeForce RTX 4090", 1, 24)
    recipe = RECIPES / "one-gpu-24gb.yaml"
    with pytest.raises(Refusal, match=r"pools.sharing=apart wants 1 \+ 1 GPUs, and this machine has 1: set .*=auto"):
        plan_recipe(on_this_machine(load_recipe(recipe, ["pools.sharing=apart"])))
    together = on_this_machine(load_recipe(recipe, ["pools.sharing=share"]))
    plan = plan_recipe(together)
    (obstacle,) = refusals(plan)
    assert obstacle.overrides == ("pools.sharing=alternate",)
    with pytest.raises(Refusal, match=r"cannot share a GPU:\n.*nearest possible recipe: pools\.sharing=alternate"):
        decide_sharing(together, RunFolder(tmp_path), plan, EPOCH, 0)
    with pytest.raises(Refusal, match=r"pools\.sharing=share is for the GPUs of one machine"):
        load_recipe(recipe, ["pools.sharing=share", "pools.kind=slurm", "transport.kind=mooncake"])
    with pytest.raises(Refusal, match="divides the memory of GPUs"):
        load_recipe(RECIPES / "tiny.yaml", ["pools.sharing=share"])


@pytest.mark.parametrize(
    ("pools", "sharing", "refused"),
    [
        (
            (4, 1),
            "auto",
            r"the inference pool wants 4 GPUs and the training pool wants 1 GPUs and this machine has 1: ",
        ),
        ((2, 2), "alternate", r"^the inference pool wants 2 GPUs and this machine has 1: lower pools.inference_gpus, "),
        ((2, 0), "auto", r"wants 2 GPUs .* this machine has 1"),
        ((1, 1), "auto", None),
        ((1, 1), "apart", r"pools.sharing=apart wants 1 \+ 1 GPUs, and this machine has 1"),
    ],
)
def test_more_gpus_than_this_machine_has_are_refused_by_the_plan(
    machine: Machine, pools: tuple[int, int], sharing: str, refused: str | None
) -> None:
    """As the lease would, unless the plan is for another machine."""
    machine("NVIDIA GeForce RTX 4090", 1, 24)
    settings = [f"pools.inference_gpus={pools[0]}", f"pools.training_gpus={pools[1]}", f"pools.sharing={sharing}"]
    recipe = load_recipe(RECIPES / "one-gpu-24gb.yaml", settings)
    own = recipe.model_copy(update={"plan": recipe.plan.model_copy(update={"gpus": None, "device": None})})
    for config in (own, on_this_machine(recipe)):
        with pytest.raises(Refusal, match=refused) if refused else nullcontext():
            check_gpus(config)
    with pytest.raises(Refusal, match=refused) if refused else nullcontext():
        checked_plan(own)
    check_gpus(recipe)


def test_mistyped_names_of_gpus_are_refused_by_the_plan(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("NVIDIA GeForce RTX 4090", 1, 24)
    monkeypatch.setenv("DRAFTSMITH_GPUS", "GPU-mistyped")
    recipe = load_recipe(RECIPES / "one-gpu-24gb.yaml")
    own = recipe.model_copy(update={"plan": recipe.plan.model_copy(update={"gpus": None, "device": None})})
    with pytest.raises(Refusal, match="GPU-mistyped: no GPU of this machine has this name"):
        check_gpus(own)
    with pytest.raises(Refusal, match="GPU-mistyped: no GPU of this machine has this name"):
        check_gpus(on_this_machine(recipe))
    check_gpus(recipe)  # planned for another machine
    check_gpus(on_this_machine(load_recipe(RECIPES / "tiny.yaml")))


def test_a_broken_driver_stops_only_what_uses_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def mismatch() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", mismatch)
    monkeypatch.setenv("DRAFTSMITH_GPUS", "0")
    assert on_this_machine(load_recipe(RECIPES / "tiny.yaml")).plan.device is None
    with pytest.raises(Refusal, match="this machine's GPUs do not answer"):
        on_this_machine(load_recipe(ONE))
    given = ["plan.gpus=null", "plan.device=null", "pools.kind=slurm", "transport.kind=mooncake"]
    assert "assumed (plan.device)" in plan_recipe(load_recipe(RECIPES / "two-gpus.yaml", given)).job.assumptions[0]


def test_a_run_that_wants_more_gpus_ends_when_it_is_planned(
    machine: Machine, run: OpenRun, samples: SamplesRecord
) -> None:
    machine("NVIDIA GeForce RTX 4090", 1, 24)
    config = load_recipe(RECIPES / "one-gpu-24gb.yaml", ["pools.inference_gpus=4"])
    target = TargetRecord.model_construct(path="/nowhere")
    with pytest.raises(Refusal, match=r"wants 4 GPUs .* this machine has 1"):
        plan_run.fn(OpenRun(config, run.folder, run.owner), target, samples)


@pytest.mark.parametrize(
    ("gpus", "generators", "overrides", "otherwise"),
    [
        (1, 1, (), "this machine has 1 GPU: choose a smaller or quantized target"),
        (4, 1, ("generator.engine=sglang", "pools.inference_gpus=4"), ""),
        (4, 2, ("generator.engine=sglang", "pools.inference_gpus=4", "generator.count=1"), ""),
    ],
)
def test_no_remedy_wants_more_gpus_than_this_machine_has(
    machine: Machine, gpus: int, generators: int, overrides: tuple[str, ...], otherwise: str
) -> None:
    machine("NVIDIA GeForce RTX 4090", gpus, 24)
    settings = ["plan.target.parameters=20000000000", f"generator.count={generators}"]
    settings.append(f"pools.inference_gpus={generators}")
    config = on_this_machine(load_recipe(RECIPES / "one-gpu-24gb.yaml", settings))
    (obstacle,) = refusals(plan_recipe(config))
    assert (obstacle.overrides, obstacle.otherwise) == (overrides, otherwise)


def test_nobody_knows_the_target_and_turns_are_safe() -> None:
    mode, why = choose_sharing(load_recipe(ONE).pools, 1, None)
    assert mode == "alternate"
    assert "the target's shape is unknown" in why


@pytest.mark.parametrize(("gpus", "idle"), [(7, "3 of them stay idle"), (4, None)])
def test_gpus_that_stay_idle_where_others_are_shared_are_told(gpus: int, idle: str | None) -> None:
    """As on a node with eight that has lost one."""
    mode, why = choose_sharing(load_recipe(RECIPES / "qwen3-8b.yaml").pools, gpus, None)
    assert mode == "alternate"
    assert idle in why if idle else "idle" not in why


def test_memory_is_divided_between_generator_and_trainer(machine: Machine, tmp_path: Path) -> None:
    machine("NVIDIA H100 80GB HBM3", 1, 80)
    config = on_this_machine(load_recipe(ONE))
    plan = plan_recipe(config)
    sharing = decide_sharing(config, RunFolder(tmp_path), plan, EPOCH, 2**30)
    assert sharing.generator_bytes is not None
    assert sharing.trainer_bytes is not None
    assert sharing.generator_bytes + sharing.trainer_bytes == 80 * 2**30
    assert sharing.generator_bytes > plan.target_bytes
    assert sharing.trainer_bytes > plan.memory.total
    assert sharing.budget_bytes == 2**30


def test_a_round_takes_an_epoch_or_half_of_the_disk_and_stays_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=4 * 2**30))
    config = load_recipe(ONE, ["pools.sharing=alternate"])
    folder = RunFolder(tmp_path)
    assert decide_sharing(config, folder, None, EPOCH, 0).budget_bytes == 2 * 2**30
    assert decide_sharing(config, folder, None, 2**30, 0).budget_bytes == 2**30
    with pytest.raises(NoRoomError, match=r"has 4 GiB free, .* fewer checkpoints \(training\.keep_checkpoints\)"):
        plan_recipe(config)
    apart = load_recipe(ONE, ["pools.sharing=apart", "plan.gpus=2"])
    checkpoints = 4 * plan_recipe(apart).checkpoint_bytes  # two are kept, one is written, and the export
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=12 * 2**30 + checkpoints))
    assert decide_sharing(config, folder, plan_recipe(config), EPOCH, 0).budget_bytes == 6 * 2**30
    given = load_recipe(ONE, ["pools.sharing=alternate", "transport.round_mib=3072"])
    sharing = decide_sharing(given, folder, plan_recipe(given), EPOCH, 0)
    assert sharing.budget_bytes == 3 * 2**30
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=4 * 2**30))
    too_much = load_recipe(ONE, ["pools.sharing=alternate", "transport.round_mib=5120"])
    with pytest.raises(Refusal, match=r"round_mib=5120: .* has 4096 MiB free"):
        decide_sharing(too_much, folder, None, EPOCH, 0)
    folder.sharing.write_text(sharing.model_dump_json())
    assert decide_sharing(config, folder, None, EPOCH, 0).budget_bytes == 3 * 2**30


@pytest.mark.parametrize(("free_gib", "round_gib"), [(4, 2), (1, 1)])
def test_a_run_that_had_two_pools_and_now_takes_turns_has_rounds_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_gib: int, round_gib: int
) -> None:
    """Its store in memory was for what is in flight. The ledger's budget may grow, and never shrinks."""
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=free_gib * 2**30))
    folder = RunFolder(tmp_path)
    write_atomically(folder.sharing, Sharing(mode="apart", why="", budget_bytes=2**30))
    sharing = decide_sharing(load_recipe(ONE, ["pools.sharing=alternate"]), folder, None, EPOCH, 0)
    assert (sharing.budget_bytes, sharing.on_disk) == (round_gib * 2**30, True)


def test_the_store_is_as_large_as_what_is_in_flight_and_lies_on_disk_where_memory_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared memory has room for the usual budget, and not for this target's samples."""
    monkeypatch.setenv("DRAFTSMITH_SHM", str(tmp_path))
    blocks = SimpleNamespace(f_frsize=2**20, f_bavail=2 * 1024)
    monkeypatch.setattr("os.statvfs", lambda _path: blocks)
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    config = load_recipe(RECIPES / "tiny.yaml", ["transport.budget_mib=null"])
    assert decide_sharing(config, run, None, EPOCH, 2**20).on_disk, "its owner found no room for the least"
    run_memory_folder(run).mkdir()  # its owner took it before the target was known
    assert decide_sharing(config, run, None, EPOCH, 2**20) == Sharing(
        mode="apart", why="no GPUs to share", budget_bytes=512 * 2**20
    )
    assert objects_folder(config.transport, run) == run_memory_folder(run) / "objects"
    large = decide_sharing(config, run, None, EPOCH, 3 * 2**30)
    assert (large.budget_bytes, large.on_disk) == (3 * 2**30, True)
    write_atomically(run.sharing, large)
    assert isinstance(open_transport(config.transport, run), FileTransport)
    blocks.f_bavail = 4 * 1024
    assert decide_sharing(config, run, None, EPOCH, 2**20).budget_bytes == 3 * 2**30, "which its ledger knows"
    assert decide_sharing(config, run, None, EPOCH, 5 * 2**30).budget_bytes == 5 * 2**30, "resumed with more generators"
    run.sharing.unlink()
    assert not decide_sharing(config, run, None, EPOCH, 3 * 2**30).on_disk


@pytest.mark.parametrize("changes", [["transport.budget_mib=3072"], ["transport.budget_mib=null"]])
@pytest.mark.parametrize("resumed", [False, True])
def test_all_processes_of_a_run_look_in_one_place_though_another_run_frees_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str], resumed: bool
) -> None:
    monkeypatch.setenv("DRAFTSMITH_SHM", str(tmp_path))
    blocks = SimpleNamespace(f_frsize=2**20, f_bavail=2 * 1024)
    monkeypatch.setattr("os.statvfs", lambda _path: blocks)
    run, config = RunFolder(tmp_path / "run"), load_recipe(RECIPES / "tiny.yaml", changes)
    run.path.mkdir()
    run_memory_folder(run).mkdir()
    if resumed:  # there was enough of it then
        write_atomically(run.sharing, Sharing(mode="apart", why="", budget_bytes=3 * 2**30))
    write_atomically(run.sharing, decide_sharing(config, run, None, EPOCH, 3 * 2**30))
    run_memory_folder(run).rmdir()
    blocks.f_bavail = 8 * 1024
    assert objects_folder(config.transport, run) == run.path / "objects"


def shape(folder: Path, layers: int, hidden: int, **others: object) -> str:
    """A target's folder, of which only the shape is known."""
    folder.mkdir()
    settings = {"num_hidden_layers": layers, "hidden_size": hidden, "vocab_size": 128_256, "num_attention_heads": 64}
    settings |= {"num_key_value_heads": 8, "intermediate_size": 7 * hidden // 2, "head_dim": 128, "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(settings | others))
    return str(folder)


@pytest.mark.parametrize(
    ("layers", "gpus", "pools", "generators"),
    [
        (16, 0, (0, 0), 1), (16, 1, (1, 1), 1), (16, 2, (1, 1), 1), (16, 8, (2, 4), 2),
        (80, 2, (2, 2), 1), (80, 4, (2, 1), 1), (80, 8, (6, 2), 3), (80, 3, (2, 1), 1),
    ],
)  # fmt: skip
def test_a_recipe_is_written_for_the_gpus_of_this_machine(
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layers: int,
    gpus: int,
    pools: tuple[int, int],
    generators: int,
) -> None:
    """A generator holds the target, nothing is refused, and the plan knows no better division."""
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=2**40))
    if gpus:
        machine("NVIDIA H100 80GB HBM3", gpus, 80)
    target = shape(tmp_path / "target", layers, 8192)
    tree = {"name": "x", "target": {"name": target}, "data": {"source": "python-docs"}}
    found, why = division(tree)
    assert bool(why) == bool(gpus)
    config = as_recipe(tree | found, "here")
    assert (config.pools.inference_gpus, config.pools.training_gpus, config.generator.count) == (*pools, generators)
    if gpus:
        plan = checked_plan(config)
        assert pools == (gpus, gpus) or advice(plan.sides, plan.present, "GPU").startswith("no other")


@pytest.mark.parametrize(
    ("gpus", "changes", "fitting"),
    [
        (6, {}, "1, 2 or 4"), (8, {}, None), (7, {"count": 7}, None), (6, {"count": 2}, "1, 2 or 4"),
        (12, {"sglang": {"attention_data_parallel": 2}}, "2, 4 or 8"), (6, {"engine": "transformers"}, None),
        (6, {"sglang": {"data_parallel": 3}}, None), (4, {"sglang": {"tensor_parallel": 3}}, "1, 2 or 4"),
    ],
)  # fmt: skip
def test_gpus_that_do_not_divide_the_target_s_heads_are_refused_before_they_are_taken(
    machine: Machine, tmp_path: Path, gpus: int, changes: dict, fitting: str | None
) -> None:
    """The target has 64 heads, 8 of them with keys and values."""
    machine("NVIDIA H100 80GB HBM3", gpus + 1, 80)
    refused = fitting and rf"64 attention heads \(8 of keys and values\) .* give a copy {fitting}"
    check_plan(shape(tmp_path / "target", 16, 8192), gpus, changes, refused)


def check_plan(target: str, gpus: int, generator: dict, refused: str | None) -> None:
    """A recipe with these GPUs for generators, and one to train, is planned, or refused with these words."""
    tree = {"name": "x", "target": {"name": target}, "data": {"source": "python-docs"}, "generator": generator}
    config = as_recipe(tree | {"pools": {"inference_gpus": gpus, "training_gpus": 1}}, "here")
    with pytest.raises(Refusal, match=refused) if refused else nullcontext():
        checked_plan(config)


@pytest.mark.parametrize(("hidden", "layers", "micro_batches"), [(5120, 40, 2), (5120, 64, 8)])
def test_a_written_recipe_trains_steps_that_the_gpu_holds(
    machine: Machine, tmp_path: Path, hidden: int, layers: int, micro_batches: int
) -> None:
    """As of Qwen3-14B-AWQ and Qwen3-32B-AWQ on a card of 24 GB, with 8 samples per step."""
    machine("NVIDIA GeForce RTX 4090", 1, 24)
    width = {40: 17408, 64: 25600}[layers]
    quantized = {"quantization_config": {"quant_method": "awq", "bits": 4}, "vocab_size": 151_936}
    target = shape(tmp_path / "target", layers, hidden, intermediate_size=width, **quantized)
    tree = completed({"name": "x", "target": {"name": target}, "data": {"source": "python-docs"}})
    found, why = division(tree)
    assert f"training.micro_batches={micro_batches}" in why
    assert ("generator.sglang.memory_fraction=" in why) == (layers == 64), "its weights exceed SGLang's own share"
    config = as_recipe(tree | found, "here")
    assert config.training.micro_batches == micro_batches
    assert config.data.source == "python-docs"
    checked_plan(config)


def test_a_written_recipe_says_which_gpus_it_leaves_out(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine("NVIDIA H100 80GB HBM3", 4, 80)
    tree = {"name": "x", "target": {"name": shape(tmp_path / "target", 16, 8192)}, "data": {"source": "python-docs"}}
    assert "this machine has" not in division(tree)[1]
    monkeypatch.setenv("DRAFTSMITH_GPUS", "GPU-1,GPU-2")
    assert division(tree)[1].endswith("; this machine has 2 GPUs that $DRAFTSMITH_GPUS=GPU-1,GPU-2 leaves")
    monkeypatch.setenv("DRAFTSMITH_GPUS", "GPU-9")
    with pytest.raises(Refusal, match="GPU-9: no GPU of this machine has this name"):
        division(tree)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert division(tree) == ({}, "")


def test_a_target_of_unknown_shape_gets_a_gpu_for_each_side(machine: Machine, tmp_path: Path) -> None:
    machine("NVIDIA H100 80GB HBM3", 8, 80)
    target = shape(tmp_path / "target", 16, 8192, intermediate_size="wide")
    tree = {"name": "x", "target": {"name": target, "aux_layer_ids": [2]}, "data": {"source": "python-docs"}}
    layer = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 128, "intermediate_size": 512}
    found, why = division(tree | {"draft": {"method": "eagle3"} | layer})
    assert found == {"pools": {"inference_gpus": 1, "training_gpus": 1}}
    assert "because there is no plan: the config.json of" in why


def test_heads_that_differ_by_layer_are_left_to_sglang(machine: Machine, tmp_path: Path) -> None:
    machine("NVIDIA H100 80GB HBM3", 4, 80)
    target = shape(tmp_path / "target", 16, 8192)
    tree = {"name": "x", "target": {"name": target}, "data": {"source": "python-docs"}}
    config = as_recipe(tree | {"pools": {"inference_gpus": 3, "training_gpus": 1}}, "here")
    check_division(config, {"num_attention_heads": [8, 12], "num_key_value_heads": [2, 3]})


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


@pytest.mark.parametrize(
    ("width", "gpus", "parts", "fitting"),
    [(1536, 4, 1, None), (1536, 8, 1, "1, 2 or 4"), (1536, 8, 2, None), (768, 4, 1, "1 or 2"), (768, 2, 1, None)],
)
def test_fp8_blocks_that_gpus_would_cut_are_refused(
    machine: Machine, tmp_path: Path, width: int, gpus: int, parts: int, fitting: str | None
) -> None:
    """As of Qwen3-235B-A22B-FP8 on eight GPUs, and of Qwen3-30B-A3B-FP8 on four."""
    machine("NVIDIA H100 80GB HBM3", gpus + 1, 80)
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": width}
    target = shape(tmp_path / "target", 16, 4096, quantization_config=FP8, model_type="qwen3_moe", **experts)
    refused = fitting and rf"layers of {width} in blocks of 128 among .* give a copy {fitting} .*expert_parallel"
    check_plan(target, gpus, {"sglang": {"expert_parallel": parts}}, refused)


@pytest.mark.parametrize(("mode", "leased"), [("apart", [1, 2]), ("alternate", [2]), ("share", [2])])
def test_roles_that_share_devices_lease_the_larger_pool(run: OpenRun, mode: SharingMode, leased: list[int]) -> None:
    config = load_recipe(RECIPES / "tiny.yaml", ["pools.inference_gpus=1", "pools.training_gpus=2", "training.ranks=2"])
    opened = OpenRun(config, run.folder, run.owner)
    run.folder.sharing.write_text(Sharing(mode=mode, why="", budget_bytes=1).model_dump_json())
    assert [spec.gpus for spec in leased_specs(opened, ("inference", "training"))] == leased
    assert [spec.gpus for spec in leased_specs(opened, ("inference",))] == [1]


def test_a_round_is_in_files_and_stays_there_when_the_run_is_resumed_with_two_pools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_SHM", "/dev/shm")
    run, config = RunFolder(tmp_path), TransportConfig(budget_mib=1)
    recipe = load_recipe(ONE, ["pools.sharing=alternate"])
    write_atomically(run.sharing, decide_sharing(recipe, run, None, 2**30, 0))
    assert objects_folder(config, run) == tmp_path / "objects"
    write_atomically(run.sharing, decide_sharing(load_recipe(ONE, ["plan.gpus=2"]), run, None, 2**30, 0))
    assert objects_folder(config, run) == tmp_path / "objects"
    run.sharing.unlink()
    in_memory = load_recipe(ONE, ["pools.sharing=alternate", "transport.kind=mooncake", "transport.address=auto"])
    write_atomically(run.sharing, decide_sharing(in_memory, run, None, 2**30, 0))
    assert objects_folder(TransportConfig(kind="mooncake"), run).is_relative_to("/dev/shm")
    write_atomically(run.sharing, Sharing(mode="apart", why="", budget_bytes=2**20))
    assert objects_folder(config, run).is_relative_to("/dev/shm")
