"""A small tokenizer of its own, with whatever chat template a test asks for."""

import pytest

from tests.models import chat_templates
from tests.models.chat_templates import CHATML, FAMILIES, QWEN3, TAGGED


@pytest.fixture
def make_tokenizer():
    return chat_templates.make_tokenizer


@pytest.fixture(params=[CHATML, QWEN3, TAGGED], ids=["chatml", "qwen3", "tagged"])
def template(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """The name of every family in turn."""
    return request.param
