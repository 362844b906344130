"""DSpark: its loss equals a slow one, its confidence head learns acceptance rates, and it decodes without loss."""

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import LlamaConfig, LlamaForCausalLM

from models.config.dspark import DSparkConfig
from models.decoding.calibration import decoded_confidences
from models.decoding.plain import continue_greedily, prefill
from models.decoding.simulated import features, simulate
from models.decoding.speculative import speculate
from models.drafts.base import PackedSamples, TargetProjection, supervised_positions
from models.drafts.batched_proposer import PackedTexts
from models.drafts.dspark.module import DSparkDraft
from models.drafts.sampling import GREEDY
from models.drafts.vocabulary import DraftVocabulary
from models.targets.model import TargetModel

HIDDEN, VOCABULARY, AUX, BLOCK = 12, 40, (0, 2), 4
HEADS = ("vanilla", "gated", "rnn")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def make_draft(seed: int = 0, dtype: torch.dtype = torch.float64, **changes) -> DSparkDraft:
    torch.manual_seed(seed)
    knobs = {
        "block_size": BLOCK,
        "layer_types": ("full_attention", "full_attention"),
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 20,
        "markov_rank": 5,
    }
    config = DSparkConfig.model_validate(knobs | changes)
    ids = torch.randperm(VOCABULARY)[: config.vocabulary_size(VOCABULARY)].sort().values
    draft = DSparkDraft(config, torch.randn(VOCABULARY, HIDDEN), DraftVocabulary(ids, VOCABULARY), AUX)
    for name, parameter in draft.named_parameters():
        torch.nn.init.normal_(parameter, float("norm" in name), 0.2 if "norm" in name else 0.5)
    draft.start_from(torch.randn(VOCABULARY, HIDDEN))
    return draft.to(dtype)


def make_batch(length: int, seed: int = 1) -> PackedSamples:
    g = torch.Generator().manual_seed(seed)
    return PackedSamples(
        tokens=torch.randint(VOCABULARY, (length,), generator=g),
        loss_mask=torch.rand(length, generator=g) < 0.8,
        aux=torch.randn(length, len(AUX) * HIDDEN, generator=g, dtype=torch.float64),
        last=torch.randn(length, HIDDEN, generator=g, dtype=torch.float64),
        lengths=(length,),
    )


def slow_loss(draft: DSparkDraft, sample: PackedSamples, head: torch.Tensor, total: int) -> torch.Tensor:
    """As the paper has it, block by block and proposal by proposal; labels of confidences without gradients.

    `head`: the target's whole head, at a scale of 0.5 and a soft cap of 3.
    """
    config, ids = draft.config, draft.vocabulary.target_ids.tolist()
    weights = [2.718281828459045 ** (-k / config.decay_gamma) for k in range(BLOCK)]
    loss = torch.zeros((), dtype=torch.float64)
    for anchor in range(1, len(sample.tokens) - 1):
        if not (sample.loss_mask[anchor] and sample.loss_mask[anchor + 1]):
            continue
        texts = PackedTexts(sample.tokens[1:], sample.aux[:-1], (len(sample.tokens) - 1,))
        rows = torch.tensor([anchor - 1])
        (_, hidden), *_ = draft._blocks(texts, rows, BLOCK)
        every = list(draft.logits_along(texts, BLOCK, rows))
        for k in range(BLOCK):
            if anchor + k + 1 >= len(sample.tokens) or not sample.loss_mask[anchor + k + 1]:
                break
            own = int(sample.tokens[anchor + k + 1])
            if own not in ids:
                continue
            q = every[k][0].softmax(-1)
            everywhere = 3 * torch.tanh(head @ sample.last[anchor + k] * 0.5 / 3)
            p = everywhere.softmax(-1)[draft.vocabulary.target_ids]
            acceptance = torch.minimum(p, q).sum()
            part = -config.cross_entropy_weight * q[ids.index(own)].log()
            part = part + config.tv_weight * ((q - p).abs().sum() + 1 - p.sum())
            part = part - config.kl_weight * (p / p.sum() * q.log()).sum()
            if config.confidence_head:
                given = [hidden[0, k]]
                if config.confidence_reads_token:
                    given.append(draft.markov_head.markov_w1.weight[sample.tokens[anchor + k]])
                said = draft.confidence_head.proj.weight[0] @ torch.cat(given) + draft.confidence_head.proj.bias[0]
                told = binary_cross_entropy_with_logits(said, acceptance.detach())
                part = part + config.confidence_weight * told
            loss = loss + weights[k] / sum(weights) * part / total
    return loss


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize(
    "changes",
    [
        {"confidence_weight": 0.7},
        {"vocab_size": 30, "kl_weight": 0.3, "confidence_reads_token": False},
        {"confidence_head": False, "tv_weight": 0.0, "cross_entropy_weight": 1.0},
    ],
)
def test_loss_and_gradients_equal_the_slow_ones(kind, changes):
    draft, batch = make_draft(3, markov_head=kind, decay_gamma=2.0, **changes), make_batch(14, 5)
    head = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    draft.start_from(head)
    full = None if draft.vocabulary.whole else head
    target = TargetProjection(head[draft.vocabulary.target_ids], full, 0.5, 3.0)
    outcome, expected = draft.loss(batch, target, 11, 8), slow_loss(draft, batch, head, 11)
    assert outcome.loss.item() == pytest.approx(expected.item(), rel=1e-6)
    parameters = list(draft.parameters())
    for ours, theirs in zip(*(torch.autograd.grad(loss, parameters) for loss in (outcome.loss, expected)), strict=True):
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
    positions = supervised_positions(batch.loss_mask, batch.lengths)
    assert outcome.supervised == len(positions)
    assert int(outcome.tried[0]) == int(batch.loss_mask[positions].sum()) < len(positions)


def test_an_untrained_head_adds_nothing():
    """The draft begins as its backbone, whatever the tokens before are."""
    config = make_draft().config
    vocabulary = DraftVocabulary(torch.arange(VOCABULARY), VOCABULARY)
    draft = DSparkDraft(config, torch.randn(VOCABULARY, HIDDEN), vocabulary, AUX)
    draft.start_from(torch.randn(VOCABULARY, HIDDEN))
    normed = torch.randn(3, BLOCK, HIDDEN)
    for step, logits in enumerate(draft.step_logits(normed, lambda _: torch.tensor([1, 5, 9]))):
        assert torch.equal(logits, draft.logits(normed[:, step]))


@pytest.fixture(scope="module")
def target() -> TargetModel:
    """A random Llama, loud enough for its greedy text to vary."""
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4, max_position_embeddings=256))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 2.5 / parameter.shape[-1] ** 0.5)
        model.lm_head.weight *= 3
    return TargetModel(model, AUX)


@pytest.mark.parametrize("kind", HEADS)
def test_overfit_on_one_text_it_is_accepted_and_lossless(target, kind):
    """The short overfit gate: nearly all is accepted where it was trained, and all text stays the target's."""
    embedding, prompt, most = target.model.get_input_embeddings().weight.detach(), [3, 9, 21, 5], 40
    shaped = make_draft(dtype=torch.float32, markov_head=kind, intermediate_size=64)
    draft = DSparkDraft(shaped.config, embedding, shaped.vocabulary, AUX)
    draft.start_from(target.head_weight.detach())
    text = continue_greedily(target, prompt, most, frozenset())
    tokens = torch.tensor([*prompt, *text])
    states = target.forward(tokens.unsqueeze(0))
    mask = torch.ones(len(tokens), dtype=torch.bool)
    batch = PackedSamples(tokens, mask, states.aux[0], states.last[0], (len(tokens),))
    head = TargetProjection(target.head_weight.detach(), None, 1.0, None)
    optimizer = torch.optim.Adam(draft.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        draft.loss(batch, head, len(tokens), 256).loss.backward()
        optimizer.step()
    lengths = []
    for start in (prompt, [8, 30, 2], [17]):
        own = continue_greedily(target, start, most, frozenset())
        aux = features(target, [*start, *own])
        walks = simulate(draft, start, own, aux, BLOCK + 1, eos_ids=frozenset())
        for lookahead in (1, BLOCK, BLOCK + 1):
            decoded = speculate(target, draft, start, lookahead, most, frozenset())
            assert list(decoded.tokens) == list(own)
            assert decoded.counts == walks[lookahead - 1]
        lengths.append(walks[BLOCK - 1].tokens / walks[BLOCK - 1].steps)
    assert lengths[0] >= 0.95 * (BLOCK + 1)


def test_confidences_are_those_of_texts_that_end_as_the_target_ends_them(target):
    """A text that its first token ends has none; the last step of a text, which its end may cut, is left out."""
    embedding, shaped = target.model.get_input_embeddings().weight.detach(), make_draft(dtype=torch.float32)
    draft = DSparkDraft(shaped.config, embedding, shaped.vocabulary, AUX)
    draft.start_from(target.head_weight.detach())
    prompts = ([3, 9, 21, 5], [8, 30, 2])
    first, second = (continue_greedily(target, prompt, 20, frozenset()) for prompt in prompts)
    ends = frozenset({first[0]})
    expected = speculate(target, draft, prompts[1], BLOCK, 20, ends).counts.accepted[:-1]
    assert first[0] != second[0]
    assert len(expected) > 2
    texts = [(prefill(target, prompt), GREEDY) for prompt in prompts]
    logits, accepted = decoded_confidences(draft, texts, BLOCK, 20, target, ends)
    assert accepted.tolist() == list(expected)
    assert logits.shape == (len(expected), BLOCK)
    nothing, none = decoded_confidences(draft, [(prefill(target, prompts[0]), GREEDY)], BLOCK, 20, target, ends)
    assert (nothing.shape, none.shape) == ((0, BLOCK), (0,))
