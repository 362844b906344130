"""The command lines of a run's data plane, started on pools and restarted after crashes."""

from contextlib import ExitStack
from functools import partial

from infra.data_plane.elastic_generators import generator_role
from infra.data_plane.meeting import open_meeting
from infra.data_plane.serving import HERE, ServerSpan, launch_serving
from infra.files.run_folder import RunFolder
from infra.network.ports import HOST
from infra.pools.base import Pool
from infra.processes.gang import Gang
from infra.processes.keep_running import KeptProcess
from infra.processes.process import module


def start_generator(
    pool: Pool,
    folder: RunFolder,
    index: int,
    sharing: int,
    threads: int | None,
    span: ServerSpan = HERE,
    *,
    alone: bool = False,
) -> KeptProcess:
    """Start generator `index` on its share of a pool among `sharing` processes, or, if `alone`, on all of it."""
    command = module("models.capture.generator", folder.path, "--index", str(index))
    launch = partial(launch_serving, pool, folder, generator_role(index), command, span)
    return KeptProcess(partial(launch, threads=threads, processes=sharing, index=None if alone else index))


def start_trainer(
    pool: Pool, folder: RunFolder, ranks: int, threads: int | None, machines: int = 1, address: str = HOST
) -> KeptProcess:
    """Start the trainer with `ranks` ranks on the training pool, divided among its `machines` parts.

    `address`: of the flow's machine, in the private network in which ranks of several machines meet.
    """
    command = module("models.training.launch", folder.path, "--ranks", str(ranks // machines))
    if machines == 1:
        return KeptProcess(partial(pool.launch, "trainer", command, threads=threads, processes=ranks))

    def launch() -> Gang:
        meeting = open_meeting(folder, "trainer")
        with ExitStack() as stack:
            members = []
            for index in range(machines):
                role = f"trainer-{index}" if index else "trainer"
                here = [*command, "--machine", str(index), str(machines), str(meeting.absolute()), address]
                members.append(pool.launch(role, here, threads=threads, processes=ranks, index=index))
                stack.callback(members[-1].stop)
            stack.pop_all()
        return Gang(members)

    return KeptProcess(launch)
