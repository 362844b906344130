"""Leases devices, runs processes on them, and limits what runs at the same time."""

import hashlib
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

from httpx import HTTPError, HTTPStatusError, TransportError, codes
from prefect import Task, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, TaskRun
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectAlreadyExists

from infra.data_plane.serving import HERE, ServerSpan, launch_serving
from infra.network.ports import machine_address
from infra.pools.base import Pool, PoolBusyError, PoolProvider, PoolSpec, Role
from infra.pools.local import LocalPool, LocalPools
from infra.pools.run_pools import SinglePools, generator_spec, pool_provider, pool_specs, released_or_warned
from infra.processes.process import Owner, module
from infra.records.sharing import read_sharing
from infra.run.device_time import holding, note
from infra.settings import prefect_is_private
from tasks.run import OpenRun

LOOK_AGAIN_S = 10.0
PROMPT_S = 1.0
"""Timeout of a training run, which does not wait for a queue slot."""


@contextmanager
def lease(run: OpenRun, *roles: Role) -> Iterator[Sequence[Pool]]:
    """A pool per role, all at once; given back at the end with everything on them stopped.

    Roles that share devices (pools.sharing) get pools of the same ones. Waits in a queue for GPUs that other runs hold.
    Raises Refusal for what can never fit.
    """
    settings = run.config.pools
    provider, wait_s = pool_provider(settings), 3600 * settings.wait_hours
    specs = leased_specs(run, roles)
    # Ray and Slurm have queues of their own.
    queue = _queued(provider, specs, wait_s) if isinstance(provider, LocalPools) else nullcontext()
    warn = get_run_logger().warning
    with queue:
        patient = acquire_pools.with_options(retries=int(wait_s / (LOOK_AGAIN_S + provider.look_s)))
        try:
            pools = patient(provider, specs, run.owner)
            with (
                holding(run.folder, {spec.role: spec.gpus for spec in specs}),
                pools_of_roles(pools, _specs(run, roles)) as by_role,
            ):
                yield by_role
        finally:
            with released_or_warned(warn):
                provider.release(run.owner.name)


@contextmanager
def lease_both(run: OpenRun) -> Iterator[tuple[Pool, Pool]]:
    """The pools of generators and trainer. Generators beside servers that have users need no GPU."""
    if run.config.generator.live is None:
        with lease(run, "inference", "training") as (inference, training):
            yield inference, training
    else:
        with lease(run, "training") as (training,):
            yield on_cpu(run), training


def leased_specs(run: OpenRun, roles: Sequence[Role]) -> list[PoolSpec]:
    """What is leased for these roles: one for all of them, the largest, where they share devices."""
    specs = _specs(run, roles)
    shared = len(roles) > 1 and read_sharing(run.folder).mode != "apart"
    return [max(specs, key=lambda spec: spec.gpus)] if shared else specs


def _specs(run: OpenRun, roles: Sequence[Role]) -> list[PoolSpec]:
    return [spec for spec in pool_specs(run.config.pools, run.config.generator.count) if spec.role in roles]


@contextmanager
def pools_of_roles(pools: Sequence[Pool], specs: Sequence[PoolSpec]) -> Iterator[Sequence[Pool]]:
    """A pool per spec. Where there is one pool for all of them, each gets as many of its GPUs as it wants.

    SGLang divides its target among all GPUs that it sees, and the plan is for those of its own role.
    """
    if len(pools) == len(specs):
        yield pools
        return
    (shared,) = pools
    with ExitStack() as stack:
        parts = [LocalPool(shared.owner, shared.gpus[: spec.gpus]) for spec in specs]
        for part in parts:
            stack.callback(part.stop)
        yield parts


def single_pools(run: OpenRun) -> SinglePools:
    """Devices for one generator each, leased while the run trains. Nothing is waited for."""
    settings = run.config.pools
    provider, spec = pool_provider(settings, PROMPT_S), generator_spec(settings, run.config.generator.count)

    def noted(owner: str, gpus: int) -> None:
        note(run.folder, owner, {spec.role: gpus})

    if isinstance(provider, LocalPools):
        return SinglePools(provider, spec, run.owner, partial(_promptly_queued, provider, spec), noted)
    return SinglePools(provider, spec, run.owner, noted=noted, warn=get_run_logger().warning)


def span_of(run: OpenRun) -> ServerSpan:
    """The machines over which each SGLang server of a run extends."""
    machines = run.config.pools.machines_per_generator
    return HERE if machines == 1 else ServerSpan(machines, machine_address(run.config.transport.address))


def run_main(
    run: OpenRun, pool: Pool, role: str, name: str, *arguments: str, timeout_s: float, span: ServerSpan = HERE
) -> None:
    """Run `python -m NAME RUN ARGUMENTS` on a pool to its end, forwarding its output to the task's log.

    Raises ProcessFailedError with the end of the log, or TimeoutError.
    """
    process = launch_serving(pool, run.folder, role, module(name, run.folder.path, *arguments), span)
    try:
        process.wait(timeout_s, on_line=get_run_logger().info)
    finally:
        process.stop()


def on_cpu(run: OpenRun) -> Pool:
    """This machine's cores, which need no lease."""
    return LocalPool(run.owner)


@contextmanager
def _promptly_queued(pools: LocalPools, spec: PoolSpec) -> Iterator[None]:
    """A slot of this machine's queue, or PoolBusyError. A server that is away must not stop the training."""
    with ExitStack() as place:
        try:
            place.enter_context(_queued(pools, [spec], PROMPT_S))
        except (TimeoutError, ConcurrencySlotAcquisitionError, HTTPError) as error:
            raise PoolBusyError(f"this machine's queue has no place for {spec.gpus} GPUs now: {error}") from error
        yield


@contextmanager
def _queued(pools: LocalPools, specs: Sequence[PoolSpec], wait_s: float) -> Iterator[None]:
    """A place in this machine's queue, which Prefect's pages show as a concurrency limit.

    It counts; which GPUs, and that nobody else has them, is decided by the locks of the pools.
    """
    pools.check(specs)
    gpus, there_are = sum(spec.gpus for spec in specs), len(pools.gpus)
    if gpus == 0 or prefect_is_private():
        yield
        return
    queue = gpu_queue(pools.gpus)
    if wait_s > PROMPT_S:
        get_run_logger().info("waiting for %d of %d GPUs (concurrency limit %s)", gpus, there_are, queue)
    with occupy(queue, gpus, there_are, wait_s):  # the locks hold even if the server is away for longer than a lease
        yield


def gpu_queue(gpus: Iterable[str]) -> str:
    """The limit of this machine's flows that may use these GPUs. Workers that divide a machine's GPUs have one each."""
    return f"gpus-of-{platform.node()}-{hashlib.sha256(','.join(sorted(gpus)).encode()).hexdigest()[:6]}"


def _busy(_task: Task, _run: TaskRun, state: State) -> bool:
    return isinstance(state.result(raise_on_failure=False), PoolBusyError)


@task(name="acquire pools", retry_delay_seconds=LOOK_AGAIN_S, retry_condition_fn=_busy, cache_policy=NO_CACHE)
def acquire_pools(provider: PoolProvider, specs: Sequence[PoolSpec], owner: Owner) -> Sequence[Pool]:
    """Lease devices; waits where other runs hold them."""
    return provider.acquire(specs, owner)


LEASE_S = 60.0
"""The slots of a killed flow become free after this time."""


@contextmanager
def occupy(limit: str, slots: int, of: int, wait_s: float) -> Iterator[None]:
    """Hold `slots` of the `of` slots of a limit, which is created if it does not exist.

    Waits for a server that is away. If it is away at the end, the slots become free when their lease expires.
    Raises TimeoutError, ConcurrencySlotAcquisitionError or httpx.HTTPError if none are free within `wait_s` seconds.
    """
    deadline, told = time.monotonic() + wait_s, False
    with _given_back_or_warned() as place:
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            try:
                _set_limit(limit, of)
                # A server that is away for longer than a lease must not end the flow.
                held = concurrency(
                    limit, slots, timeout_seconds=left_s, lease_duration=LEASE_S, strict=True,
                    raise_on_lease_renewal_failure=False,
                )  # fmt: skip
                place.enter_context(held)
                break
            except (ConcurrencySlotAcquisitionError, HTTPError) as error:
                away = _is_away(error)
                if left_s < LOOK_AGAIN_S or not (away or _was_lowered(error)):
                    raise
                if away and not told:
                    get_run_logger().warning("waiting for Prefect's server (concurrency limit %s): %s", limit, error)
                told = away
                time.sleep(LOOK_AGAIN_S)
        yield


@contextmanager
def _given_back_or_warned() -> Iterator[ExitStack]:
    """A stack of leases. Failing to release them is a warning: what they were held for is done by then."""
    place = ExitStack()
    try:
        yield place
    finally:
        try:
            # Prefect's context manager does not see the body's error, which it could replace by its own.
            place.close()
        except HTTPError as error:
            get_run_logger().warning("concurrency slots become free by themselves, within %g s: %s", LEASE_S, error)


def _set_limit(name: str, of: int) -> None:
    with get_client(sync_client=True) as client:
        try:
            client.upsert_global_concurrency_limit_by_name(name, of)
        except ObjectAlreadyExists:  # another flow created it between the client's look and its own attempt
            client.upsert_global_concurrency_limit_by_name(name, of)


def _cause(error: Exception) -> BaseException | None:
    """The error of HTTP that Prefect's error was raised for, or is."""
    return error.__cause__ if isinstance(error, ConcurrencySlotAcquisitionError) else error


def _is_away(error: Exception) -> bool:
    """Whether the server was not reached, or had an error of its own."""
    cause = _cause(error)
    return isinstance(cause, TransportError) or (isinstance(cause, HTTPStatusError) and cause.response.is_server_error)


def _was_lowered(error: Exception) -> bool:
    """Whether somebody made the limit smaller than what is asked for, while this flow waited."""
    cause = _cause(error)
    return isinstance(cause, HTTPStatusError) and cause.response.status_code == codes.UNPROCESSABLE_ENTITY


@contextmanager
def only_training_of_its_draft(run: OpenRun) -> Iterator[None]:
    """Wait until no other flow of this server trains the same registered draft.

    A weekly run and one that a drift started would otherwise train side by side, and each would be compared with a
    champion that the other may replace. A server that ends with this command has no other flows.

    Raises TimeoutError after `pools.wait_hours`.
    """
    if prefect_is_private():
        yield
        return
    with occupy(f"training-of-{run.draft_name}", 1, 1, 3600 * run.config.pools.wait_hours):
        yield
