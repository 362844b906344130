"""Attention of the training-time test against the dense one, whatever the kernel, the packing and the grouping."""

import pytest
import torch
from emulated_device import DEVICE, emulated_device
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from models.drafts.eagle3 import attention
from models.drafts.eagle3 import kernels as kernels_module
from models.drafts.eagle3.attention import Earlier, step_attention
from models.drafts.eagle3.kernels import Attended, CpuFlash, CudaFlash, Kernel, PlainKernel, fastest_kernel

KERNELS: list[Kernel] = [PlainKernel(), CpuFlash()]
kernels = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)


def make(lengths: tuple[int, ...], steps: int, heads: tuple[int, int], dtype: torch.dtype = torch.float64):
    """Queries, columns of every step."""
    g, count = torch.Generator().manual_seed(len(lengths) + steps), sum(lengths)
    q, *rest = (
        torch.randn(count, n, 8, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
        for n in (heads[0], *[heads[1]] * (2 * steps))
    )
    return q, list(zip(rest[::2], rest[1::2], strict=True))


def dense(
    q: Tensor, columns: list[tuple[Tensor, Tensor]], lengths: tuple[int, ...], window: int | None = None
) -> Tensor:
    """Every score of every step, masked. Row r of step j stands at position r + j."""
    count, heads = q.shape[:2]
    sample = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    row = torch.arange(count)
    causal = (sample[:, None] == sample) & (row <= row[:, None])
    if window is not None:
        causal &= row[:, None] + len(columns) - 1 - row < window
    seen = torch.cat([causal, *[torch.eye(count, dtype=torch.bool)] * (len(columns) - 1)], dim=1)
    keys, values = (
        torch.cat(parts).repeat_interleave(heads // parts[0].shape[1], 1) for parts in zip(*columns, strict=True)
    )
    scores = torch.einsum("ihd,jhd->hij", q, keys) / 8**0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hij,jhd->ihd", weights, values).flatten(1)


@kernels
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("window", [None, 4, 6, 20])
def test_equals_dense_attention_and_its_gradients(monkeypatch, kernel, steps, heads, window):
    monkeypatch.setattr(attention, "ROWS", 5)
    monkeypatch.setattr(kernels_module, "PLAIN_ROWS", 4)
    lengths = (9, 1, 6)
    q, columns = make(lengths, steps, heads)
    inputs = [q, *(x for column in columns for x in column)]
    found, expected = step_attention(q, columns, lengths, kernel, None, window), dense(q, columns, lengths, window)
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)
    slope = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(0))
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, slope), torch.autograd.grad(expected, inputs, slope), strict=True
    ):
        assert torch.allclose(ours, theirs, rtol=1e-8, atol=1e-11)


@kernels
@pytest.mark.parametrize("window", [None, 3, 5, 7, 20])
def test_parts_of_samples_that_look_back_equal_the_whole(monkeypatch, kernel, window):
    """Rows cut anywhere: each part sees itself, and what comes before it in its sample."""
    monkeypatch.setattr(attention, "ROWS", 3)
    monkeypatch.setattr(kernels_module, "PLAIN_ROWS", 2)
    (q, columns), cuts = make((9, 7), 3, (4, 2)), [(0, 4, 0), (4, 5, 0), (5, 9, 0), (9, 10, 9), (10, 16, 9)]
    expected, earlier = dense(q, columns, (9, 7), window), Earlier(*columns[0], tuple(slice(o, a) for a, _, o in cuts))
    found = step_attention(q, columns, [b - a for a, b, _ in cuts], kernel, earlier, window)
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)
    slope, inputs = torch.randn_like(found), [q, *(x for column in columns for x in column)]
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, slope), torch.autograd.grad(expected, inputs, slope), strict=True
    ):
        assert torch.allclose(ours, theirs, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("kernel", [*KERNELS, CudaFlash()], ids=lambda kernel: type(kernel).__name__)
def test_a_rank_without_rows_still_has_its_part_in_the_gradients(kernel):
    """The others wait for it where keys' gradients are put together."""
    q, columns = make((), 2, (4, 2), torch.bfloat16)
    k, v = (torch.randn(5, 2, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    found = step_attention(q, columns, (), kernel, Earlier(k, v, ()))
    assert found.shape == (0, 32)
    for gradient in torch.autograd.grad(found.sum(), [k, v]):
        assert torch.equal(gradient, torch.zeros(5, 2, 8))


@kernels
@pytest.mark.parametrize("window", [None, 9])
def test_half_precision_is_close(kernel, window):
    q, columns = make((40, 30), 3, (4, 2), torch.bfloat16)
    found = step_attention(q, columns, (40, 30), kernel, None, window)
    wide = [(k.double(), v.double()) for k, v in columns]
    expected = dense(q.double(), wide, (40, 30), window)
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.double(), expected, atol=0.03)
    inputs = [q, *(x for column in columns for x in column)]
    for ours, theirs in zip(
        torch.autograd.grad(found.float().square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        strict=True,
    ):
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("lengths", [(6, 3), None])
def test_cudas_kernel_is_asked_for_the_same(window, lengths):
    """By an emulation of its operations: within sequences, and to keys before the queries, of which few are seen."""
    queries = 9 if lengths else 4
    q, (k, v) = torch.randn(queries, 4, 8).bfloat16(), torch.randn(2, 9, 2, 8).bfloat16()
    k, v = (k, v) if lengths else (k[:4], v[:4])
    out, sums = PlainKernel().forward(q, k, v, lengths, window)
    slope = torch.randn_like(out)
    expected = PlainKernel().backward(slope, Attended(q, k, v, out, sums, lengths, window))
    with emulated_device():
        there = [x.to(DEVICE) for x in (q, k, v)]
        found, found_sums = CudaFlash().forward(*there, lengths, window)
        gradients = CudaFlash().backward(slope.to(DEVICE), Attended(*there, found, found_sums, lengths, window))
        assert torch.allclose(found.cpu().float(), out.float(), atol=0.02)
        assert torch.allclose(found_sums.cpu(), sums, atol=1e-5)
        for ours, theirs in zip(gradients, expected, strict=True):
            assert torch.allclose(ours.cpu().float(), theirs.float(), atol=0.03)


def test_long_float32_scores_do_not_lose_the_own_columns():
    """An own key that outweighs all others by e^60, and one that is nothing beside them."""
    q = torch.ones(3, 1, 8)
    keys = [torch.zeros(3, 1, 8), torch.full((3, 1, 8), 60 / 8**0.5), torch.full((3, 1, 8), -60 / 8**0.5)]
    values = [torch.full((3, 1, 8), float(step)) for step in range(3)]
    found = step_attention(q, list(zip(keys, values, strict=True)), (3,))
    assert torch.allclose(found, torch.ones(3, 8))


@pytest.mark.parametrize(
    ("capability", "dtype", "kernel"),
    [
        ((9, 0), torch.bfloat16, CudaFlash),
        ((9, 0), torch.float32, PlainKernel),
        ((7, 5), torch.bfloat16, PlainKernel),
    ],
)
def test_flash_attention_runs_where_the_gpu_has_it(monkeypatch, capability, dtype, kernel):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _device: capability)
    with FakeTensorMode():
        assert type(fastest_kernel(torch.empty(2, 1, 8, dtype=dtype, device="cuda"))) is kernel
