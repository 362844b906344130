"""What a run may learn of users' requests."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from infra.files.run_folder import RunFolder
from infra.records.data_path import SamplesRecord, TargetRecord
from infra.records.live import LiveText
from infra.refusal import Refusal
from models.capture.live_texts import LiveFilter
from models.config.recipe import load_recipe
from models.data.private_data import find_private_data
from models.data.sample_set import SampleSet, write_sample_set
from models.data.samples import Splits
from models.data.tokenizer import read_tokenizer
from models.run import PreparedRun, RunWithTarget
from tests.models.chat_templates import FAMILIES

TINY = Path(__file__).parents[3] / "recipes" / "tiny.yaml"
LIVE = "{servers: [{address: 'http://127.0.0.1:1', socket: /run/a}], consent: users agreed, retention_days: 1}"
SETTINGS = (
    "generator.engine=serving",
    f"generator.live={LIVE}",
    "data.source=live",
    "data.max_samples=64",
    "data.max_tokens=64",
    "data.overlong=truncate",
    "training.start_from=champion",
)


@pytest.fixture
def make_filter(tiny_target: TargetRecord, tmp_path: Path) -> Callable[..., LiveFilter]:
    def make(*overrides: str, known: Sequence[str] = ()) -> LiveFilter:
        run = RunWithTarget(RunFolder(tmp_path), load_recipe(TINY, [*SETTINGS, *overrides]), tiny_target)
        return LiveFilter(run, find_private_data, known)

    return make


@pytest.fixture
def as_text(tiny_target: TargetRecord) -> Callable[[str, str], LiveText]:
    tokenizer: PreTrainedTokenizerBase = read_tokenizer(tiny_target.path)

    def tokens(text: str) -> tuple[int, ...]:
        ids: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
        return tuple(ids)

    return lambda asked, answered: LiveText(prompt=tokens(asked), answer=tokens(answered))


def test_what_is_kept(make_filter: Callable[..., LiveFilter], as_text: Callable[[str, str], LiveText]) -> None:
    text = as_text("How do I sort a list of names?", "Use the sorted function of Python.")
    learned = make_filter().learned(text)
    assert learned is not None
    assert learned.tokens == (*text.prompt, *text.answer)
    sample = learned.encoded()
    assert sample.loss_mask.tolist() == [False] * len(text.prompt) + [True] * len(text.answer)
    assert learned.marked == (*(-1 - token for token in text.prompt), *text.answer)


@pytest.mark.parametrize(
    ("asked", "answered", "kind"),
    [
        ("Write to jane.doe@example.com for me", "It is done, all of it.", "EMAIL_ADDRESS"),
        ("What is my key?", "It is password = hunter2hunter2 as you said.", "SECRET"),
        ("Is sk-abcdefghij", "klmnopqrstuvwxyz0123 a key?", "SECRET"),
        ("Name the first letter", "a", "too short"),
    ],
)
def test_what_is_left_out(
    make_filter: Callable[..., LiveFilter],
    as_text: Callable[[str, str], LiveText],
    asked: str,
    answered: str,
    kind: str,
) -> None:
    left_out = make_filter("data.min_tokens=16")
    assert left_out.learned(as_text(asked, answered)) is None
    assert left_out.left_out[kind] == 1


def test_nothing_is_learned_twice(
    make_filter: Callable[..., LiveFilter], as_text: Callable[[str, str], LiveText]
) -> None:
    text = as_text("How do I sort a list of names?", "Use the sorted function.")
    first = make_filter()
    learned = first.learned(text)
    assert learned is not None
    assert first.learned(text) is None
    assert make_filter(known=[learned.encoded().id]).learned(text) is None


def test_benchmark_prompts_are_left_out(
    make_filter: Callable[..., LiveFilter], as_text: Callable[[str, str], LiveText], tmp_path: Path
) -> None:
    question = "Natalia sold clips to forty eight of her friends in April and half as many in May, how many in all?"
    (tmp_path / "prompts.jsonl").write_text(f'{{"question": "{question}"}}\n')
    left_out = make_filter(f'data.exclude=["{tmp_path}/prompts.jsonl"]')
    assert left_out.learned(as_text(question, "Seventy two clips")) is None
    assert left_out.left_out["benchmark's prompt"] == 1


CHATS = ("chatml", "llama3", "gemma3", "mistral", "r1", "glm4")


def rendered(family: str, *turns: tuple[str, str], answer: str) -> LiveText:
    template = FAMILIES[family].open()
    tokenizer: Any = template.tokenizer
    asked = template.render([{"role": role, "content": said} for role, said in turns], prompt=True)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (asked, answer + template.ends[0])]
    return LiveText(prompt=tuple(ids[0]), answer=tuple(ids[1]))


@pytest.fixture
def chat_target(tiny_target: TargetRecord, tmp_path: Path) -> Callable[[str], TargetRecord]:
    """A target with the tokenizer of a family; nothing else of it is read."""

    def make(family: str) -> TargetRecord:
        FAMILIES[family].open().tokenizer.save_pretrained(tmp_path / "target")
        return tiny_target.model_copy(update={"path": str(tmp_path / "target")})

    return make


@pytest.mark.parametrize("family", CHATS)
def test_short_benchmark_prompts_are_found_in_rendered_chats(
    chat_target: Callable[[str], TargetRecord], tmp_path: Path, family: str
) -> None:
    """As in other training text: what is asked first, word for word."""
    (tmp_path / "prompts.jsonl").write_text('{"question": "How do I reset my password?"}\n')
    settings = [*SETTINGS, "data.max_tokens=512", f'data.exclude=["{tmp_path}/prompts.jsonl"]']
    run = RunWithTarget(RunFolder(tmp_path), load_recipe(TINY, settings), chat_target(family))
    left_out, asked = LiveFilter(run, lambda texts: set()), ("user", "How do I reset my password?")
    assert left_out.learned(rendered(family, asked, answer="Open the settings.")) is None
    later = ("user", "I cannot get in"), ("assistant", "Why?"), asked
    assert left_out.learned(rendered(family, asked, *later[1:2], ("user", "So?"), answer="Open the settings.")) is None
    assert left_out.left_out == {"benchmark's prompt": 2}
    assert left_out.learned(rendered(family, *later, answer="Open the settings.")) is not None
    assert left_out.learned(rendered(family, ("user", asked[1] + " Or my name"), answer="As you like.")) is not None


@pytest.mark.parametrize("family", ["chatml", "llama3"])
def test_held_out_dialogues_are_not_learned(
    chat_target: Callable[[str], TargetRecord], tiny_samples: SamplesRecord, tmp_path: Path, family: str
) -> None:
    """A clock in the system prompt makes no other dialogue of it, nor does another answer."""
    question = ("user", "How can I export all my invoices of last year as one file?")

    def at(minute: int, *turns: tuple[str, str], answer: str = "Go to billing, then export.") -> LiveText:
        return rendered(family, ("system", f"You help. It is 10:{minute:02d}."), *turns, answer=answer)

    target, config = chat_target(family), load_recipe(TINY, [*SETTINGS, "data.max_tokens=512"])
    heldout = LiveFilter(RunWithTarget(RunFolder(tmp_path), config, target), lambda texts: set()).learned(
        at(1, question)
    )
    assert heldout is not None
    samples = tiny_samples.model_copy(update={"path": str(tmp_path / "samples")})
    (tmp_path / "samples").mkdir()
    write_sample_set(tmp_path / "samples", Splits([heldout.encoded()], [heldout.encoded()]), samples)
    left_out = LiveFilter(PreparedRun(RunFolder(tmp_path), config, target, samples), lambda texts: set())
    for minute, answer in ((2, "Go to billing, then export."), (3, "Ask support.")):
        assert left_out.learned(at(minute, question, answer=answer)) is None
    assert left_out.learned(at(4, question, ("assistant", "Ask."), ("user", "Whom?"))) is None
    assert left_out.left_out == {"held out": 3}
    assert left_out.learned(at(1, ("user", question[1] + " Or as two?"))) is not None


def test_the_ledger_keeps_which_tokens_are_learned(
    make_filter: Callable[..., LiveFilter], as_text: Callable[[str, str], LiveText], tiny_samples: Any
) -> None:
    learned = make_filter().learned(as_text("How do I sort names?", "Use the sorted function."))
    assert learned is not None
    samples = SampleSet.open(Path(tiny_samples.path), "train")
    samples.prompts[0] = -1
    sample = samples.answered(0, learned.marked)
    assert sample.tokens.tolist() == list(learned.tokens)
    assert sample.loss_mask.tolist() == learned.encoded().loss_mask.tolist()
    assert not len(samples.prompt(0))  # pyright: ignore[reportArgumentType]


def test_servers_with_users_are_taken_to_compute_in_their_own_default() -> None:
    """The canary would otherwise hold a bfloat16 server to float32's tolerance, where runs lease no GPU."""
    config = load_recipe(TINY, list(SETTINGS))
    assert config.capture_dtype == "float32"
    unsaid = config.model_copy(update={"generator": config.generator.model_copy(update={"compute_dtype": None})})
    assert unsaid.capture_dtype == "bfloat16"


def test_a_run_beside_servers_has_its_gpus_for_one_copy_of_the_target() -> None:
    """Its generators stand beside the servers, and need none."""
    second = LIVE.replace("/run/a}", "/run/a}, {address: 'http://127.0.0.1:2', socket: /run/b}")
    changes = [f"generator.live={second}", "generator.count=2", "pools.inference_gpus=2"]
    changes += ["generator.compute_dtype=bfloat16", "benchmark.compute_dtype=bfloat16"]
    assert load_recipe(TINY, [*SETTINGS, *changes]).gpus_per_copy == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("generator.live=null", "live is not set"),
        ("generator.engine=transformers", "live is set"),
        ("generator.count=2", "generator.live names 1 servers"),
        ("data.source=python-docs", "set data.source=live and generator.engine=serving"),
        ("data.max_samples=null", "set data.max_samples"),
        ("data.regeneration={}", "leave data.regeneration"),
        ("data.overlong=drop", "data.overlong"),
        ("training.epochs=2", "set it to 1"),
        ("training.start_from=null", "set training.start_from=furthest"),
        ("transport={kind: stored, folder: objects}", "leave it out"),
        ("pools={sharing: alternate, inference_gpus: 1, training_gpus: 1}", "leave pools.sharing out"),
        (f"generator.live={LIVE.replace('users agreed', 'yes')}", "consent"),
        (f"generator.live={LIVE.replace(', retention_days: 1', '')}", "retention_days"),
    ],
)
def test_recipes_that_cannot_learn_from_users_are_refused(override: str, message: str) -> None:
    with pytest.raises(Refusal, match=message):
        load_recipe(TINY, [*SETTINGS, override])
