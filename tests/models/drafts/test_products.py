"""Products and row-wise functions with gradients by hand, against autograd's."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from models.config.eagle3 import Eagle3Config
from models.drafts.layers import RMSNorm
from models.drafts.products import SharedWeight, added_product, gated_product, products
from models.drafts.rope import rotary_tables
from models.drafts.row_functions import Embeddings, embedded_input, gated, rms_norm, rotate


def normal(*sizes: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*sizes, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_a_norms_gradients_are_those_of_finite_differences() -> None:
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (normal(5, 6), normal(6)))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (normal(3, 2, 6), normal(6)))


def test_a_norm_is_torchs_own() -> None:
    x, weight = normal(7, 16, dtype=torch.float32), normal(16, dtype=torch.float32)
    assert torch.allclose(rms_norm(x, weight, 1e-6), F.rms_norm(x, (16,), weight, 1e-6), rtol=1e-6)


def test_gradients_of_embedded_input() -> None:
    tokens = torch.tensor([3, 0, 3, 1])
    assert torch.autograd.gradcheck(
        lambda table, hidden, first, second: embedded_input(Embeddings(table), tokens, hidden, (first, second), 1e-3),
        (normal(5, 6), normal(4, 6), normal(6), normal(6)),
    )


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_rotation_is_undone_in_the_backward_pass(share: float) -> None:
    sizes = {"num_heads": 3, "num_kv_heads": 3, "head_dim": 8, "intermediate_size": 8}
    shape = Eagle3Config(**sizes, partial_rotary_factor=share)
    cos, sin = (x.double() for x in rotary_tables(torch.arange(4), shape))
    assert torch.autograd.gradcheck(lambda x: rotate(x, (cos, sin)), (normal(4, 3, 8),))


def layer(x, weights):
    """A layer that runs three times, as `products` compute it."""
    q, k, gate, up, down = (SharedWeight(weight) for weight in weights)
    for _ in range(3):
        first, second = products(x, (q, k))
        hidden = added_product(x, first, q)
        x = gated_product(hidden + second, *products(hidden, (gate, up)), down)
    return x


def plain(x, weights):
    q, k, gate, up, down = weights
    for _ in range(3):
        first, second = x @ q.T, x @ k.T
        hidden = x + first @ q.T
        x = hidden + second + (F.silu(hidden @ gate.T) * (hidden @ up.T)) @ down.T
    return x


SIZES = ((6, 6), (6, 6), (9, 6), (9, 6), (6, 9))


def test_shared_weights_gather_the_gradients_of_all_their_uses() -> None:
    x, weights = normal(5, 6), [normal(*size) for size in SIZES]
    found, expected = layer(x, weights), plain(x, weights)
    assert torch.allclose(found, expected)
    slope = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, [x, *weights], slope),
        torch.autograd.grad(expected, [x, *weights], slope),
        strict=True,
    ):
        assert torch.allclose(ours, theirs)


def test_gradients_of_bfloat16_products_are_summed_in_float32() -> None:
    """Products that do not depend on each other: nothing but the sums is rounded, and autograd's are bfloat16."""
    rows, slopes, gates = torch.randn(3, 128, 20, 6).bfloat16()
    active = gated(gates, rows)
    weight = normal(6, 6, dtype=torch.float32)
    kinds = {
        "products": (rows, lambda use, shared: products(rows[use], (shared,))[0]),
        "added": (rows, lambda use, shared: added_product(slopes[use], rows[use], shared)),
        "gated": (active, lambda use, shared: gated_product(slopes[use], gates[use], rows[use], shared)),
    }
    for kind, (taken, product) in kinds.items():
        with torch.autocast("cpu", torch.bfloat16):
            shared = SharedWeight(weight)
            ours = sum((product(use, shared) * slope).sum() for use, slope in enumerate(slopes))
            theirs = sum((F.linear(x, weight) * slope).sum() for x, slope in zip(taken, slopes, strict=True))
        exact = sum(slope.double().T @ x.double() for x, slope in zip(taken, slopes, strict=True))
        found, autograds = (torch.autograd.grad(one, weight)[0] for one in (ours, theirs))
        assert (found - exact).norm() < 0.5 * (autograds - exact).norm(), kind


def test_a_frozen_weight_has_no_gradient() -> None:
    x, weight = normal(5, 6), normal(4, 6).detach()
    shared = SharedWeight(weight)
    products(x, (shared,))[0].sum().backward()
    assert shared.gradient.total is None
    assert torch.allclose(x.grad, weight.sum(0).expand(5, 6))


def test_under_autocast_a_norm_gives_what_the_next_product_takes() -> None:
    norm = RMSNorm(8, 1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(torch.randn(3, 8)).dtype == torch.bfloat16
    assert norm(torch.randn(3, 8).bfloat16()).dtype == torch.float32


def test_the_gate() -> None:
    gate, up = torch.randn(4, 5), torch.randn(4, 5)
    assert torch.equal(gated(gate, up), F.silu(gate) * up)


def test_a_pass_leaves_nothing_to_the_garbage_collector() -> None:
    weight = normal(4, 6)
    gc.disable()
    try:
        shared = SharedWeight(weight)
        found = products(normal(5, 6), (shared,))[0]
        gone = weakref.ref(shared.gradient)
        found.sum().backward()
        del shared, found
        assert gone() is None
    finally:
        gc.enable()
