"""The endpoints for vectors and scores, over an engine whose vectors are the ids of the tokens."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import numpy as np
import openai
import pytest

from octavo.config.pooling.pooling_config import LateInteraction
from octavo.config.schema import PoolingConfig
from octavo.core.prompt import Prompt
from octavo.server.schema import pairs
from octavo.server.schema.vectors import Encoding
from tests.server.conftest import Served
from tests.server.raw import ask

EMBED = PoolingConfig(size=256, prompts={"query": "q:", "document": "d:"})
SCORE = PoolingConfig(task="classify", labels=("fits",))
LABELS = PoolingConfig(task="classify", labels=("good", "bad"))


@pytest.fixture
def embedding(server: Served) -> Served:
    """The server with a model for vectors."""
    server.llm.pooling = EMBED
    return server


@pytest.fixture
def scoring(server: Served) -> Served:
    """The server with a model that scores pairs."""
    server.llm.pooling = SCORE
    return server


def post(server: Served, path: str, **fields: Any) -> Any:
    return ask(server.url, path, fields)


@pytest.mark.parametrize(
    ("given", "vectors"),
    [
        ("ab", [[0, 97, 98]]),
        (["a", "b"], [[0, 97], [0, 98]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98]], [[97], [98]]),
    ],
)
def test_inputs_are_texts_or_ids_or_lists_of_them(embedding: Served, given: Any, vectors: list[list[float]]) -> None:
    answer = post(embedding, "/v1/embeddings", input=given).json
    assert [each["embedding"] for each in answer["data"]] == vectors
    assert [each["index"] for each in answer["data"]] == list(range(len(vectors)))
    num_tokens = sum(map(len, vectors))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == num_tokens


def test_openai_client_gets_the_same_numbers_in_base64(embedding: Served, client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="letters", input=["ab"], dimensions=2)
    assert answer.data[0].embedding == [0.0, 97.0]
    raw = post(embedding, "/v1/embeddings", input="ab", encoding_format="base64").json["data"][0]["embedding"]
    assert struct.unpack("<3f", base64.b64decode(raw)) == (0, 97, 98)


@pytest.mark.parametrize(("kind", "code"), [("float32", "f"), ("float16", "e"), ("bfloat16", "H")])
@pytest.mark.parametrize(("endianness", "order"), [("little", "<"), ("big", ">")])
def test_binary_responses_have_the_type_and_order_that_are_asked_for(
    embedding: Served, kind: str, code: str, endianness: str, order: str
) -> None:
    fields = {"input": ["a", "bc"], "embed_dtype": kind, "endianness": endianness}
    text = post(embedding, "/v1/embeddings", encoding_format="base64", **fields).json["data"][0]["embedding"]
    expected = (0, 0x42C2 if code == "H" else 97)  # the upper half of float32
    assert struct.unpack(f"{order}2{code}", base64.b64decode(text)) == expected
    answer = post(embedding, "/v1/embeddings", encoding_format="bytes", **fields)
    described = json.loads(answer.headers["metadata"])
    size = struct.calcsize(code)
    assert [(each["start"], each["end"], each["shape"]) for each in described["data"]] == [
        (0, 2 * size, [2]),
        (2 * size, 5 * size, [3]),
    ]
    assert answer.body[: 2 * size] == base64.b64decode(text)
    bare = post(embedding, "/v1/embeddings", encoding_format="bytes_only", **fields)
    assert (bare.body, "metadata" in bare.headers) == (answer.body, False)


def test_the_header_of_a_binary_response_is_short_and_escapes_the_name_of_the_model(
    embedding: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = post(embedding, "/v1/embeddings", encoding_format="bytes", embed_dtype="bfloat16", input=["a"] * 512)
    assert len(most.headers["metadata"]) < 1 << 16
    refused = post(embedding, "/v1/embeddings", encoding_format="bytes", input=["a"] * 513)
    assert (refused.status, refused.json["error"]["param"]) == (400, "input")
    monkeypatch.setattr("octavo.server.routes.vectors._Done.frame", {"model": "模型"})
    answer = post(embedding, "/v1/embeddings", encoding_format="bytes", input="a")
    assert (answer.status, json.loads(answer.headers["metadata"])["model"]) == (200, "模型")


def test_a_conversation_is_written_by_the_chat_template(embedding: Served) -> None:
    messages = [{"role": "user", "content": "a"}]
    answer = post(embedding, "/v1/embeddings", messages=messages).json
    want = post(embedding, "/tokenize", messages=messages, add_generation_prompt=False).json["tokens"]
    assert [int(each) for each in answer["data"][0]["embedding"]] == want
    refused = post(embedding, "/v1/embeddings", messages=messages, input="a")
    assert (refused.status, refused.json["error"]["param"]) == (400, "input")


def test_cohere_names_prompts_by_the_type_of_input(embedding: Served) -> None:
    answer = post(embedding, "/v2/embed", texts=["a"], input_type="search_query", embedding_types=["float"]).json
    assert answer["embeddings"] == {"float": [[0, ord("q"), ord(":"), 97]]}
    assert answer["meta"]["billed_units"] == {"input_tokens": 4}


def test_cohere_gets_a_bit_of_each_number(embedding: Served) -> None:
    answer = post(embedding, "/v2/embed", texts=["ab"], embedding_types=["binary", "ubinary"]).json
    assert answer["embeddings"] == {"binary": [[0b11100000 - 128]], "ubinary": [[0b11100000]]}
    assert answer["response_type"] == "embeddings_by_type"
    array = np.array([-1.0, 0.5, 0.0, -2.0, 1.0, 1.0, -1.0, -1.0, -1.0, 3.0], np.float32)
    assert bytes(Encoding(format="ubinary").value(array)) == b"[108,64]"
    assert bytes(Encoding(format="binary").value(array)) == b"[-20,-64]"
    refused = post(embedding, "/v2/embed", texts=["a"], embedding_types=["ubinary"], output_dimension=12)
    assert (refused.status, refused.json["error"]["param"]) == (400, "embedding_types")
    assert "vectors of 12 numbers, which must be a multiple of 8" in refused.json["error"]["message"]


def test_long_inputs_are_refused_or_cut_at_their_end(embedding: Served) -> None:
    refused = post(embedding, "/v1/embeddings", input="x" * 300)
    assert (refused.status, refused.json["error"]["code"]) == (400, "context_length_exceeded")
    assert "301 tokens, but this model's maximum context length is 256" in refused.json["error"]["message"]
    assert refused.json["error"]["param"] == "input"
    cut = post(embedding, "/v1/embeddings", input="abc", truncate_prompt_tokens=2)
    assert cut.json["data"][0]["embedding"] == [0, 97]
    for given in ("abc", [97, 98, 99]):
        last = post(embedding, "/v1/embeddings", input=given, truncate_prompt_tokens=2, truncation_side="left")
        assert last.json["data"][0]["embedding"] == [98, 99]
    started = post(embedding, "/v2/embed", texts=["abc"], max_tokens=2, truncate="START", embedding_types=["float"])
    assert started.json["embeddings"] == {"float": [[98, 99]]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 257}, "dimensions"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "prompt_name": "passage"}, "prompt_name"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"texts": ["a"], "output_dimension": 0}, "output_dimension"),
        ({"texts": ["a"], "output_dimension": 257}, "output_dimension"),
        ({"texts": ["a"], "max_tokens": -5}, "max_tokens"),
        ({"texts": ["a"], "images": ["data:"]}, "images"),
        ({"input": "a", "padding": "max_length"}, "padding"),
        ({"input": "a", "mm_processor_kwargs": {"size": 1}}, "mm_processor_kwargs"),
        ({"query": "a", "documents": ["a"], "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"query": "a", "documents": ["a"], "max_tokens_per_doc": -5}, "max_tokens_per_doc"),
    ],
)
def test_wrong_requests_are_refused_by_field(embedding: Served, fields: dict[str, Any], param: str) -> None:
    path = "/v2/embed" if "texts" in fields else "/rerank" if "query" in fields else "/v1/embeddings"
    answer = post(embedding, path, **fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_returns_the_best_first_with_documents_unless_cohere_leaves_them_out(scoring: Served, path: str) -> None:
    answer = post(scoring, path, query="abc", documents=["xyz", "cab", {"text": "ax"}], top_n=2).json
    assert [each["index"] for each in answer["results"]] == [1, 2]
    assert [round(each["relevance_score"], 3) for each in answer["results"]] == [0.3, 0.1]
    assert len(post(scoring, path, query="abc", documents=["x", "y"], top_n=0).json["results"]) == 2
    texts = [each.get("document") for each in answer["results"]]
    assert texts == ([None, None] if path == "/v2/rerank" else [{"text": "cab"}, {"text": "ax"}])


def test_parts_of_text_are_a_text_and_images_go_to_models_that_read_them(scoring: Served) -> None:
    parts = [{"type": "text", "text": each} for each in ("c", "ab")]
    (found,) = post(scoring, "/rerank", query="abc", documents=[{"content": parts}]).json["results"]
    assert (found["document"], round(found["relevance_score"], 3)) == ({"text": "c\nab"}, 0.3)
    pair = {"text_1": {"content": parts[1:]}, "text_2": [{"content": parts}, {"text": "a"}]}
    assert [round(each["score"], 3) for each in post(scoring, "/score", **pair).json["data"]] == [0.2, 0.1]
    picture = {"type": "image_url", "image_url": "data:image/png;base64,AAAA"}
    refused: list[tuple[Any, str]] = [
        ([{}], "documents[0]"),
        ([{"text": "a", "content": parts}], "documents[0]"),
        ([{"content": []}], "documents[0].content"),
        (["a", {"content": [{"type": "file"}]}], "documents[1].content[0].type"),
        ([{"content": [picture] * 1000}, {"content": [picture] * 25}], "documents"),
        ([{"content": [parts[0]] * 1025}], "documents[0].content"),
    ]
    for documents, param in refused:
        answer = post(scoring, "/rerank", query="abc", documents=documents)
        assert (answer.status, answer.error["param"]) == (400, param)
    answer = post(scoring, "/rerank", query={"content": [picture] * 2}, documents=["a"] * 513)
    assert answer.error["message"].startswith("documents has 1,026 entries")


def test_first_tokens_of_queries_and_documents_are_kept(scoring: Served) -> None:
    def prompts(path: str, **fields: Any) -> list[Any]:
        scoring.llm.requests.clear()
        assert post(scoring, path, **fields).status == 200
        return [prompt for _, prompt, _, _ in scoring.llm.requests]

    limits = {"max_tokens_per_query": 2, "max_tokens_per_doc": 1}
    cut = prompts("/rerank", query="abc", documents=["xyz", "c"], **limits)
    assert cut == prompts("/rerank", query="ab", documents=["x", "c"])
    assert prompts("/score", text_1="abc", text_2=["xyz", "c"], **limits) == cut
    assert prompts("/rerank", query="abc", documents=["x"], max_tokens_per_query=0) == prompts(
        "/rerank", query="abc", documents=["x"]
    )


def test_score_pairs_one_text_with_many_or_each_with_its_own(scoring: Served) -> None:
    def scores(**fields: Any) -> list[float]:
        return [round(each["score"], 3) for each in post(scoring, "/score", **fields).json["data"]]

    assert scores(text_1="ab", text_2=["a", "ab"]) == [0.1, 0.2]
    assert scores(queries=["ab", "x"], documents=["ab", "y"]) == [0.2, 0.0]
    assert scores(queries="ab", items="a") == scores(data_1="ab", data_2="a") == [0.1]
    refused = post(scoring, "/score", text_1=["a", "b"], text_2=["a", "b", "c"])
    assert (refused.status, refused.json["error"]["param"]) == (400, "text_1")
    assert post(scoring, "/score", text_1="a").status == 400


def test_a_model_for_vectors_scores_by_the_cosine(embedding: Served) -> None:
    answer = post(embedding, "/v1/score", text_1="ab", text_2=["ab", "ba"]).json
    assert answer["data"][0]["score"] == pytest.approx(1.0)
    assert answer["data"][1]["score"] < 1.0


def test_a_late_interaction_model_scores_by_maxsim_and_returns_rows(server: Served) -> None:
    server.llm.pooling = PoolingConfig(task="token_embed", size=1, late=LateInteraction(query_prefix="q"))
    (found,) = post(server, "/pooling", input="ab").json["data"]
    assert found["data"] == [[0], [97], [98]]
    (found,) = post(server, "/pooling", input="ab", prompt_name="query").json["data"]
    assert found["data"] == [[0], [ord("q")], [97], [98]]
    answer = post(server, "/rerank", query="b", documents=["a", "c"]).json
    assert [each["relevance_score"] for each in answer["results"]] == [99 * (98 + ord("q")), 97 * (98 + ord("q"))]
    refused = post(server, "/v1/embeddings", input="a")
    assert (refused.status, refused.json["error"]["code"]) == (400, "unsupported_task")


def test_a_model_that_ranks_lists_gets_one_prompt_and_scores_each_document(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = Prompt(token_ids=[97, 1, 98, 1, 99, 1, 2])  # the model's own is longer than the context of the fake
    monkeypatch.setattr(pairs, "list_prompt", lambda *given: written)
    server.llm.pooling = PoolingConfig(task="token_embed", size=1, row_token_ids=(1, 2))
    server.llm.requests.clear()
    answer = post(server, "/rerank", query="b", documents=["a", "c", "d"]).json
    assert (len(server.llm.requests), sorted(each["index"] for each in answer["results"])) == (1, [0, 1, 2])
    assert {each["relevance_score"] for each in answer["results"]} == {1.0}, "vectors of one number point one way"


def test_classify_names_the_likeliest_label(server: Served) -> None:
    server.llm.pooling = LABELS
    (found,) = post(server, "/classify", input="a").json["data"]
    assert (found["label"], found["num_classes"]) == ("bad", 2)
    assert found["probs"] == pytest.approx([0.1, 0.125])


def test_pooling_returns_what_the_model_makes(embedding: Served, scoring: Served) -> None:
    for task in (None, "classify", "score"):
        assert post(scoring, "/pooling", input="a", task=task).json["data"][0]["data"] == pytest.approx([0.1])
    scoring.llm.pooling = EMBED
    assert post(embedding, "/pooling", input="a").json["data"][0]["data"] == [0, 97]


def test_a_model_for_text_makes_no_vectors_and_the_reverse(server: Served) -> None:
    answer = post(server, "/v1/embeddings", input="a")
    assert (answer.status, answer.json["error"]["code"]) == (400, "unsupported_task")
    server.llm.pooling = EMBED
    for path, fields in (("/v1/completions", {"prompt": "a"}), ("/rerank", {"query": "a", "documents": ["b"]})):
        answer = post(server, path, **fields)
        if path == "/rerank":
            assert answer.status == 200  # by the cosine
        else:
            assert (answer.status, answer.json["error"]["code"]) == (400, "unsupported_task")
    assert post(server, "/classify", input="a").json["error"]["code"] == "unsupported_task"
