"""What is Medusa's alone: how it starts, what it reads, and where its proposals end."""

import torch

from models.config.medusa import MedusaConfig
from models.drafts.medusa.module import MedusaDraft
from models.drafts.trees import NO_PROPOSAL
from models.drafts.vocabulary import DraftVocabulary

HIDDEN, TARGET_VOCABULARY = 12, 40


def make(**changes) -> MedusaDraft:
    torch.manual_seed(0)
    config = MedusaConfig.model_validate({"vocab_size": 24, "heads": 3} | changes)
    vocabulary = DraftVocabulary(torch.arange(5, 29), TARGET_VOCABULARY)
    return MedusaDraft(config, torch.randn(TARGET_VOCABULARY, HIDDEN), vocabulary, (0, 2, 3))


def test_every_head_starts_as_the_targets_head_over_the_normed_feature():
    draft, head, aux = make(), torch.randn(TARGET_VOCABULARY, HIDDEN), torch.randn(6, 3 * HIDDEN)
    draft.start_from(head)
    feature = torch.nn.functional.rms_norm(aux[:, -HIDDEN:], (HIDDEN,), eps=1e-6)
    expected = 5 + (feature @ head[5:29].T).argmax(-1)
    rollout = draft.rollout(torch.zeros(7, dtype=torch.long), aux, 3)
    assert all(torch.equal(rollout[:, step], expected) for step in range(3))


def test_only_the_highest_layer_is_read():
    draft, aux = make(), torch.randn(6, 3 * HIDDEN)
    tokens, other = torch.zeros(7, dtype=torch.long), aux.clone()
    other[:, : 2 * HIDDEN] = 0
    assert torch.equal(draft.rollout(tokens, aux, 3), draft.rollout(tokens, other, 3))


def test_beyond_its_heads_there_is_no_proposal(alone):
    draft = make()
    proposed = alone(draft).propose(torch.arange(7), torch.randn(6, 3 * HIDDEN), 5)
    assert proposed[3:].tolist() == [NO_PROPOSAL] * 2
    assert NO_PROPOSAL not in proposed[:3].tolist()


def test_sglang_does_not_serve_it():
    assert make().engine_config() is None
