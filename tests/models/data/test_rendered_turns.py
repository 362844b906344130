"""Questions and answers are found again in what a chat template made of them."""

from typing import Any

from models.data.message import Message
from models.data.rendered_turns import read_back
from tests.models.chat_templates import FAMILIES

SYSTEM, QUESTION = "Be brief. It is 10:15.", "How do I reset my password?\n\nModel\nis X."
TURNS = (
    Message("system", SYSTEM),
    Message("user", QUESTION),
    Message("assistant", "Open the settings."),
    Message("user", "Thanks"),
)


def ids_of(family: str, messages: tuple[Message, ...], *, prompt: bool = True) -> Any:
    template = FAMILIES[family].open()
    tokenizer: Any = template.tokenizer
    text = template.render([message.as_dict() for message in messages], prompt=prompt)
    return tokenizer, tokenizer(text, add_special_tokens=False)["input_ids"]


def test_what_is_asked_first_is_found(family: str) -> None:
    (asked,) = read_back(*ids_of(family, TURNS[1:])).opening
    assert asked == QUESTION


def test_answers_are_told_from_questions(family: str) -> None:
    document = read_back(*ids_of(family, TURNS[1:]))
    messages = [(one.role, one.content) for one in document.messages if one.role != "system"]
    first, second, third, *_ = messages
    assert first == ("user", QUESTION)
    assert second[0] == "assistant"
    assert "Open the settings." in second[1]
    assert third == ("user", "Thanks")


def test_a_clock_in_the_system_prompt_makes_no_other_dialogue(family: str) -> None:
    later = (Message("system", SYSTEM.replace("15", "47")), *TURNS[1:])
    other = (Message("system", SYSTEM), Message("user", QUESTION + " Or my name?"), *TURNS[2:])
    hashes = [read_back(*ids_of(family, turns)).dialogue_hash for turns in (TURNS, later, other)]
    assert hashes[0] != hashes[2]
    # Gemma's template writes the system prompt into the first question.
    assert (hashes[0] == hashes[1]) == (family != "gemma3")


def test_text_without_roles_is_one_question(make_tokenizer) -> None:
    tokenizer = make_tokenizer(None)
    ids = tokenizer("the answer is\nthat <think> there", add_special_tokens=False)["input_ids"]
    assert read_back(tokenizer, ids).opening == ("the answer is\nthat <think> there",)
