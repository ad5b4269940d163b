"""Commands, an engine that answers by rote, and a tiny model on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

from octavo.cli.main import main
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.text.chat_template import ChatTemplate
from tests.fakes.byte_tokenizer import byte_tokenizer, write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.core import VOCAB_SIZE, ScriptedCore, engine_config


class Written(NamedTuple):
    """What a command wrote to standard output and error."""

    out: str
    err: str


class Command(Protocol):
    def __call__(self, *words: str, code: int = 0) -> Written: ...


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `octavo` with these words in this process, and checks its exit code."""

    def run(*words: str, code: int = 0) -> Written:
        assert main(words) == code
        return Written(*capsys.readouterr())

    return run


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
