"""Decoding on an accelerator writes what it writes on the CPU: every source, chains and trees, greedy and sampled."""

import pytest
import torch
from emulated_device import DEVICE, emulated_device

from models.config.draft import parse_draft_config
from models.decoding.continuations import continue_batch
from models.decoding.lossless import LosslessCheck
from models.decoding.prompt_lookup import PromptLookup
from models.decoding.simulated import features, simulate
from models.decoding.speculative import speculate_together
from models.decoding.suffix_decoding import SuffixDecoding
from models.decoding.token_recycling import TokenRecycling
from models.drafts.registry import build_draft
from models.drafts.sampling import GREEDY, Sampling
from models.drafts.trees import DynamicTree
from models.drafts.vocabulary import DraftVocabulary
from models.targets.model import TargetModel

PROMPTS, NEVER = [[1, 2, 3, 4], [5, 6, 7], [9, 8, 7, 6, 5, 4]], frozenset()
SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 48}
DRAFTS = {
    "eagle3": {"vocab_size": 40, "ttt_steps": 3} | SHAPE,
    "dflash": {"block_size": 4, "layer_types": ["full_attention"] * 2, "anchors": 6} | SHAPE,
    "medusa": {"vocab_size": 40, "heads": 3},
}
TRAINING_FREE = {"prompt lookup": PromptLookup, "Token Recycling": TokenRecycling, "suffix decoding": SuffixDecoding}
TREE = ("eagle3", DynamicTree(4, 3, 9))
WAYS = [*((name, 3) for name in (*DRAFTS, *TRAINING_FREE)), TREE]
CASES = [("llama", *way) for way in WAYS] + [("gemma", *way) for way in (("eagle3", 3), TREE)]


def make_source(name: str):
    if name in TRAINING_FREE:
        return TRAINING_FREE[name]()
    torch.manual_seed(0)
    config = parse_draft_config({"method": name} | DRAFTS[name])
    vocabulary = DraftVocabulary(torch.arange(config.vocabulary_size(61)), 61)
    draft = build_draft(config, torch.randn(61, 32), vocabulary, (0, 1))
    draft.start_from(torch.randn(61, 32))
    return draft


def moved(target: TargetModel) -> TargetModel:
    return TargetModel(target.model.to(DEVICE), target.aux_layer_ids)


@pytest.mark.parametrize(("kind", "name", "shape"), CASES, ids=lambda x: x if isinstance(x, str) else type(x).__name__)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_writes_the_same(request, llama, kind, name, shape, temperature):
    target = llama(3) if kind == "llama" else request.getfixturevalue("gemma")
    source = make_source(name)

    def write(target: TargetModel, source) -> list[tuple[int, ...]]:
        sampling = GREEDY
        if temperature:
            sampling = Sampling(temperature, 0.9, torch.Generator(target.device).manual_seed(1))
        texts = speculate_together(target, source, PROMPTS, shape, 8, NEVER, sampling=sampling)
        return [text.tokens for text in texts]

    expected = write(target, source)
    with emulated_device():
        if name in DRAFTS:
            source.to(DEVICE)
        assert write(moved(target), source) == expected


@pytest.mark.parametrize("name", DRAFTS)
def test_simulates_the_same(llama, name):
    target, draft = llama(3), make_source(name)
    text = continue_batch(target, PROMPTS[:1], 9, NEVER)[0]
    expected = simulate(draft, PROMPTS[0], text, features(target, [*PROMPTS[0], *text]), 3, eos_ids=NEVER)
    with emulated_device():
        there = moved(target)
        assert continue_batch(there, PROMPTS[:1], 9, NEVER)[0] == text
        aux = features(there, [*PROMPTS[0], *text])
        assert simulate(draft.to(DEVICE), PROMPTS[0], text, aux, 3, eos_ids=NEVER) == expected


def test_an_exact_target_on_the_cpu_judges_one_on_a_device(llama):
    exact, prefix = llama(3), PROMPTS[0]
    token = continue_batch(exact, [prefix], 1, NEVER)[0][0]
    with emulated_device():
        check = LosslessCheck(moved(llama(3)), lambda: exact, 8, NEVER)
        assert check.judge(prefix, 0, token).gap == 0.0
