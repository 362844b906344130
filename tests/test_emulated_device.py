"""The emulated accelerator raises where a GPU would, and counts what a GPU would wait for."""

import pytest
import torch
from emulated_device import DEVICE, emulated_device


@pytest.mark.parametrize(
    "mixture",
    [
        lambda here, there: here + there,
        lambda here, there: torch.cat([here, there]),
        lambda here, there: here[there.long()],
        lambda here, there: here @ there,
        lambda here, there: torch.where(there > 0, here, 0.0),
        lambda here, there: torch.nn.functional.linear(there[None], here[None]),
    ],
)
def test_tensors_of_host_and_device_do_not_mix(mixture):
    with emulated_device():
        with pytest.raises(RuntimeError, match="on cpu"):
            mixture(torch.ones(3), torch.ones(3, device=DEVICE))


def test_what_a_gpu_takes_from_the_host_is_taken():
    with emulated_device():
        there = torch.ones(3, device=DEVICE)
        assert (there * torch.tensor(2.0)).tolist() == [2, 2, 2]  # a scalar
        assert there[torch.tensor([0, 2])].shape == (2,)  # indices
        assert there[[0, 2]].device == DEVICE
        assert there.new_tensor([1.0]).device == torch.tensor([1], device=DEVICE).device == DEVICE
        there[1:].copy_(torch.zeros(2))
        assert there.tolist() == [1, 0, 0]


def test_a_tensor_is_not_an_array():
    with emulated_device():
        with pytest.raises(TypeError, match="to numpy"):
            torch.ones(3, device=DEVICE).numpy()


def test_generators_belong_to_a_device():
    with emulated_device():
        here, there = torch.Generator().manual_seed(1), torch.Generator(DEVICE).manual_seed(1)
        assert torch.rand(2, generator=there, device=DEVICE).cpu().equal(torch.rand(2, generator=here))
        with pytest.raises(RuntimeError, match="generator"):
            torch.rand(2, generator=here, device=DEVICE)
        with pytest.raises(RuntimeError, match="generator"):
            torch.rand(2, generator=there)


def test_copies_and_waits_are_counted():
    with emulated_device() as traffic:
        there = torch.arange(4.0).to(DEVICE)
        assert (traffic.to_device, traffic.to_host) == ([16], [])
        torch.arange(4.0).to(DEVICE, non_blocking=True)
        assert dict(traffic.waits) == {"copy to the device": 1}
        there.cpu()
        assert traffic.to_host == [16]
        traffic.clear()
        assert float(there.sum()) == 6
        assert there[there > 1].shape == (2,)
        there.nonzero()
        assert dict(traffic.waits) == {"_local_scalar_dense": 1, "index by a mask": 1, "nonzero": 1}


def test_gradients_flow_on_the_device():
    with emulated_device():
        layer = torch.nn.Linear(4, 2).to(DEVICE)
        layer(torch.ones(3, 4, device=DEVICE)).square().mean().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.device == DEVICE


def test_autocast_computes_products_in_bfloat16():
    with emulated_device(), torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        rows = torch.ones(3, 4, device=DEVICE)
        assert (rows @ rows.T).dtype == torch.bfloat16
        assert rows.bfloat16().softmax(-1).dtype == torch.float32
        assert (rows * rows).dtype == torch.float32


def test_there_is_no_device_outside() -> None:
    with emulated_device(), torch.random.fork_rng():
        assert torch.accelerator.is_available()
    assert not torch.accelerator.is_available()
    with torch.random.fork_rng():
        torch.rand(1)
