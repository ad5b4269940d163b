"""Queries and documents with images, as `/rerank` and `/score` read them, are the prompts that they become."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from octavo import LLM
from octavo.core.prompt import Prompt
from octavo.errors import InvalidRequest
from octavo.server.decode import decode
from octavo.server.preparing import Prepared, Preparer, TextPolicy, prepared
from octavo.server.schema.pairs import PairsRequest, RerankRequest, ScoreRequest
from octavo.server.texts import _prompts
from tests.e2e.test_vectors_of_pages import ARGS, make_retriever
from tests.fakes.vision import image
from tests.models.test_nemotron_pages import make_pages

PARTS = "{% for part in message.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"
CONTENT = "{% if message.content is string %}{{ message.content }}{% else %}" + PARTS + "{% endif %}"
CHAT = "{% for message in messages %}w9 " + CONTENT + "{% endfor %}"
PAIR = (
    "{% for message in messages %}"
    "{{ {'query': 'w8 ', 'document': ' w9 ', 'system': 'w7 '}[message.role] }}" + CONTENT + "{% endfor %}"
)


def page(seed: int = 0, before: str = "w1 ", behind: str = " w2") -> dict[str, Any]:
    file = io.BytesIO()
    image(seed).save(file, "PNG")
    url = {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"}
    texts = [{"type": "text", "text": each} for each in (before, behind)]
    return {"content": [texts[0], {"type": "image_url", "image_url": url}, texts[1]]}


def given(text: str, *seeds: int) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": [image(seed) for seed in seeds]}}


def read(llm: LLM, kind: type[PairsRequest], **body: Any) -> list[Prompt]:
    """The prompts of a request that a helper process reads."""
    asked = decode(json.dumps(body).encode(), kind)
    preparer = Preparer(llm.engine.input, TextPolicy())
    done = msgspec.msgpack.decode(prepared(asked, asked.prompts(preparer), preparer), type=Prepared)
    assert b"base64" not in done.asked, "it is read, and does not go back"
    assert msgspec.json.decode(done.asked, type=kind).sides() == asked.sides()
    return asyncio.run(_prompts(done))


def with_template(path: Path, template: str) -> None:
    config = path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))


@pytest.mark.slow
@pytest.mark.parametrize("template", [None, CHAT])
def test_pages_and_texts_of_a_late_interaction_model(tmp_path: Path, template: str | None) -> None:
    make_retriever(tmp_path, "qwen2_vl", "ColQwen2ForRetrieval")
    if template is not None:
        with_template(tmp_path, template)
    with LLM(str(tmp_path), **ARGS) as llm:
        text = {"content": [{"type": "text", "text": "w3"}, {"type": "text", "text": "w4"}]}
        prompts = read(llm, RerankRequest, query="w1 w2", documents=[page(), "w3", {"text": "w3"}, text, page(1)])
        writers = llm.engine.input.vectors.writers()
        around = {"add_special_tokens": template is None}
        first, last = (
            msgspec.structs.replace(
                Prompt.read(given(f"{'' if template is None else 'w9 '}w1 <image> w2", n)), **around
            )
            for n in (0, 1)
        )
        written = [writers[0]("w1 w2"), first, writers[1]("w3"), writers[1]("w3"), writers[1]("w3\nw4"), last]
        found, want = llm.encode(prompts), llm.encode(written)
        for one, other in zip(found, want, strict=True):
            assert one.prompt_token_ids == other.prompt_token_ids
            assert np.array_equal(one.outputs.data, other.outputs.data)
        assert len(read(llm, ScoreRequest, queries=[page(), page(1)], documents=["w1", page(2)])) == 4
        for body, field, said in (
            ({"documents": [page()], "max_tokens_per_doc": 3}, "documents[0]", "cannot shorten"),
            ({"documents": [page(), {"content": [*page()["content"]] * 20}]}, "documents[1]", "have 20 images"),
            (
                {"documents": ["a", {"content": [sound()]}]},
                "documents[1].content[0]",
                "reads text and images",
            ),
        ):
            with pytest.raises(InvalidRequest, match=said) as caught:
                read(llm, RerankRequest, query="w1", **body)
            assert caught.value.field == field


def sound() -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}


@pytest.mark.slow
def test_pairs_with_pages_are_written_by_a_template_with_their_roles(tmp_path: Path) -> None:
    path = make_pages(tmp_path, "LlamaNemotronVLForSequenceClassification", "model.")
    args = {**ARGS, "max_model_len": 256}
    with LLM(str(path), **args) as llm, pytest.raises(InvalidRequest, match="the roles query and document") as caught:
        read(llm, RerankRequest, query="w1", documents=["w2", page()])
    assert caught.value.field == "documents[1]"
    with_template(path, PAIR)
    with LLM(str(path), **args) as llm:
        bodies: list[dict[str, Any]] = [{"query": "w1", "documents": [page(), "w3"]}]
        bodies += [{"query": page(0), "documents": [page(1)], "instruction": "w5"}]
        found = [read(llm, RerankRequest, **body) for body in bodies]
        texts = (
            given("w8 w1 w9 w1 <image> w2", 0),
            "w8 w1 w9 w3",
            given("w7 w5w8 w1 <image> w2 w9 w1 <image> w2", 0, 1),
        )
        want = [msgspec.structs.replace(Prompt.read(each), add_special_tokens=False) for each in texts]
        outputs = zip(llm.classify([*found[0], *found[1]]), llm.classify(want), strict=True)
        for one, other in outputs:
            assert one.prompt_token_ids == other.prompt_token_ids
            assert one.outputs.probs == other.outputs.probs
