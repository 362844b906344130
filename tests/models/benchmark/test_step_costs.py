"""What is timed of the target: steps of different tokens, whose texts are read once for all numbers of texts."""

from collections.abc import Iterator

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from models.benchmark.step_costs import _Texts
from models.targets.model import TargetModel

SIZES = {"vocab_size": 4096, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
LENGTH = 12


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def convolutions() -> PreTrainedModel:
    """Its first layer keeps a state."""
    return Lfm2ForCausalLM(Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]))


@pytest.fixture(params=[llama, convolutions])
def target(request: pytest.FixtureRequest) -> TargetModel:
    torch.manual_seed(0)
    return TargetModel(request.param(), [0])


@pytest.fixture
def read(target: TargetModel) -> Iterator[list[torch.Tensor]]:
    """The tokens of every forward."""
    found: list[torch.Tensor] = []
    hook = target.model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    yield found
    hook.remove()


def test_a_step_verifies_different_tokens(target: TargetModel, read: list[torch.Tensor]):
    """One token repeated would go through the same experts again and again."""
    texts = _Texts(target, LENGTH, 3, 3)
    texts.verify(3, 8)()
    assert read[-1].shape == (3, 8)
    assert len(read[-1].unique()) > 20


def test_all_steps_share_one_reading_of_the_texts(target: TargetModel, read: list[torch.Tensor]):
    texts = _Texts(target, LENGTH, 4, 4)
    steps = {(batch, tokens): texts.verify(batch, tokens) for batch in (1, 2, 4) for tokens in (1, 5)}
    assert [tokens.shape for tokens in read if tokens.shape[1] == LENGTH] == [(4, LENGTH)]
    for (batch, tokens), run in steps.items():
        chosen = run()
        new, cache = read[-1], target.new_cache()
        target.forward(texts.tokens[:batch], cache)
        alone = target.logits(target.forward(new, cache).last.flatten(0, 1)).argmax(-1)
        if target.rewinds:
            assert torch.equal(chosen, alone), (batch, tokens)
        assert chosen.shape == alone.shape
