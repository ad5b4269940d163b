"""An engine that answers by rote, and a tiny model on disk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octavo.engine.chat_template import ChatTemplate
from octavo.engine.llm_engine import LLMEngine
from tests.fakes.byte_tokenizer import byte_tokenizer, write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.core import VOCAB_SIZE, ScriptedCore, engine_config


@pytest.fixture(autouse=True)
def _logging_is_left_as_it_was() -> Iterator[None]:
    """A command sets logging up for its process, which here is that of all tests."""
    logger = logging.getLogger("octavo")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.fixture
def make_engine(tmp_path: Path) -> Callable[[ScriptedCore], LLMEngine]:
    def make(core: ScriptedCore) -> LLMEngine:
        tokenizer = byte_tokenizer(tmp_path)
        template = ChatTemplate("{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}")
        return LLMEngine(engine_config(str(tmp_path)), core, tokenizer, template)

    return make


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = make_checkpoint("llama", tmp_path_factory.mktemp("tiny"), vocab_size=VOCAB_SIZE, eos_token_id=257)
    return str(write_byte_tokenizer(path))
