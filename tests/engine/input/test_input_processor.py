"""The input processor resolves a request within the limits and refuses any other with field, numbers and remedy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.arithmetic import max_blocks_of_group
from octavo.core.cache_key import namespace_digest
from octavo.core.cache_limits import CacheLimits
from octavo.core.prompt import Prompt
from octavo.core.request_options import RequestOptions
from octavo.core.sampling_params import SamplingParams
from octavo.engine.input.input_processor import InputProcessor, InputSetup, request_seed
from octavo.engine.text.chat_template import ChatOptions, ChatTemplate
from octavo.errors import ContextTooLong, InvalidRequest, RequestTooLarge
from tests.fakes.byte_tokenizer import BOS, EOS, byte_tokenizer
from tests.fakes.core import core_ready, engine_config


def processor(
    tmp_path: Path, *, ready: dict[str, Any] | None = None, tokenizer: dict[str, Any] | None = None, **model: Any
) -> InputProcessor:
    text = byte_tokenizer(tmp_path, **(tokenizer or {}))
    return InputProcessor(
        InputSetup(engine_config(str(tmp_path), **model).model, core_ready(**(ready or {})), max_num_seqs=4),
        tokenizer=text,
        chat_template=ChatTemplate.find(tmp_path, text),
        clock=lambda: 7.0,
    )


def test_request_goes_through_with_everything_resolved(tmp_path: Path) -> None:
    inputs = processor(tmp_path, eos_token_ids=(3, 4), tokenizer={"add_bos_token": True}, seed=0)
    params = SamplingParams(max_tokens=5, bad_words=("no",))
    request = inputs.process("r", "hi", params, RequestOptions(priority=2, cache_salt="s"))
    assert request.prompt_token_ids == [BOS, *b"hi"]
    assert (request.request_id, request.priority, request.cache_salt, request.arrival_time) == ("r", 2, "s", 7.0)
    assert (request.end_token_ids, request.bad_words_token_ids) == ((3, 4), ((*b"no",), (*b" no",)))
    assert (request.params.max_tokens, request.params.seed) == (5, request_seed(0, 0))


def test_the_end_of_sequence_is_what_the_checkpoint_or_else_the_tokenizer_names(tmp_path: Path) -> None:
    assert processor(tmp_path).process("r", "hi", SamplingParams()).end_token_ids == (EOS,)
    assert processor(tmp_path).process("r", "hi", SamplingParams(ignore_eos=True)).end_token_ids == ()


def test_tokens_without_logits_neither_end_a_text_nor_are_barred(tmp_path: Path) -> None:
    inputs = processor(tmp_path, eos_token_ids=(3, -1, 120, 119), ready={"vocab_size": 120})
    request = inputs.process("r", "hi", SamplingParams(min_tokens=1, bad_words=("ox", "no")))
    assert (request.end_token_ids, request.bad_words_token_ids) == ((3, 119), ((*b"no",), (*b" no",)))
    assert processor(tmp_path, ready={"vocab_size": 120}).process("r", "hi", SamplingParams()).end_token_ids == ()


def test_requests_without_a_seed_get_the_same_ones_in_every_run_of_an_engine_that_has_one(tmp_path: Path) -> None:
    def seeds(**model: Any) -> list[int | None]:
        inputs = processor(tmp_path, **model)
        return [inputs.process(str(number), "hi", SamplingParams()).params.seed for number in range(3)]

    assert seeds(seed=0) == seeds(seed=0)
    assert len({*seeds(seed=0), *seeds(seed=1), *seeds(), *seeds()}) == 12, "without one, no front repeats another"
    assert processor(tmp_path).process("r", "hi", SamplingParams(seed=5)).params.seed == 5


def test_seeds_and_digests_of_a_namespace_depend_on_no_other_one(tmp_path: Path) -> None:
    def of_alice(others: list[str | None]) -> list[tuple[int | None, str | None]]:
        inputs = processor(tmp_path, seed=0)
        requests = []
        for number, namespace in enumerate(["alice", *others, "alice"]):
            prompt = Prompt(text="hi", cache_namespace=namespace)
            requests.append(inputs.process(str(number), prompt, SamplingParams()))
        return [(each.params.seed, each.cache_namespace) for each in (requests[0], requests[-1])]

    alone = of_alice([])
    assert alone == of_alice(["bob", None, "bob"])
    assert [namespace for _, namespace in alone] == [namespace_digest("alice")] * 2
    assert alone[0] != alone[1]


def test_a_namespace_that_is_no_text_is_refused_without_showing_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cache_namespace is not text") as caught:
        processor(tmp_path).process("r", {"prompt": "hi", "cache_namespace": b"hush"}, SamplingParams())
    assert "hush" not in str(caught.value)


def test_default_of_the_checkpoint_that_does_not_fit_means_what_fits(tmp_path: Path) -> None:
    inputs = processor(tmp_path, generation_defaults={"max_tokens": 50}, ready={"max_model_len": 60})
    assert inputs.process("r", "x" * 20, inputs.default_sampling_params()).params.max_tokens == 40
    assert inputs.process("s", "x", inputs.default_sampling_params()).params.max_tokens == 50
    with pytest.raises(ContextTooLong):
        inputs.process("t", "x" * 20, inputs.default_sampling_params(max_tokens=51))


@pytest.mark.parametrize(("num_blocks", "n", "granted"), [(16, 1, 254), (2, 1, 31), (2, 2, 15)])
def test_rest_of_context_or_cache_is_granted_by_default(tmp_path: Path, num_blocks: int, n: int, granted: int) -> None:
    inputs = processor(tmp_path, ready={"num_blocks": num_blocks})
    assert inputs.process("r", "hi", SamplingParams(max_tokens=None, n=n)).params.max_tokens == granted


@given(
    prompt=st.integers(1, 100),
    n=st.integers(1, 5),
    num_blocks=st.integers(1, 60),
    block_size=st.sampled_from([1, 4, 16]),
    max_live_tokens=st.sampled_from([None, 2, 30, 100]),
)
def test_granted_tokens_fit_and_one_more_would_not(
    prompt: int, n: int, num_blocks: int, block_size: int, max_live_tokens: int | None
) -> None:
    limits = CacheLimits.of_one_group(num_blocks, block_size, max_live_tokens=max_live_tokens)
    fitting = limits.max_tokens_that_fit(prompt, n)
    if fitting >= 1:
        assert max_blocks_of_group(prompt, fitting, n, block_size, max_live_tokens) <= num_blocks
    if fitting < sys.maxsize:
        assert max_blocks_of_group(prompt, max(fitting, 0) + 1, n, block_size, max_live_tokens) > num_blocks


def test_defaults_of_the_checkpoint_lie_under_explicit_values(tmp_path: Path) -> None:
    inputs = processor(tmp_path, generation_defaults={"temperature": 0.3, "top_k": 7})
    assert inputs.default_sampling_params(top_k=9) == SamplingParams(temperature=0.3, top_k=9)
    assert inputs.default_sampling_params(use_beam_search=True, n=2) == SamplingParams(use_beam_search=True, n=2)
    with pytest.raises(InvalidRequest, match="did you mean temperature"):
        inputs.default_sampling_params(temprature=1)


def test_conversation_becomes_a_prompt_with_one_bos(tmp_path: Path) -> None:
    inputs = processor(tmp_path, tokenizer={"add_bos_token": True})
    prompt = inputs.render_chat([{"role": "user", "content": "hi"}])
    assert inputs.process("r", prompt, SamplingParams()).prompt_token_ids == [BOS, *b"[user]hi", EOS, *b"[assistant]"]
    other = inputs.render_chat(
        [{"role": "user", "content": "hi"}], ChatOptions(chat_template="{{ bos_token }}{{ messages[0].content }}")
    )
    assert other.text == "<bos>hi"


def test_templates_get_the_engines_values_unless_a_chat_has_others(tmp_path: Path) -> None:
    template = "{{ enable_thinking | default('unset') }} {{ style | default('unset') }}"
    user = [{"role": "user", "content": "hi"}]
    plain = processor(tmp_path, tokenizer={"chat_template": template})
    assert plain.render_chat(user).text == "unset unset"
    values = {"enable_thinking": False, "style": "plain"}
    inputs = processor(tmp_path, tokenizer={"chat_template": template}, default_chat_template_kwargs=values)
    assert inputs.render_chat(user).text == "False plain"
    assert inputs.render_chat(user, ChatOptions(chat_template_kwargs={"enable_thinking": True})).text == "True plain"
    assert inputs.read_prefix(user).text == "False plain"


def test_model_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    inputs = processor(tmp_path, tokenizer={"chat_template": None})
    with pytest.raises(InvalidRequest, match="no chat template.*start octavo with the argument chat_template"):
        inputs.render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("kind", "words"), [("image_url", "is an image"), ("video", "is a video"), ("input_audio", "is a sound")]
)
def test_a_model_for_text_refuses_images_and_sounds_by_their_place_whatever_its_template_reads(
    tmp_path: Path, kind: str, words: str
) -> None:
    inputs = processor(tmp_path, tokenizer={"chat_template": "{{ messages[0].content + '.' }}"})
    content = [{"type": "text", "text": "what is this?"}, {"type": kind, kind: {"url": "https://host.test/x"}}]
    with pytest.raises(InvalidRequest, match=f"{words}, and this model reads text alone") as caught:
        inputs.render_chat([{"role": "user", "content": content}])
    assert caught.value.field == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "field", "words"),
    [
        ("", {}, InvalidRequest, "prompt", "the prompt is empty"),
        ([], {}, InvalidRequest, "prompt_token_ids", "the prompt is empty"),
        ([1, 260], {}, InvalidRequest, "prompt_token_ids", "contains 260; .* from 0 to 259"),
        ([-1], {}, InvalidRequest, "prompt_token_ids", "contains -1"),
        ([1.5], {}, InvalidRequest, "prompt_token_ids", "not a list of integers"),
        ({"text": "hi"}, {}, InvalidRequest, "prompt", "one of the keys prompt, prompt_token_ids and prompt_embeds"),
        ("x" * 256, {}, ContextTooLong, "prompt", "256 tokens, .* maximum context length is 256 .* the prompt to 255"),
        ("x" * 100_000, {}, ContextTooLong, "prompt", "100000 characters"),
        (
            "hi",
            {"max_tokens": 255},
            ContextTooLong,
            "max_tokens",
            "together 257, .* length is 256; set max_tokens to at most 254",
        ),
        ("hi", {"max_tokens": None, "min_tokens": 255}, ContextTooLong, "min_tokens", "has room for 254"),
        ("hi", {"logprobs": 21}, InvalidRequest, "logprobs", "is 21, must be at most 20; .* raise max_logprobs"),
        ("hi", {"prompt_logprobs": 21}, InvalidRequest, "prompt_logprobs", "is 21, must be at most 20"),
        ("hi", {"stop_token_ids": [999]}, InvalidRequest, "stop_token_ids", "contains 999"),
        ("hi", {"allowed_token_ids": [5, 260]}, InvalidRequest, "allowed_token_ids", "contains 260"),
        ("hi", {"logit_bias": {260: 1.0}}, InvalidRequest, "logit_bias", "contains 260"),
        ("hi", {"n": 5}, RequestTooLarge, "n", "n is 5, .* at most 4 .* raise max_num_seqs"),
    ],
)
def test_what_is_wrong_with_a_request_is_said_by_field(
    tmp_path: Path, prompt: Any, params: dict[str, Any], kind: type[InvalidRequest], field: str, words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        processor(tmp_path).process("r", prompt, SamplingParams(**params))
    assert (type(caught.value), caught.value.field) == (kind, field)


def test_longer_context_is_offered_only_to_who_has_shortened_it(tmp_path: Path) -> None:
    for explicit in (True, False):
        with pytest.raises(ContextTooLong) as caught:
            processor(tmp_path, user_set_max_model_len=explicit).process("r", "x" * 300, SamplingParams())
        assert ("raise max_model_len" in str(caught.value)) is explicit


@pytest.mark.parametrize("params", [{"max_tokens": 40, "n": 2}, {"max_tokens": None, "min_tokens": 40, "n": 2}])
def test_request_that_never_fits_the_cache_is_refused_with_the_blocks(tmp_path: Path, params: dict[str, Any]) -> None:
    with pytest.raises(RequestTooLarge, match=r"needs 6 KV blocks of 16 .* the cache has 5; lower max_tokens.*\(n\)"):
        processor(tmp_path, ready={"num_blocks": 5}).process("r", "x" * 4, SamplingParams(**params))


def test_tokenizer_of_another_model_is_found_out(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="the tokenizer belongs to another model"):
        processor(tmp_path, ready={"vocab_size": 50}).process("r", "hi", SamplingParams())


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [EOS], "min_tokens": 1},
        {"allowed_token_ids": [EOS, 7], "stop_token_ids": [7], "min_tokens": 1},
        {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": [ord("a"), EOS], "bad_words": ["aa", "a"], "min_tokens": 2},
    ],
)
def test_parameters_that_bar_every_token_are_refused(tmp_path: Path, params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="leaves no token") as caught:
        processor(tmp_path).process("r", "hi", SamplingParams(**params))
    assert caught.value.field == "allowed_token_ids"


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [EOS]},
        {"allowed_token_ids": [EOS], "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": [EOS, ord("b")], "bad_words": ["aa"], "min_tokens": 2},
        # each is barred behind itself alone
        {"allowed_token_ids": [ord("a"), ord("b")], "bad_words": ["aa", "bb"]},
    ],
)
def test_parameters_that_leave_one_token_are_taken(tmp_path: Path, params: dict[str, Any]) -> None:
    processor(tmp_path).process("r", "hi", SamplingParams(**params))


def test_prompt_is_shortened_from_its_beginning(tmp_path: Path) -> None:
    inputs = processor(tmp_path, tokenizer={"add_bos_token": True}, ready={"max_model_len": 16})
    long = "0123456789abcdefghij"

    def kept(num_tokens: int, **params: Any) -> bytes:
        asked = SamplingParams(truncate_prompt_tokens=num_tokens, **params)
        return bytes(inputs.process("r", long, asked).prompt_token_ids)

    assert kept(4, max_tokens=2) == b"ghij"
    assert kept(-1, max_tokens=4) == b"89abcdefghij"
    assert inputs.process("r", "hi", SamplingParams(truncate_prompt_tokens=9, max_tokens=2)).prompt_token_ids == [
        BOS,
        *b"hi",
    ]
    with pytest.raises(ContextTooLong):
        kept(16)
    with pytest.raises(InvalidRequest, match="truncate_prompt_tokens is 0"):
        kept(0)


def test_all_log_probabilities_are_those_of_the_vocabulary_where_so_many_are_allowed(tmp_path: Path) -> None:
    asked = SamplingParams(logprobs=-1, prompt_logprobs=-1)
    with pytest.raises(
        InvalidRequest, match=r"^logprobs is -1, which is all 300 tokens, must be at most 20; .*max_logprobs"
    ):
        processor(tmp_path, ready={"vocab_size": 300}).process("r", "hi", asked)
    for most in (-1, 300):
        inputs = processor(tmp_path, ready={"vocab_size": 300}, max_logprobs=most)
        params = inputs.process("r", "hi", asked).params
        assert (params.logprobs, params.prompt_logprobs) == (300, 300)


def test_a_prediction_is_tokenised_for_engines_that_speculate_and_cut_off_at_the_context(tmp_path: Path) -> None:
    prompt, params = Prompt(text="ab", prediction="cde" * 1000), SamplingParams(max_tokens=3)
    assert processor(tmp_path).process("a", prompt, params).prediction_token_ids == []
    setup = InputSetup(engine_config(str(tmp_path)).model, core_ready(max_model_len=7), max_num_seqs=4, speculates=True)
    inputs = InputProcessor(setup, tokenizer=byte_tokenizer(tmp_path))
    assert inputs.process("a", prompt, params).prediction_token_ids == [*b"cdecdec"]
    tokenised = Prompt(text="ab", prediction=[1, -1, 1 << 40, 2])
    assert inputs.process("a", tokenised, params).prediction_token_ids == [1, 2]
