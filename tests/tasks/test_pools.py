"""The queue for a machine's GPUs."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from httpx import HTTPStatusError, Request, Response
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError

from tasks import pools


def test_workers_that_divide_a_machine_have_queues_of_their_own() -> None:
    assert pools.gpu_queue(["GPU-a", "GPU-b"]) == pools.gpu_queue(["GPU-b", "GPU-a"])
    assert pools.gpu_queue(["GPU-a", "GPU-b"]) != pools.gpu_queue(["GPU-c"])


@pytest.mark.parametrize(("status", "times", "raises"), [(422, 2, False), (422, 99, True), (404, 1, True)])
def test_a_limit_that_was_lowered_meanwhile_is_set_and_asked_for_again(
    status: int, times: int, raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, limits = iter([status] * times), list[int]()

    @contextmanager
    def concurrency(*_arguments: object, **_options: object) -> Iterator[None]:
        if code := next(answers, None):
            request = Request("POST", "http://server")
            raise ConcurrencySlotAcquisitionError from HTTPStatusError(
                "", request=request, response=Response(code, request=request)
            )
        yield

    monkeypatch.setattr(pools, "concurrency", concurrency)
    monkeypatch.setattr(pools, "LOOK_AGAIN_S", 0.05)
    monkeypatch.setattr(pools, "_set_limit", lambda _name, of: limits.append(of))
    if raises:
        with pytest.raises(ConcurrencySlotAcquisitionError), pools.occupy("gpus", 2, 4, wait_s=0.2):
            pass
    else:
        with pools.occupy("gpus", 2, 4, wait_s=5):
            pass
        assert limits == [4, 4, 4]
