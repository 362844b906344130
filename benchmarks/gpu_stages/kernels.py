"""Attention and losses on the GPU against the same on the CPU, or against the plain kernel."""

from itertools import product
from typing import Any, get_args

import torch
from torch import Tensor

from gpu_stages.base import Bench, check
from models.config.draft import METHODS as DRAFT_METHODS
from models.config.draft import parse_draft_config
from models.drafts.base import PackedSamples, TargetProjection
from models.drafts.eagle3.attention import step_attention
from models.drafts.eagle3.kernels import PlainKernel, fastest_kernel
from models.drafts.mtp.experts import grouped
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary

LENGTHS = (1, 7, 129, 64, 1000, 513)
STEPS = 3
ATTENTION_BAR = 0.02
"""Largest relative difference from float32 of results and gradients in bfloat16, whose own rounding is 0.004."""
EXPERTS_BAR = 0.01
LOSS_BARS = {torch.float32: 1e-4, torch.bfloat16: 0.02}
GRADIENT_BARS = {torch.float32: 1e-3, torch.bfloat16: 0.1}
LAYERS = (1, 2, 3)
HIDDEN, VOCABULARY = 256, 2048
METHODS = {
    "eagle3": {"vocab_size": 1024, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "intermediate_size": 512},
    "dflash": {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "intermediate_size": 512, "anchors": 32},
    "medusa": {"vocab_size": 1024},
}


def apart(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to the expected norm; in float32 on the CPU."""
    ours, theirs = found.detach().cpu().float(), expected.detach().cpu().float()
    return ((ours - theirs).norm() / theirs.norm().clamp(min=1e-30)).item()


def attention(bench: Bench) -> None:
    """Results and gradients of the training-time test's attention: the fastest kernel beside the plain one."""
    lengths, worst = bench.pick(LENGTHS, (1, 7, 33)), 0.0
    for head_dim, (heads, kv_heads) in product((64, 128), ((8, 8), (32, 8))):
        generator = torch.Generator().manual_seed(head_dim + kv_heads)

        def drawn(rows: int, count: int, width: int = head_dim, g: torch.Generator = generator) -> Tensor:
            return torch.randn(rows, count, width, generator=g).bfloat16()

        rows = sum(lengths)
        inputs = [drawn(rows, heads), *(drawn(rows, kv_heads) for _ in range(2 * STEPS))]
        slope = drawn(rows, heads).flatten(1)
        plain = _attended([x.float().to(bench.device) for x in inputs], lengths, slope, PlainKernel())
        on_device = [x.to(bench.device) for x in inputs]
        kernel = type(fastest_kernel(on_device[0])).__name__
        fast = _attended(on_device, lengths, slope, None)
        differences = [apart(ours, theirs) for ours, theirs in zip(fast, plain, strict=True)]
        worst = max(worst, *differences)
        bench.note(
            kernel=kernel, lengths=lengths, worst=worst,
            **{f"head_dim_{head_dim}_heads_{heads}_{kv_heads}": {"out": differences[0], "gradients": differences[1:]}},
        )  # fmt: skip
    expected = bench.pick("CudaFlash", "CpuFlash")
    check(kernel == expected, f"bfloat16 is attended to by {kernel}, not by {expected}")
    check(worst <= ATTENTION_BAR, f"attention differs from the plain kernel by {worst:.2g}, allowed {ATTENTION_BAR}")


def experts(bench: Bench) -> None:
    """Products of experts in groups, beside those one by one on the CPU; one expert has no row, and zero gradients."""
    ends, generator = torch.tensor([63, 63, 200], dtype=torch.int32), torch.Generator().manual_seed(0)
    rows, slope, matrices = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((200, 64), (200, 128), (3, 64, 128))
    )
    worst = 0.0
    for name, first, second in (("of_rows", rows, matrices), ("of_matrices", rows.T, slope)):
        found = grouped(first.to(bench.device), second.to(bench.device), ends.to(bench.device))
        difference = apart(found, grouped(first.float(), second.float(), ends))
        worst = max(worst, difference)
        bench.note(**{name: difference})
    check(worst <= EXPERTS_BAR, f"grouped products differ from the CPU's by {worst:.2g}, allowed {EXPERTS_BAR}")
    check(not bool(found[1].any()), "the gradient of an expert without a row is not zero")


def _attended(inputs: list[Tensor], lengths: tuple[int, ...], slope: Tensor, kernel: Any) -> list[Tensor]:
    """The result, and the gradients of queries, keys and values."""
    q, *columns = (x.requires_grad_() for x in inputs)
    out = step_attention(q, list(zip(columns[::2], columns[1::2], strict=True)), lengths, kernel)
    out.backward(slope.to(out))
    return [out, *(x.grad for x in (q, *columns) if x.grad is not None)]


def losses(bench: Bench) -> None:
    """Every method's loss and gradients on the device, in both precisions, beside float32 on the CPU."""
    failures, worst = [], dict.fromkeys(LOSS_BARS, 0.0)
    for method, loss in [(name, loss) for name in METHODS for loss in _losses_of(name)]:
        expected = _loss(method, loss, "cpu", torch.float32)
        for dtype in (torch.float32, torch.bfloat16):
            found = _loss(method, loss, bench.device, dtype)
            by_loss, by_gradient = (apart(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
            name = f"{method}_{loss}_{str(dtype).removeprefix('torch.')}"
            worst[dtype] = max(worst[dtype], by_gradient)
            bench.note(**{name: {"loss": by_loss, "gradients": by_gradient}})
            if by_loss > LOSS_BARS[dtype] or by_gradient > GRADIENT_BARS[dtype]:
                failures.append(f"{name} by {by_loss:.2g} and {by_gradient:.2g}")
    bench.note(**{f"worst_gradient_{str(dtype).removeprefix('torch.')}": found for dtype, found in worst.items()})
    check(not failures, f"losses and gradients differ from the CPU's: {'; '.join(failures)}")


def _losses_of(method: str) -> tuple[str, ...]:
    """What `draft.loss` offers; a method without it has one."""
    field = DRAFT_METHODS[method].model_fields.get("loss")
    return get_args(field.annotation) if field else ("kl",)


def _loss(method: str, loss: str, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same draft's loss on the same batch, and all its gradients in one vector."""
    config = parse_draft_config({"method": method, **METHODS[method]}).model_copy(update={"loss": loss})
    torch.manual_seed(0)
    embedding, head = torch.randn(VOCABULARY, HIDDEN), torch.randn(VOCABULARY, HIDDEN) * 0.05
    chosen = torch.arange(config.vocabulary_size(VOCABULARY))
    head[len(chosen) :] = 0  # The target's argmax lies in the draft vocabulary, so both precisions count it.
    draft = build_draft(config, embedding, DraftVocabulary(chosen, VOCABULARY), LAYERS)
    draft.start_from(head)
    lengths = (40, 9, 79)
    count = sum(lengths)
    batch = PackedSamples(
        tokens=torch.randint(0, len(chosen), (count,)),
        loss_mask=torch.rand(count) > 0.2,
        aux=torch.randn(count, len(LAYERS) * HIDDEN).to(device, dtype),
        last=torch.randn(count, HIDDEN).to(device, dtype),
        lengths=lengths,
    )
    draft.to(device)
    rows = head.to(device, dtype)
    target = TargetProjection(rows[: len(chosen)], rows, 1.0, None)
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = draft.loss(batch, target, count, 64).loss
    found.backward()
    gradients = [p.grad.flatten().cpu().float() for p in draft.parameters() if p.grad is not None]
    return found, torch.cat(gradients)
