"""Copies between host and GPU, and samples through Mooncake."""

import time

import torch

from gpu_stages.base import AbsentError, Bench, check
from gpu_stages.training import train_once
from infra.network.rdma import active_devices
from infra.refusal import Refusal
from infra.transport.mooncake.environment import carries_gpu_memory, check_mooncake

ROUNDS = 5


def copies(bench: Bench) -> None:
    """Bytes per second to the device and back, from pageable and from pinned memory."""
    size = bench.pick(2**30, 2**20)
    on_device = torch.empty(size, dtype=torch.uint8, device=bench.device)
    rates = {}
    for name, pinned in (("pageable", False), ("pinned", bench.is_gpu)):
        host = torch.ones(size, dtype=torch.uint8, pin_memory=pinned)
        rates[f"{name}_to_device"] = _rate(bench, on_device, host)
        rates[f"{name}_to_host"] = _rate(bench, host, on_device)
    bench.note(bytes=size, **{f"{name}_gb_per_s": rate / 1e9 for name, rate in rates.items()})
    check(bool(on_device.min().item() == 1), "what arrived is not what was sent")


def _rate(bench: Bench, to: torch.Tensor, what: torch.Tensor) -> float:
    """Bytes per second of the fastest copy."""
    seconds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        to.copy_(what, non_blocking=True)
        if bench.is_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return what.nbytes / min(seconds)


def mooncake(bench: Bench) -> None:
    """A training whose samples go through Mooncake: into the GPU's memory where there is RDMA, else into the host's."""
    try:
        check_mooncake()
    except Refusal as error:
        raise AbsentError(str(error)) from error
    devices, direct = active_devices(), bench.is_gpu and carries_gpu_memory()
    receive = "device" if devices and direct else "host"
    bench.note(rdma_devices=devices, receive=receive)
    train_once(bench, 1, "transport.kind=mooncake", f"transport.receive={receive}")
