"""Reasoning in text: found, and taken out, whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.data.thinking import thinking_spans, thinks, without_thinking

CASES = {
    "none": ("four", "four", False),
    "block": ("<think>hm</think>four", "four", True),
    "space after it": ("<think>\nhm\n</think>\n\nfour", "four", True),
    "opened in the prompt": ("hm\n</think>\n\nfour", "four", True),
    "cut": ("<think>hm and", "", True),
    "empty": ("<think>\n\n</think>\n\nfour", "four", False),
    "two blocks": ("\n<think>hm</think>\n<think>so</think>four", "\nfour", True),
    "opened in the prompt, and another": ("hm</think> <think>so</think>four", "four", True),
    "named in the answer": ("R1 writes `<think>` before it answers.", "R1 writes `<think>` before it answers.", False),
    "a pair named in the answer": ("Use <think> and </think> here.", "Use <think> and </think> here.", False),
    "named after a block": ("<think>hm</think>Use <think>x</think>.", "Use <think>x</think>.", True),
}


@pytest.mark.parametrize("case", CASES)
def test_cases(case: str) -> None:
    text, answer, reasoned = CASES[case]
    assert without_thinking(text) == answer
    assert thinks(text) == reasoned


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "hm", " ", "\n", "four"]), max_size=12).map("".join)


@given(text=PIECES, before=st.sampled_from(["", "a", "</think>"]), behind=st.sampled_from(["", "b", "</think>"]))
def test_what_is_outside_the_spans_is_the_answer(text: str, before: str, behind: str) -> None:
    whole = before + text + behind
    span = (len(before), len(before) + len(text))
    spans = thinking_spans(whole, span)
    edges = [span[0], *(edge for pair in spans for edge in pair), span[1]]
    assert edges == sorted(edges)
    left = "".join(whole[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))
    assert left == without_thinking(text)
    assert not left.lstrip().startswith("<think>")
    assert not thinks(text) or spans
