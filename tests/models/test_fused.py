"""What a GPU compiles: whole functions, once for all lengths, with the results of the plain ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from models import fused
from models.config.eagle3 import Eagle3Config
from models.drafts.base import PackedSamples, TargetProjection
from models.drafts.eagle3 import attention
from models.drafts.eagle3.module import Eagle3Draft
from models.drafts.vocabulary import DraftVocabulary
from models.fused import FusedFunction
from models.losses import chunked
from models.losses.divergences import MixedLoss

VOCABULARY, HIDDEN = 64, 16


@contextmanager
def compiled() -> Iterator[CompileCounter]:
    """Fused functions are compiled, by a compiler that counts and runs what torch traced."""
    counter = CompileCounter()
    compile_once = cache(partial(torch.compile, backend=counter, fullgraph=True))
    with pytest.MonkeyPatch.context() as patch:
        for module in (fused, attention, chunked):
            patch.setattr(module, "compiles", lambda _device: True)
        patch.setattr(FusedFunction, "compiled", property(lambda self: compile_once(self.function)))
        torch._dynamo.reset()
        yield counter


def gradients(lengths: tuple[int, ...], loss: str = "kl") -> list[torch.Tensor]:
    torch.manual_seed(0)
    config = Eagle3Config(
        vocab_size=VOCABULARY // 2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=24, ttt_steps=3,
        loss=loss,
    )  # fmt: skip
    head = torch.randn(VOCABULARY, HIDDEN)
    draft = Eagle3Draft(config, torch.randn(VOCABULARY, HIDDEN), DraftVocabulary(torch.arange(32), VOCABULARY), [0, 1])
    count = sum(lengths)
    batch = PackedSamples(
        torch.randint(32, (count,)), torch.ones(count, dtype=torch.bool), torch.randn(count, 2 * HIDDEN),
        torch.randn(count, HIDDEN), lengths,
    )  # fmt: skip
    draft.loss(batch, TargetProjection(head[:32], None, 1.0, None), count, 1000).loss.backward()
    return [p.grad for p in draft.parameters() if p.grad is not None]


@pytest.mark.parametrize("loss", ["kl", "lk_lambda"])
def test_compiled_functions_give_the_same_gradients(loss) -> None:
    plain = gradients((9, 6), loss)
    with compiled():
        found = gradients((9, 6), loss)
    for ours, expected in zip(found, plain, strict=True):
        torch.testing.assert_close(ours, expected)


def test_the_compiled_loss_of_block_drafts_is_the_plain_one() -> None:
    """It is compiled without the scattered sum of the plain one."""
    torch.manual_seed(0)
    rows, steps, divergence = 9, 5, MixedLoss(0.3, 0.5, 0.9)
    logits, labels = torch.randn(rows, steps, VOCABULARY), torch.randint(-1, VOCABULARY, (rows,))
    given = (torch.rand(rows, steps), torch.randn(rows, VOCABULARY), -torch.rand(rows, 1), labels, (divergence, True))

    def found() -> list[torch.Tensor]:
        slope = logits.clone()
        return [*chunked._diverge_rows(slope, *given), slope]

    plain = found()
    with compiled() as counter:
        ours = found()
    assert counter.frame_count == 1
    for one, expected in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, expected)


def test_torch_knows_the_limits_without_which_functions_are_compiled() -> None:
    """torch.compile refuses unknown options, before it compiles anything."""
    assert callable(FusedFunction(torch.sin).compiled)
    with pytest.raises(RuntimeError, match="realize_nothing"):
        torch.compile(torch.sin, options={"realize_nothing": 1})


def test_other_lengths_compile_nothing_anew() -> None:
    with compiled() as counter:
        gradients((9, 6))
        before = counter.frame_count
        assert before
        for lengths in ((12, 8), (40,), (5, 5, 21)):
            gradients(lengths)
        assert counter.frame_count == before
