"""The matchers and the tokenizer of octavo-tiny."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo.builtin import model_directory
from octavo.engine.text.tokenizer import Tokenizer
from octavo.structured_output.matchers import Matchers

VOCABULARY, END = 3072, 0


@pytest.fixture
def matchers() -> Iterator[Matchers]:
    made = Matchers(model_directory(), VOCABULARY, [END])
    yield made
    made.close()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.open(model_directory())
