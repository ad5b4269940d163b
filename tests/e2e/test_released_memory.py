"""What an engine has loaded is free when it is closed, before any collection of garbage: the next model needs it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.models.decoder import DecoderStack
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"device": "reference"}], ids=str)
def test_a_closed_engine_holds_no_model(options: dict[str, Any], tmp_path: Path) -> None:
    make_checkpoint("llama", tmp_path, vocab_size=300)
    write_byte_tokenizer(tmp_path)
    gc.collect()
    gc.disable()
    try:
        before = {id(each) for each in gc.get_objects()}
        llm = LLM(str(tmp_path), dtype="float32", max_model_len=64, num_gpu_blocks_override=16, **options)
        llm.generate([[5, 17, 40]], SamplingParams(max_tokens=3), use_tqdm=False)
        new = (each for each in gc.get_objects() if id(each) not in before)
        models = [weakref.ref(each) for each in new if issubclass(type(each), DecoderStack)]
        assert models
        llm.close()
        assert [each() for each in models] == [None] * len(models)
    finally:
        gc.enable()
