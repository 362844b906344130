"""What real SGLang servers capture while they answer equals a prefill of the same text, whatever happens on the way."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.records.data_path import TargetRecord
from models.capture.sglang.engine import SGLangEngine
from models.config.recipe import load_recipe
from models.decoding.plain import continue_greedily
from models.run import PreparedRun
from models.targets.hidden_states import HiddenStates
from models.targets.model import TargetModel, eos_ids
from models.targets.prepare import prepare_target

RECIPES = Path(__file__).parents[4] / "recipes"
LENGTHS = (1, 3, 17, 40, 64, 65, 100, 130)
CHUNK = 64
POOL = 560
"""Tokens in the server's memory: fewer than all requests of a test come to."""
ANSWER = 64
SETTINGS = (
    f"generator.sglang.chunked_prefill_tokens={CHUNK}",
    f"generator.sglang.requests_in_flight={len(LENGTHS)}",
    # Requests are let in although they will not all fit: the engine takes some back.
    'generator.sglang.arguments=["--max-total-tokens","{pool}","--schedule-conservativeness","0.01"]',
)
DIVIDED = ("generator.sglang.tensor_parallel=2", "generator.sglang.attention_data_parallel=2")
TARGETS = ("llama", "qwen3", "gemma3", "qwen3, data-parallel attention")
LONG = TARGETS[1:]
TAKEN_BACK = "Retract requests"
ROUNDS = 20
"""Requests may reach a busy machine so far apart that all fit into the memory: then they are sent again."""

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Served:
    """One server, and the same target in transformers."""

    run: PreparedRun
    engine: SGLangEngine
    reference: TargetModel

    @property
    def ends(self) -> frozenset[int]:
        return eos_ids(Path(self.run.target.path))

    def answer(self, prompt: torch.Tensor, **sampling: Any) -> tuple[HiddenStates, list[int]]:
        return self.engine._take_back("test", prompt, (), {"temperature": 0.0, "max_new_tokens": ANSWER, **sampling})

    def assert_as_prefilled(self, prompt: torch.Tensor, hidden: HiddenStates, answer: list[int]) -> None:
        read = torch.tensor([*prompt.tolist(), *answer[:-1]])
        expected = self.reference.forward(read[None])
        for mine, theirs in ((hidden.aux, expected.aux[0]), (hidden.last, expected.last[0])):
            # Relative: Gemma's values are a thousand times those of the others.
            assert (mine - theirs).abs().max() <= 1e-4 * max(1.0, theirs.abs().max().item())
        if hidden.top is not None:
            assert torch.equal(hidden.top, self.reference.top_tokens(expected.last[0]))


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in TARGETS]
)
def served(
    request: pytest.FixtureRequest,
    sglang_run: Callable[..., PreparedRun],
    tiny_target: TargetRecord,
    qwen3_target: TargetRecord,
) -> Iterator[Served]:
    name, _, divided = request.param.partition(", ")
    targets = {"llama": tiny_target, "qwen3": qwen3_target}
    # A draft vocabulary has the target's top tokens captured, too.
    settings = ("target.aux_layer_ids=[2, 9, 15]",) if name == "gemma3" else ("draft.vocab_size=700",)
    target = targets.get(name) or prepare_target(load_recipe(RECIPES / "quickstart.yaml").target)
    # With data-parallel attention each half of the ranks has a pool.
    sizes = (each.replace("{pool}", str(POOL // 2 if divided else POOL)) for each in SETTINGS)
    run = sglang_run(*sizes, *settings, *(DIVIDED if divided else ()), target=target)
    with pytest.MonkeyPatch.context() as patch:
        if divided:
            patch.setenv("SGLANG_PLATFORM", "draftsmith_test_cpu")  # SGLang exchanges rows by kernels of GPUs
        engine = SGLangEngine(run, 0)
    with closing(engine):
        yield Served(run, engine, TargetModel.load(Path(target.path), run.config.target.aux_layer_ids, torch.float32))


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, 1000, (length,), generator=generator) for length in LENGTHS]


def test_answers_that_are_taken_back_and_begun_again(served: Served) -> None:
    """All at once; more than the engine's memory holds. The text is the target's own."""
    asked = prompts()
    expected = [continue_greedily(served.reference, each.tolist(), ANSWER, served.ends) for each in asked]
    for _ in range(ROUNDS):
        with ThreadPoolExecutor(len(asked)) as threads:
            found = list(threads.map(served.answer, asked))
        for prompt, text, (hidden, answer) in zip(asked, expected, found, strict=True):
            assert answer == text
            served.assert_as_prefilled(prompt, hidden, answer)
        if TAKEN_BACK in served.engine.server.process.log.read_text():
            break
    else:
        pytest.fail(f"no request was taken back in {ROUNDS} rounds: the test shows nothing")
    assert not list(served.run.open_transport().keys())


def test_answers_that_end_at_any_token(served: Served) -> None:
    prompt = prompts()[2]
    whole = continue_greedily(served.reference, prompt.tolist(), 12, frozenset())
    ends = sorted({whole.index(token) for token in whole})
    with ThreadPoolExecutor(len(LENGTHS)) as threads:
        found = list(threads.map(lambda at: served.answer(prompt, stop_token_ids=[whole[at]], ignore_eos=False), ends))
    for at, (hidden, answer) in zip(ends, found, strict=True):
        assert answer == whole[: at + 1]
        served.assert_as_prefilled(prompt, hidden, answer)


def test_sampled_answers(served: Served) -> None:
    for prompt in prompts()[:4]:
        hidden, answer = served.answer(prompt, temperature=1.0, top_p=0.9)
        served.assert_as_prefilled(prompt, hidden, answer)


def test_answers_beside_prefills(served: Served) -> None:
    """In the same batches; the answers are longer than what the engine hands on of an answer at a time."""
    key = f"{served.run.folder.name}/0/{{}}/1"

    def ask(index: int) -> tuple[HiddenStates, list[int]] | None:
        prompt = prompts()[index // 2]
        if index % 2:
            return served.answer(prompt)
        captured = served.engine.capture(key.format(index), prompt)
        served.run.open_transport().delete(captured.record.key)
        assert captured.record.nbytes == len(prompt) * served.run.layout.bytes_per_token
        return None

    with ThreadPoolExecutor(2 * len(LENGTHS)) as threads:
        found = list(threads.map(ask, range(2 * len(LENGTHS))))
    for prompt, answered in zip(prompts(), found[1::2], strict=True):
        assert answered is not None
        served.assert_as_prefilled(prompt, *answered)
