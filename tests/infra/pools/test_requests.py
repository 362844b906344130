"""Arithmetic of parts and machines, and what Slurm's commands are read as."""

import itertools
import random
from pathlib import Path

import pytest

from infra.config import PoolsConfig, SlurmConfig
from infra.pools import engine, slurm_job
from infra.pools.base import PoolSpec
from infra.pools.engine import Machine, Part, Request, fit, refuse_what_never_fits
from infra.pools.queued import divide
from infra.pools.slurm_engine import dry_run
from infra.pools.slurm_job import Node

CONFIG = PoolsConfig(kind="slurm", cores_per_gpu=2, cores=3)
BIG, SMALL = Machine(gpus=8, cores=64), Machine(gpus=2, cores=8)


def request(*specs: PoolSpec) -> Request:
    return Request(owner="run", folder="/runs/run/logs", pools=divide(specs, CONFIG))


@pytest.mark.parametrize(
    ("spec", "shares", "cores"),
    [
        (PoolSpec("training", 7), [7], [14]),
        (PoolSpec("inference", 4, parts=2), [2, 2], [4, 4]),
        (PoolSpec("inference", 3, parts=2), [2, 1], [4, 2]),
        (PoolSpec("inference", 1, parts=3), [1], [2]),
        (PoolSpec("inference", 0, parts=2), [0, 0], [3, 3]),
    ],
)
def test_a_pool_is_dealt_out_to_those_who_share_it(spec: PoolSpec, shares: list[int], cores: list[int]) -> None:
    (parts,) = divide([spec], CONFIG)
    assert ([part.gpus for part in parts], [part.cores for part in parts]) == (shares, cores)


def test_parts_fit_side_by_side_or_they_do_not() -> None:
    pools = request(PoolSpec("inference", 6, parts=3), PoolSpec("training", 2))
    assert fit(pools.parts, [BIG])
    assert fit(pools.parts, [SMALL] * 4)
    assert not fit(pools.parts, [SMALL] * 3)
    with pytest.raises(ValueError, match=r"8 GPUs and 16 cores in 4 parts.*3 machines with 6 GPUs"):
        refuse_what_never_fits(pools, [SMALL] * 3, "the cluster")
    with pytest.raises(ValueError, match=r"training pool wants 9 GPUs and 18 cores on one machine.*at most 8 GPUs"):
        refuse_what_never_fits(request(PoolSpec("training", 9)), [BIG] * 4, "the cluster")


ONE = Part(role="inference", gpus=1, cores=8)
TRAINER = Part(role="training", gpus=4, cores=16)


@pytest.mark.parametrize(
    ("parts", "machines", "fits"),
    [
        ([ONE] * 112, [BIG] * 13, False),  # too many GPUs
        ([ONE] * 290, [Machine(gpus=8, cores=60)] * 40, False),  # GPUs and cores are enough, but seven fit into each
        ([ONE] * 280, [Machine(gpus=8, cores=60)] * 40, True),
        ([ONE] * 65 + [TRAINER] * 48, [BIG] * 32, False),
        ([ONE] * 64 + [TRAINER] * 48, [BIG] * 32, True),
        ([TRAINER] * 11 + [ONE] * 33, [Machine(gpus=7, cores=64)] * 11, True),
        ([TRAINER] * 15, [Machine(gpus=7, cores=64)] * 14, False),
        ([Part(role="inference", gpus=0, cores=3)] * 600, [BIG] * 28, False),  # 21 fit into each
    ],
)
def test_many_equal_parts_and_machines_are_counted(parts: list[Part], machines: list[Machine], fits: bool) -> None:
    assert fit(parts, machines) == fits


def parts_of(counts: dict[int, int]) -> list[Part]:
    """By the number of GPUs of each."""
    return [Part(role="training", gpus=gpus, cores=gpus) for gpus, count in counts.items() for _ in range(count)]


@pytest.mark.parametrize(
    ("counts", "machines", "fits"),
    [
        ({8: 32, 3: 120, 2: 200}, 128, True),
        ({8: 32, 3: 120, 2: 205}, 128, False),  # more GPUs than there are
        ({4: 150, 3: 120, 2: 5}, 128, False),  # fewer, but on most machines one is left over
        ({6: 64, 5: 48, 3: 48, 2: 64}, 128, True),
        ({6: 17, 5: 16, 3: 5, 2: 5}, 32, False),  # 33 of them want a machine each
    ],
)
def test_parts_of_several_sizes_on_many_machines(counts: dict[int, int], machines: int, fits: bool) -> None:
    assert fit(parts_of(counts), [BIG] * machines) == fits


def test_a_search_that_is_given_up_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MANY_STATES", 1000)
    assert fit(parts_of({6: 17, 5: 16, 3: 5, 2: 5}), [BIG] * 32)


def test_what_only_another_order_places_fits() -> None:
    assert fit(parts_of({4: 1, 3: 2, 2: 3}), [BIG] * 2)


def test_parts_fit_where_any_order_of_placing_them_does() -> None:
    draw = random.Random(7)
    for _ in range(300):
        parts = [Part(role="training", gpus=draw.randrange(4), cores=draw.randrange(1, 5)) for _ in range(4)]
        machines = [Machine(gpus=draw.randrange(6), cores=draw.randrange(2, 9)) for _ in range(3)]
        assert fit(parts, machines) == any(
            all(
                sum(part.gpus for part, place in zip(parts, places, strict=True) if place == index) <= machine.gpus
                and sum(part.cores for part, place in zip(parts, places, strict=True) if place == index)
                <= machine.cores
                for index, machine in enumerate(machines)
            )
            for places in itertools.product(range(3), repeat=4)
        )


def test_a_job_has_one_component_where_one_machine_is_enough_and_one_per_pool_where_not() -> None:
    pools = request(PoolSpec("inference", 4, parts=2), PoolSpec("training", 4))
    (together,) = slurm_job.components(pools, [SMALL, BIG])
    assert (len(together.parts), together.apart) == (3, False)
    four = Machine(gpus=4, cores=16)
    training, inference = slurm_job.components(pools, [four, SMALL, SMALL])
    assert (training.apart, inference.apart) == (False, True)
    with pytest.raises(ValueError, match=r"inference pool wants 4 GPUs on machines of its own.*only 2 machines"):
        slurm_job.components(pools, [Machine(gpus=6, cores=32), SMALL])
    uneven = request(PoolSpec("inference", 5, parts=2), PoolSpec("training", 8))
    with pytest.raises(ValueError, match=r"dealt out as 3, 2.*multiple of generator\.count"):
        slurm_job.components(uneven, [BIG, BIG])


def test_the_script_says_all_that_the_recipe_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # where no Slurm is
    asked = SlurmConfig(partition="gpu", account="us", qos="high", memory_per_core="8G", options=("--constraint=h100",))
    config = PoolsConfig(kind="slurm", slurm=asked)
    text = dry_run("tiny", [PoolSpec("inference", 4, parts=2), PoolSpec("training", 8)], config)
    lines = text.splitlines()
    assert lines.count("#SBATCH hetjob") == 1
    assert lines.count("#SBATCH --no-kill") == lines.count("#SBATCH --no-requeue") == 2
    for option in ("--partition=gpu", "--account=us", "--qos=high", "--mem-per-cpu=8G", "--constraint=h100"):
        assert lines.count(f"#SBATCH {option}") == 2
    assert "#SBATCH --ntasks=2 --cpus-per-task=8 --gpus-per-task=2" in lines
    assert "#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=32 --gres=gpu:8" in lines


JOB = """JobId=11 HetJobId=11 HetJobOffset=0 JobName=draftsmith-x
   JOB_GRES=gpu:h100:6
     Nodes=gpu[08-10] CPU_IDs=0-3,64 Mem=0 GRES=gpu:h100:2(IDX:0,3)
     Nodes=big CPU_IDs=0 Mem=0 GRES=

JobId=12 HetJobId=11 HetJobOffset=1 JobName=draftsmith-x
     Nodes=n7 CPU_IDs=2-3 Mem=1024 GRES=gpu:1(IDX:6),shard:0
"""


def test_what_slurm_prints_is_understood() -> None:
    first, second = slurm_job.nodes(JOB)
    named = [Node(name=name, cores=5, gpus=("0", "3")) for name in ("gpu08", "gpu09", "gpu10")]
    assert first == [*named, Node(name="big", cores=1, gpus=())]
    assert second == [Node(name="n7", cores=2, gpus=("6",))]
    shown = "n1|64|gpu:h100:8(S:0-1)\nn1|64|gpu:h100:8(S:0-1)\nn2|8|(null)\nn3|8|gpu:a:1,gpu:b:2,shard:8\n"
    assert slurm_job.machines(shown) == [BIG, Machine(gpus=0, cores=8), Machine(gpus=3, cores=8)]


def test_parts_are_told_which_of_the_steps_gpus_are_theirs() -> None:
    (component,) = slurm_job.components(request(PoolSpec("inference", 2, parts=2), PoolSpec("training", 2)), [BIG])
    granted = slurm_job.assign(component, [Node(name="n1", cores=8, gpus=("1", "4", "5", "7"))], [])
    assert [part.gpus for part in granted] == [("1",), ("4",), ("5", "7")]
    assert granted[2].place == ("3,4", "--nodelist=n1", "--cpus-per-task=8", "--gres=gpu:4")


def test_the_template_is_part_of_the_package() -> None:
    assert slurm_job.TEMPLATE.is_file()
    assert "pools/*.jinja" in (Path(__file__).parents[3] / "pyproject.toml").read_text()
