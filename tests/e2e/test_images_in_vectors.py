"""Vectors of prompts with images are transformers' last hidden states, with the same bits whatever runs beside them."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from octavo import LLM
from octavo.config.checkpoint import Checkpoint
from octavo.config.media.images import image_settings
from octavo.core.pooling import PoolingParams
from octavo.engine.text.chat_template import ChatOptions
from octavo.multimodal.image_prompts import ImagePrompts
from octavo.server.preparing import Prepared, Preparer, TextPolicy, prepared
from octavo.server.schema.vectors import EmbeddingRequest
from octavo.server.texts import _prompts
from tests.e2e.test_images import TOKENS
from tests.e2e.test_images_over_http import TEMPLATE
from tests.fakes.vision import image, load_vision_oracle, make_vision_checkpoint
from tests.fakes.vision_families import FAMILIES
from tests.fakes.vision_sizes import IMAGE

PROMPTS: list[Any] = [
    {"prompt": "w1 <image> w2 w3", "multi_modal_data": {"image": image(0)}},
    {"prompt": "w1 <image> w2 <image> w7", "multi_modal_data": {"image": [image(1, 70, 90), image(0)]}},
    "w1 w2 w3",
]
pytestmark = pytest.mark.slow

ARGS: dict[str, Any] = {"runner": "pooling", "dtype": "float32", "num_gpu_blocks_override": 64}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_vision_checkpoint("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))
    config = path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    return path


def test_vectors_are_those_of_transformers(path: Path) -> None:
    oracle, checkpoint = load_vision_oracle(path, FAMILIES["qwen3_vl"][1]), Checkpoint.open(path)
    settings = image_settings(checkpoint)
    assert settings is not None
    processor = ImagePrompts(checkpoint, settings, lambda _: [], {"image": 16})
    with LLM(str(path), **ARGS) as llm:
        together = llm.embed(PROMPTS)
        alone = [llm.embed(prompt)[0].outputs for prompt in PROMPTS]
    assert alone == [output.outputs for output in together]
    with LLM(str(path), **ARGS, max_num_batched_tokens=6, max_num_seqs=4) as llm:  # in pieces
        assert [output.outputs for output in llm.embed(PROMPTS)] == alone
    for prompt, output in zip(PROMPTS[:2], together, strict=False):
        given = prompt["multi_modal_data"]["image"]
        arrays = processor.arrays(*(given if isinstance(given, list) else [given]))
        inputs: dict[str, Any] = {name: torch.from_numpy(arrays[name]) for name in processor.writer.reads}
        ids = torch.tensor([output.prompt_token_ids])
        inputs["mm_token_type_ids"] = (ids == TOKENS.get("qwen3_vl", IMAGE)).int()
        with torch.inference_mode():
            hidden = oracle.model(input_ids=ids, **inputs).last_hidden_state[0, -1]
        want = torch.nn.functional.normalize(hidden, dim=-1)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), want, rtol=1e-5, atol=1e-5)


def test_a_conversation_with_an_image_is_prepared_as_the_prompt_that_it_becomes(path: Path) -> None:
    file = io.BytesIO()
    image(0).save(file, "PNG")
    url = {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"}
    parts = [{"type": "text", "text": "w1"}, {"type": "image_url", "image_url": url}, {"type": "text", "text": "w2 w3"}]
    messages = [{"role": "user", "content": parts}]
    with LLM(str(path), **ARGS) as llm:
        asked = EmbeddingRequest(messages=[])
        rendered = llm.engine.input.render_chat(messages, ChatOptions(add_generation_prompt=False))
        done = msgspec.msgpack.decode(
            prepared(asked, [rendered], Preparer(llm.engine.input, TextPolicy())), type=Prepared
        )
        vectors = [llm.embed(prompt)[0].outputs for prompt in (*asyncio.run(_prompts(done)), rendered, PROMPTS[0])]
        assert vectors[0] == vectors[1] == vectors[2]
        (refused,) = llm.encode(PROMPTS[0], PoolingParams(truncate_prompt_tokens=4))
        assert "truncate_prompt_tokens cannot shorten a prompt with images" in str(refused.error)


def test_a_text_of_a_conversation_has_no_special_tokens(path: Path) -> None:
    with LLM(str(path), **ARGS) as llm:
        rendered = llm.engine.input.render_chat([{"role": "user", "content": "w1 </s> w2"}])
        (output,) = llm.embed(rendered)
        assert output.prompt_token_ids == llm.engine.input.tokenised(rendered)
        assert llm.engine.input.tokenizer.encode("</s>", False)[0] not in output.prompt_token_ids
