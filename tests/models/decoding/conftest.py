"""Tiny random targets whose greedy text varies, and sources that propose for them."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from models.decoding.plain import prefill
from models.drafts.sampling import Sampling
from models.drafts.trees import DynamicTree, Proposals, Tree
from models.targets.model import TargetModel

sys.path.append(str(Path(__file__).parent))  # test modules import text_by_text from this folder

from text_by_text import TextByText, grown

VOCABULARY = 61


class CorruptedOracle(TextByText):
    """Proposes the target's own greedy text, with an error wherever a seeded hash of the place says so."""

    def __init__(self, target: TargetModel, error_share: float, seed: int):
        self.target, self.error_share, self.seed = target, error_share, seed
        self.known: dict[tuple[int, ...], int] = {}

    def proposer(self) -> "CorruptedOracle":
        return self

    def propose(self, sequence: Tensor, aux: Tensor, lookahead: int) -> Tensor:
        text = sequence.tolist()
        for _ in range(lookahead):
            text.append(self._next(tuple(text)))
        own = text[len(sequence) :]
        return torch.tensor([self._perhaps_wrong(len(sequence), step, token) for step, token in enumerate(own)])

    def sample(self, sequence: Tensor, aux: Tensor, lookahead: int, sampling: Sampling) -> Proposals:
        return Proposals(self.propose(sequence, aux, lookahead), None)

    def propose_tree(self, sequence: Tensor, aux: Tensor, shape: DynamicTree, sampling: Sampling) -> Tree:
        """Random tokens, among them, at a random rank, the target's own next one unless it is left out by error."""
        text = sequence.tolist()
        for _ in range(shape.depth):
            text.append(self._next(tuple(text)))

        def scores(path: list[int]) -> Tensor:
            mixed = (self.seed * 1_000_003 + len(sequence) * 97 + hash(tuple(path)) % 9_973) % 2**31
            generator = torch.Generator().manual_seed(mixed)
            drawn = 3 * torch.randn(VOCABULARY, generator=generator)
            if path == text[: len(path)] and torch.rand(1, generator=generator).item() >= self.error_share:
                rank = int(torch.randint(shape.topk, (1,), generator=generator))
                drawn[text[len(path)]] = drawn.topk(shape.topk).values[rank] + 1e-3
            return drawn

        every = torch.arange(VOCABULARY)
        return grown(shape, sequence, lambda texts: torch.stack([scores(path) for path in texts.tolist()]), every)

    def _next(self, text: tuple[int, ...]) -> int:
        if text not in self.known:
            self.known[text] = prefill(self.target, text).token
        return self.known[text]

    def _perhaps_wrong(self, place: int, step: int, token: int) -> int:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + place * 97 + step)
        wrong = torch.rand(1, generator=generator).item() < self.error_share
        return (token + 1) % VOCABULARY if wrong else token

    def rollout(self, tokens: Tensor, aux: Tensor, lookahead: int, first: int = 0) -> Tensor:
        assert len(aux) == len(tokens) - 1
        rows = range(first, len(aux))
        return torch.stack([self.propose(tokens[: row + 2], aux[: row + 1], lookahead) for row in rows])


def _loud(model: torch.nn.Module, seed: int) -> None:
    """Large weights, so that the next token depends on the text and greedy text does not settle."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 2.5 / parameter.shape[-1] ** 0.5)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama() -> Callable[..., TargetModel]:
    """A two-layer Llama by seed."""

    def build(seed: int, vocabulary: int = VOCABULARY) -> TargetModel:
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=False,
        )
        model = LlamaForCausalLM(config)
        _loud(model, seed)
        return TargetModel(model, [0, 1])

    return build


@pytest.fixture
def gemma() -> TargetModel:
    """A Gemma 3 with a sliding window of 8, three sliding layers to one full one."""
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        max_position_embeddings=512,
    )
    model = Gemma3ForCausalLM(config)
    _loud(model, 5)
    return TargetModel(model, [0, 2])


@pytest.fixture
def oracle() -> type[CorruptedOracle]:
    return CorruptedOracle


@pytest.fixture
def prompts() -> list[list[int]]:
    """Ragged prompts of 1 to 19 tokens."""
    generator = torch.Generator().manual_seed(11)
    lengths = [7, 1, 12, 3, 19, 7, 5]
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]
