"""An engine that answers by rote, and a tiny model on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.engine.chat_template import ChatTemplate
from octavo.engine.llm_engine import LLMEngine
from tests.fakes.byte_tokenizer import byte_tokenizer, write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.core import VOCAB_SIZE, ScriptedCore, engine_config


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
