"""The target's top token by a head that is whole, padded, or divided over ranks; SGLang's objects as it makes them."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from infra.refusal import Refusal
from models.capture.sglang.top_tokens import top_tokens

HIDDEN, VOCABULARY = 8, 21


class Group:
    """Ranks in threads, which gather as SGLang's `GroupCoordinator` does."""

    def __init__(self, size: int):
        self.size, self._sent, self._barrier = size, {}, Barrier(size, timeout=120)

    def of(self, rank: int) -> Any:
        def all_gather(mine: Tensor, dim: int) -> Tensor:
            self._sent[rank] = mine
            self._barrier.wait()
            return torch.cat([self._sent[other] for other in range(self.size)], dim=dim)

        return SimpleNamespace(all_gather=all_gather)


def scheduler(head: Tensor, rank: int, ranks: int, attention_data_parallel: bool = False) -> Any:
    """Rank's part of the head, padded to an equal size with rows that would win."""
    rows = -(-len(head) // ranks) + 3
    start, end = (min(len(head), (rows - 3) * r) for r in (rank, rank + 1))
    weight = torch.full((rows, HIDDEN), 1e4)
    weight[: end - start] = head[start:end]
    shard = SimpleNamespace(num_org_elements=end - start, org_vocab_start_index=start, num_elements_padded=rows)
    processor = SimpleNamespace(
        do_tensor_parallel_all_gather=ranks > 1,
        do_tensor_parallel_all_gather_dp_attn=attention_data_parallel,
        use_attn_tp_group=False,
        _compute_lm_head=lambda hidden, lm_head: hidden @ lm_head.weight.T,
    )
    lm_head = SimpleNamespace(weight=weight, shard_indices=shard)
    model = SimpleNamespace(lm_head=lm_head, logits_processor=processor)
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)), enable_overlap=False)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_rank_finds_the_greatest_logit_of_all(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.capture.sglang.top_tokens.TOP_BYTES", 100)  # a few rows at a time
    g = torch.Generator().manual_seed(ranks)
    # Few values, so that there are ties, also between ranks: the smallest token wins.
    head = torch.randint(-1, 2, (VOCABULARY, HIDDEN), generator=g).float()
    last = torch.randint(-1, 2, (50, HIDDEN), generator=g).float().abs()
    expected, group = (last @ head.T).argmax(-1).int(), Group(ranks)

    def one(rank: int) -> Tensor:
        return top_tokens(scheduler(head, rank, ranks), SimpleNamespace(tp_group=group.of(rank)), last)

    with ThreadPoolExecutor(ranks) as threads:
        for found in threads.map(one, range(ranks)):
            assert torch.equal(found, expected)


def test_a_model_of_several_towers_has_its_head_in_the_text_part() -> None:
    head, last = torch.randn(VOCABULARY, HIDDEN), torch.randn(5, HIDDEN)
    whole = scheduler(head, 0, 1)
    runner = whole.tp_worker.model_runner
    runner.model = SimpleNamespace(language_model=runner.model)
    assert torch.equal(top_tokens(whole, None, last), (last @ head.T).argmax(-1).int())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_head_that_is_an_ordinary_embedding_is_whole_on_every_rank(ranks: int) -> None:
    head, last = torch.randn(VOCABULARY, HIDDEN), torch.randn(5, HIDDEN)
    one = scheduler(head, 0, ranks)
    one.tp_worker.model_runner.model.lm_head = SimpleNamespace(weight=head)
    assert torch.equal(top_tokens(one, None, last), (last @ head.T).argmax(-1).int())


def test_what_has_no_answer_is_refused_with_a_remedy() -> None:
    last, without = torch.zeros(1, HIDDEN), scheduler(torch.zeros(VOCABULARY, HIDDEN), 0, 1)
    del without.tp_worker.model_runner.model.lm_head
    with pytest.raises(Refusal, match=r"has no lm_head.*set training\.out_of_vocabulary=text"):
        top_tokens(without, None, last)
    with pytest.raises(Refusal, match=r"set generator\.sglang\.attention_data_parallel"):
        top_tokens(scheduler(torch.zeros(VOCABULARY, HIDDEN), 0, 2, attention_data_parallel=True), None, last)
