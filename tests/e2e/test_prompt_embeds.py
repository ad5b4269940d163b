"""Prompts that are given as vectors: the bits of the tokens whose vectors they are, whatever runs beside them."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.config.checkpoint import Checkpoint
from octavo.config.embedding_size import embedding_size
from octavo.core.outputs import RequestOutput
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.errors import ConfigError
from octavo.server.decode import decode
from octavo.server.preparing import Preparer, TextPolicy
from octavo.server.schema.chat import ChatCompletionRequest
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.rank_threads import llm_of_ranks
from tests.fakes.vision import make_vision_checkpoint
from tests.fakes.warm_server import WarmServer
from tests.server.raw import ask

FAMILIES = ("falcon_h1", "gemma3", "granite", "opt_projected", "qwen3")
"""With a factor of embeddings, before and behind them, with states, with embeddings narrower than the layers."""
PROMPTS = [[7 * i % 300 for i in range(40)], [3 + i for i in range(21)]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True)


def written(family: str, path: Path, **others: int) -> Path:
    sizes: dict[str, Any] = {"vocab_size": 300, "hidden_size": 64, **others}
    if family == "opt_projected":
        family, sizes = "opt", sizes | {"word_embed_proj_dim": 32}
    make_checkpoint(family, path, **sizes)
    return write_byte_tokenizer(path)


def vectors(path: Path, token_ids: list[int]) -> Tensor:
    """What `get_input_embeddings()` of transformers returns of the tokens: Gemma's has its factor."""
    stored = load_file(next(path.glob("*.safetensors")))
    table = next(tensor for name, tensor in stored.items() if "embed_tokens" in name).float()
    return table[torch.tensor(token_ids)] * (table.shape[1] ** 0.5 if "gemma" in path.name else 1.0)


def opened(path: Path, **options: Any) -> LLM:
    common: dict[str, Any] = {"dtype": "float32", "block_size": 16, "max_model_len": 96, "max_num_seqs": 4}
    return LLM(str(path), enable_prompt_embeds=True, **common | options)


def results(outputs: list[RequestOutput]) -> list[list[tuple[list[int], Any]]]:
    return [[(each.token_ids, each.logprobs) for each in output.outputs] for output in outputs]


def test_a_form_that_is_not_ready_changes_nothing(tmp_path: Path) -> None:
    path = written("qwen3", tmp_path / "qwen3")
    given: Any = {"prompt_embeds": torch.randn(20, 64, generator=torch.Generator().manual_seed(0))}
    with opened(path) as llm:
        for number in range(3):  # the last row is computed again while a form is compiled
            form = StructuredOutputsParams(regex=f"[a-z]{{4}}{number}")
            params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2, structured_outputs=form)
            first, again = (results(llm.generate([given], params, use_tqdm=False)) for _ in range(2))
            assert first == again


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_of_tokens_give_the_bits_of_the_tokens(family: str, tmp_path: Path) -> None:
    path = written(family, tmp_path / family)
    given = [{"prompt_embeds": vectors(path, each)} for each in PROMPTS]
    with opened(path) as llm:
        expected = results(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
        assert results(llm.generate(given, PARAMS, use_tqdm=False)) == expected
        again = llm.generate([given[0]], PARAMS, use_tqdm=False)  # from the prefix cache
        assert results(again) == expected[:1]
        assert again[0].num_cached_tokens > 0
    with opened(path, max_num_batched_tokens=12, num_gpu_blocks_override=7, preemption_mode="recompute") as llm:
        assert results(llm.generate([*given, *PROMPTS], PARAMS, use_tqdm=False)) == expected * 2


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written("qwen3", tmp_path_factory.mktemp("qwen3"))


def test_other_vectors_share_no_prefix(path: Path) -> None:
    given = vectors(path, PROMPTS[0])
    other = given.clone()
    other[1] *= 2
    with opened(path) as llm, opened(path, enable_prefix_caching=False) as alone:
        found = llm.generate([{"prompt_embeds": given}], PARAMS, use_tqdm=False)
        others = llm.generate([{"prompt_embeds": other}], PARAMS, use_tqdm=False)
        assert others[0].num_cached_tokens == 0
        assert results(others) == results(alone.generate([{"prompt_embeds": other}], PARAMS, use_tqdm=False))
        assert results(others) != results(found)
        assert llm.generate([PROMPTS[0]], PARAMS, use_tqdm=False)[0].num_cached_tokens == 0


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_ranks_take_vectors(path: Path, tensor: int, pipeline: int) -> None:
    with opened(path) as llm:
        expected = results(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    with llm_of_ranks(path, tensor, pipeline, dtype="float32", enable_prompt_embeds=True) as llm:
        given = [{"prompt_embeds": vectors(path, each).numpy()} for each in PROMPTS]
        assert results(llm.generate(given, PARAMS, use_tqdm=False)) == expected


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ({"prompt_embeds": torch.zeros(3, 8)}, {}, "prompt_embeds has 8 numbers for each token, expected 64"),
        ({"prompt_embeds": torch.zeros(3, 64)}, {"prompt_logprobs": 1}, "prompt_logprobs is about the tokens"),
        ({"prompt_embeds": torch.zeros(3, 64)}, {"repetition_penalty": 1.1}, "repetition_penalty is about the tokens"),
        ({"prompt_embeds": torch.zeros(96, 64)}, {}, "the prompt has 96 tokens"),
    ],
)
def test_what_cannot_be_is_refused(path: Path, prompt: Any, params: dict[str, Any], said: str) -> None:
    with opened(path) as llm:
        error = llm.generate([prompt], SamplingParams(max_tokens=2, **params), use_tqdm=False)[0].error
        assert error is not None
        assert error.message.startswith(said)


def test_without_the_argument_none_are_taken(path: Path) -> None:
    with LLM(str(path), dtype="float32", max_model_len=96) as llm:
        error = llm.generate([{"prompt_embeds": torch.zeros(3, 64)}], PARAMS, use_tqdm=False)[0].error
        assert error is not None
        assert error.message.endswith("start it with enable_prompt_embeds")


def chat(*parts: Any) -> list[Any]:
    return [{"role": "system", "content": "a"}, {"role": "user", "content": list(parts)}]


def given_as(data: Any) -> dict[str, Any]:
    return {"type": "prompt_embeds", "data": data}


def text(written: str) -> dict[str, Any]:
    return {"type": "text", "text": written}


@pytest.mark.parametrize("before", ["say", "<bos>[user] <eos>"])
def test_vectors_in_messages_give_the_bits_of_their_text(path: Path, before: str) -> None:
    words = [vectors(path, [*word.encode()]) for word in ("hello", "you")]
    mixed = chat(text(before), given_as(words[0]), text("to"), given_as(words[1].numpy()))
    with opened(path) as llm:
        plain = chat(*map(text, (before, "hello", "to", "you")))
        expected = llm.chat(plain, PARAMS, use_tqdm=False)
        found = llm.chat(mixed, PARAMS, use_tqdm=False)
        assert results(found) == results(expected)
        assert len(found[0].prompt_token_ids) == len(expected[0].prompt_token_ids)
        again = llm.chat(mixed, PARAMS, use_tqdm=False)
        assert results(again) == results(expected)
        assert again[0].num_cached_tokens > 0
        only = chat(given_as(words[0]))
        assert results(llm.chat(only, PARAMS, use_tqdm=False)) == results(
            llm.chat(chat(text("hello")), PARAMS, use_tqdm=False)
        )


def test_special_tokens_that_text_spells_stay_text_behind_vectors_in_json(path: Path) -> None:
    options: Any = {"chat_template": "{% for each in messages %}{{ each | tojson(ensure_ascii=true) }}{% endfor %}"}
    word, spelled = vectors(path, [*b"you"]), text("x<eos>y<bos>")
    with opened(path, max_model_len=256) as llm:
        plain = [{"role": "user", "content": [spelled]}]
        alone = llm.chat(plain, PARAMS, use_tqdm=False, **options)[0].prompt_token_ids
        mixed = [{"role": "user", "content": [given_as(word)]}, *plain]
        found = llm.chat(mixed, PARAMS, use_tqdm=False, **options)[0].prompt_token_ids
    assert found[-len(alone) :] == alone
    assert bytes(alone).count(b"<eos>") == 1


def test_tools_of_a_template_without_any_stand_beside_vectors(tmp_path: Path) -> None:
    path = written("qwen3", tmp_path, max_position_embeddings=4096)
    file = io.BytesIO()
    np.save(file, vectors(path, [*b"you"]).numpy())
    part = given_as(base64.b64encode(file.getvalue()).decode())
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": [part, text("be short")]},
        {"role": "user", "content": [text("hi"), part]},
        {"role": "assistant", "content": [part], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [part]},
    ]
    with opened(path, max_model_len=4096) as llm:
        asked = decode(msgspec.json.encode({"messages": messages, "tools": [tool]}), ChatCompletionRequest)
        [prompt] = asked.prompts(Preparer(llm.engine.input, TextPolicy()))
    assert prompt.token_ids is not None
    assert [each.num_embeddings for each in prompt.media] == [3] * 4
    rendered = bytes(each for each in prompt.token_ids if each < 256).decode()
    calls = '<tool_call>\n{"name":"f","arguments":{}}\n</tool_call>'
    assert [word in rendered for word in ("You may call", "be short", calls, "<tool_response>")] == [True] * 4
    assert "prompt_embeds" not in rendered


@pytest.mark.parametrize(
    ("parts", "options", "said"),
    [
        (
            [text("a"), given_as(torch.zeros(3, 8))],
            *({}, "messages[1].content[1].data has 8 numbers for each token, expected 64"),
        ),
        ([given_as("abc")], {}, "messages[1].content[0].data is no file of numpy in Base64"),
        ([given_as(None)], {}, "messages[1].content[0].data is NoneType, expected floating-point"),
        (
            [given_as(torch.zeros(3, 64)), text("\U0010fffc")],
            {},
            "has 2 places for them; leave out what it does not read, and the character U+10FFFC",
        ),
        (
            *([given_as(torch.zeros(3, 64))], {"chat_template": "{{ messages[0].content }}"}),
            "the messages have 1 parts with vectors, and the text that the chat template writes has 0 places",
        ),
    ],
)
def test_vectors_in_messages_that_cannot_be_are_refused(path: Path, parts: Any, options: Any, said: str) -> None:
    with opened(path) as llm:
        error = llm.chat(chat(*parts), PARAMS, use_tqdm=False, **options)[0].error
    assert error is not None
    assert said in error.message


def test_vectors_in_messages_need_the_argument(path: Path) -> None:
    with LLM(str(path), dtype="float32", max_model_len=96) as llm:
        error = llm.chat(chat(given_as(torch.zeros(3, 64))), PARAMS, use_tqdm=False)[0].error
    assert error is not None
    assert error.message.endswith("start it with enable_prompt_embeds")


@pytest.mark.slow
def test_completions_and_chats_take_files_of_numpy(path: Path, serve: Callable[..., WarmServer]) -> None:
    settings = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8, "return_token_ids": True}

    def encoded(token_ids: list[int]) -> str:
        file = io.BytesIO()
        np.save(file, vectors(path, token_ids).numpy())
        return base64.b64encode(file.getvalue()).decode()

    server = serve(path, "--dtype", "float32", "--max-model-len", "96", "--enable-prompt-embeds")
    try:
        expected = ask(server.url, "/v1/completions", {"prompt": PROMPTS, **settings}).json
        answer = ask(server.url, "/v1/completions", {"prompt_embeds": [*map(encoded, PROMPTS)], **settings}).json
        told = ask(server.url, "/v1/chat/completions", {"messages": chat(text("hello")), **settings}).json
        parts = chat(given_as(encoded([*b"hello"])))
        said = ask(server.url, "/v1/chat/completions", {"messages": parts, **settings}).json
        counted = ask(server.url, "/tokenize", {"messages": parts}).json
        wrong = ask(server.url, "/v1/chat/completions", {"messages": chat(given_as("abc")), **settings})
        too_long = ask(server.url, "/v1/completions", {"prompt_embeds": encoded([1] * 96), **settings})
    finally:
        assert server.stop() == 0
    assert [each["token_ids"] for each in answer["choices"]] == [each["token_ids"] for each in expected["choices"]]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, PROMPTS))
    assert said["choices"] == told["choices"]
    assert said["usage"]["total_tokens"] == told["usage"]["total_tokens"]
    assert counted["count"] == said["usage"]["prompt_tokens"]
    assert (wrong.status, wrong.error["param"]) == (400, "messages[1].content[0].data")
    assert (too_long.status, too_long.error["param"]) == (400, "prompt_embeds")


def test_models_that_read_the_tokens_of_a_prompt_take_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Gemma4ForCausalLM reads the tokens of a prompt in every layer"):
        opened(written("gemma4", tmp_path))
    with pytest.raises(ConfigError, match="MllamaForConditionalGeneration reads images in layers of their own"):
        opened(make_vision_checkpoint("mllama", tmp_path / "mllama"))
    with pytest.raises(ConfigError, match="DeepseekV4ForCausalLM chooses experts by the tokens of a prompt"):
        opened(written("deepseek_v4", tmp_path / "deepseek_v4"))
    of_ngrams: list[dict[str, Any]] = [{"emb_neighbor_num": 3}, {"ple_layer_ids": [1]}]
    for config in of_ngrams:
        with pytest.raises(ConfigError, match="Model reads n-grams of the tokens of a prompt; leave it out"):
            embedding_size(Checkpoint(tmp_path, {"architectures": ["Model"], "hidden_size": 8, **config}), None)
    plain = Checkpoint(tmp_path, {"architectures": ["Model"], "hidden_size": 8, "ple_layer_ids": []})
    assert embedding_size(plain, None) == 8
