"""A recipe's own template file and its arguments: used everywhere, recorded, and refused with a reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from infra.records.data_path import TargetRecord
from models.config.benchmark import BenchmarkConfig
from models.config.data import DataConfig
from models.config.recipe import load_recipe
from models.data.chat_template import ChatTemplate, open_chat_template
from models.data.prepare import REFUSED, prepare_samples, summary
from models.data.prompts import OWN_SUITE, question_prompts, read_prompts, suite_prompts
from models.data.sample_set import SampleSet
from tests.models.chat_templates import CHATML, FAMILIES, LLAMA3, QWEN3, make_tokenizer

OFF = {"enable_thinking": False}
RECIPES = Path(__file__).parents[3] / "recipes"


def opened(template: ChatTemplate | None) -> ChatTemplate:
    assert template is not None
    return template


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.jinja"
    path.write_text(QWEN3)
    return path


def test_a_file_takes_the_place_of_the_tokenizer_s_own(file: Path) -> None:
    tokenizer = make_tokenizer(CHATML)
    own, other = opened(open_chat_template(tokenizer)), opened(open_chat_template(tokenizer, str(file)))
    asked = [{"role": "user", "content": "a"}]
    assert other.render(asked, prompt=True) == own.render(asked, prompt=True)
    off = opened(open_chat_template(tokenizer, str(file), OFF))
    assert off.render(asked, prompt=True) == own.render(asked, prompt=True) + "<think>\n\n</think>\n\n"
    assert tokenizer.chat_template == CHATML


def test_the_hash_follows_template_and_arguments_not_the_file_s_name(file: Path) -> None:
    tokenizer = make_tokenizer(QWEN3)
    own = opened(open_chat_template(tokenizer)).hash
    assert opened(open_chat_template(tokenizer, str(file))).hash == own
    off = opened(open_chat_template(tokenizer, str(file), OFF)).hash
    assert off != own
    assert opened(open_chat_template(tokenizer, str(file), {"enable_thinking": True})).hash not in (own, off)
    file.write_text(QWEN3 + " ")
    assert opened(open_chat_template(tokenizer, str(file))).hash != own


def test_a_tokenizer_may_have_a_template_for_tools() -> None:
    tokenizer = make_tokenizer(None)
    tokenizer.chat_template = {"default": CHATML, "tool_use": QWEN3}  # type: ignore[assignment]
    template = opened(open_chat_template(tokenizer))
    asked, tool = [{"role": "user", "content": "a"}], {"type": "function", "function": {"name": "look"}}
    assert "look" not in template.render(asked)
    assert "look" in template.render(asked, [tool])
    tokenizer.chat_template = {"rag": CHATML}  # type: ignore[assignment]
    with pytest.raises(ValueError, match="has the chat templates rag and none called default: name a Jinja file"):
        open_chat_template(tokenizer)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("nowhere.jinja", {}, r"data\.chat_template 'nowhere\.jinja': there is no such file .*give a Jinja file"),
        ("tokeniser", {}, r"there is no such file .*tokenizer \(the target's own template\) or none"),
        (".", {}, "cannot be read .*give a Jinja file"),
        ("broken.jinja", {}, r"broken\.jinja:2: the chat template is not valid Jinja .*: correct it"),
        ("bytes.jinja", {}, "cannot be read .*utf-8"),
        ("tokenizer", {"enable_thinkng": False}, r"data\.template_arguments\.enable_thinkng: .*never reads it"),
        ("none", OFF, r"data\.template_arguments needs a chat template"),
    ],
)
def test_refusals(name: str, arguments: dict[str, Any], said: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.jinja").write_text("{% for m in messages %}\n{% if %}{% endfor %}")
    Path("bytes.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=said):
        open_chat_template(make_tokenizer(QWEN3), name, arguments)


def test_arguments_of_a_recipe(tmp_path: Path) -> None:
    set_to = "{enable_thinking: false, reasoning_effort: high, limit: 3, builtin_tools: [python]}"
    recipe = load_recipe(RECIPES / "tiny.yaml", [f"data.template_arguments={set_to}", "data.chat_template=x.jinja"])
    assert recipe.data.template_arguments == {
        "enable_thinking": False, "reasoning_effort": "high", "limit": 3, "builtin_tools": ("python",),
    }  # fmt: skip
    assert type(recipe.data.template_arguments["enable_thinking"]) is bool
    again = recipe.model_validate_json(recipe.model_dump_json())
    assert again == recipe


@pytest.fixture
def target(tmp_path: Path) -> TargetRecord:
    """A tokenizer with every family's tokens."""
    folder = tmp_path / "target"
    make_tokenizer(CHATML).save_pretrained(folder)
    return TargetRecord(
        name="t", path=str(folder), revision="r", model_type="llama", hidden_size=8, num_layers=1, vocab_size=512,
        licence="", eos_ids=(1, 3, 31),
    )  # fmt: skip


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "chats.jsonl"
    records = [
        {"messages": [{"role": "user", "content": f"ask {n}"}, {"role": "assistant", "content": f"the answer {n}"}]}
        for n in range(12)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def texts(target: TargetRecord, path: str) -> list[str]:
    tokenizer: Any = AutoTokenizer.from_pretrained(target.path)
    return [tokenizer.decode(sample.tokens) for sample in SampleSet.open(Path(path), "train")]


def test_a_changed_template_makes_new_samples(source: Path, target: TargetRecord, file: Path) -> None:
    def prepared(**settings: Any):
        return prepare_samples(DataConfig(source=str(source), **settings), target, add_bos=False)

    own, other = prepared(), prepared(chat_template=str(file))
    assert own.template_hash != other.template_hash
    assert own.path != other.path
    assert all("<think>" in text for text in texts(target, other.path))
    off = prepared(chat_template=str(file), template_arguments=OFF)
    assert len({own.path, other.path, off.path}) == 3
    assert prepared(chat_template=str(file.rename(file.with_name("moved.jinja")))) == other
    # The end of a turn comes from the target's generation config.
    glm = file.with_name("glm.jinja")
    glm.write_text(FAMILIES["glm4"].template)
    assert all(text.endswith("<|user|>") for text in texts(target, prepared(chat_template=str(glm)).path))


def test_what_the_template_cannot_render_is_listed(source: Path, target: TargetRecord, file: Path) -> None:
    file.write_text("{% if messages[0].content[-1] in '3579' %}{{ raise_exception('odd') }}{% endif %}" + CHATML)
    config = DataConfig(source=str(source), chat_template=str(file))
    record = prepare_samples(config, target, add_bos=False)
    assert record.refused == 4
    listed = (Path(record.path) / REFUSED).read_text().splitlines()
    assert [line.partition(": ")[0] for line in listed] == [f"{source}:{number}" for number in (4, 6, 8, 10)]
    shown = summary(record)
    assert "4 refused" in shown
    assert shown.count("left out: ") == 3
    assert f"all of them: {Path(record.path) / REFUSED}" in shown
    with pytest.raises(ValueError, match="4 of 12 conversations cannot be used"):
        prepare_samples(config.model_copy(update={"max_refused_share": 0.2}), target, add_bos=False)


def test_prompts_are_rendered_by_the_recipe_s_template(source: Path, target: TargetRecord, file: Path) -> None:
    """Held-out conversations, suites of conversations and suites of questions."""
    tokenizer: Any = AutoTokenizer.from_pretrained(target.path)
    config = BenchmarkConfig(prompts=4, prompt_tokens=64)
    closed = "<think>\n\n</think>\n\n"
    prompts, hashed = read_prompts(str(source), target, config, str(file), False, OFF)
    assert all(tokenizer.decode(prompt).endswith(closed) for prompt in prompts)
    assert hashed == opened(open_chat_template(tokenizer, str(file), OFF)).hash

    questions = source.with_name("questions.jsonl")
    questions.write_text("".join(json.dumps({"question": f"ask {n}"}) + "\n" for n in range(4)))
    asked = question_prompts(
        str(questions), OWN_SUITE, Path(target.path), count=4, prompt_tokens=64, chat_template=str(file),
        template_arguments=OFF, add_bos=False,
    )  # fmt: skip
    assert all(tokenizer.decode(prompt).endswith(closed) for prompt in asked.prompts)
    assert asked.template_hash == hashed

    text = source.with_name("plain.txt")
    text.write_text("\n\n".join(f"{n} once upon a time there was the answer " * 8 for n in range(4)))
    suites = f"promotion.suites={{chats: {source}, questions: {questions}, text: {text}}}"
    recipe = load_recipe(
        RECIPES / "tiny.yaml",
        [suites, f"data.chat_template={file}", "data.template_arguments={enable_thinking: false}",
         "data.overlong=truncate", "benchmark.prompts=4"],
    )  # fmt: skip
    for suite, expected in (("chats", hashed), ("questions", hashed), ("text", "none")):
        found = suite_prompts(recipe, target, suite)
        assert found.template_hash == expected
        assert all(tokenizer.decode(prompt).endswith(closed) for prompt in found.prompts) == (expected == hashed)


@pytest.mark.parametrize("strict", [True, False], ids=["refuses text", "drops text"])
def test_a_template_may_read_parts_of_content(strict: bool) -> None:
    """Templates of multimodal targets, as servers find out: text is shown as one part."""
    part = "part.text" if strict else "part.text or ''"
    template = opened(open_chat_template(make_tokenizer(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'image' %}IMG"
        f"{{% else %}}{{{{ {part} + '' }}}}{{% endif %}}{{% endfor %}}<|im_end|>{{% endfor %}}"
    )))  # fmt: skip
    messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": ""}]
    assert template.render(messages) == "<|im_start|>user\na b<|im_end|><|im_start|>assistant\n<|im_end|>"


def test_a_date_in_the_system_prompt_is_an_argument() -> None:
    template = opened(open_chat_template(make_tokenizer(LLAMA3), arguments={"date_string": "24 Nov 2026"}))
    assert "Today: 24 Nov 2026" in template.render([{"role": "user", "content": "a"}])
