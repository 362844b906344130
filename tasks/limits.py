"""Turns at what Prefect's server counts (global concurrency limits); its pages show who has one. Runs in flows."""

from collections.abc import Iterator
from contextlib import contextmanager

from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency

from infra.settings import prefect_is_private
from tasks.run import OpenRun

LEASE_S = 60.0
"""A flow that was killed gives its turn back after so long."""


@contextmanager
def occupy(limit: str, slots: int, of: int, wait_s: float) -> Iterator[None]:
    """Hold `slots` of the `of` slots of a limit, which is made where there is none.

    Raises TimeoutError or ConcurrencySlotAcquisitionError where they do not come free within `wait_s` seconds.
    """
    with get_client(sync_client=True) as client:
        client.upsert_global_concurrency_limit_by_name(limit, of)
    # A server that is away for longer than a lease must not end the flow.
    with concurrency(
        limit, slots, timeout_seconds=wait_s, lease_duration=LEASE_S, strict=True, raise_on_lease_renewal_failure=False
    ):
        yield


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
