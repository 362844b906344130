"""Text of others on a terminal."""

from infra.terminal import visible


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert visible("a\tb\nc\x1b[31m\r\x00\x7f\x9bé") == "a\tb\nc\\x1b[31m\\x0d\\x00\\x7f\\x9bé"
