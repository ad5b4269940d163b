"""LLM: prompts in any form, answers in their order, and a batch that survives its bad members and Ctrl-C."""

from __future__ import annotations

import dataclasses
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.config.args import EngineArgs
from octavo.config.schema import CacheConfig
from octavo.core.messages import EngineCoreRequest, StepOutputs
from octavo.core.outputs import PinnedPrefix
from octavo.core.prompt import Prompt
from octavo.core.sampling_params import OutputKind, SamplingParams
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.text.chat_template import ChatTemplate
from octavo.errors import CheckpointError, ConfigError, EngineDeadError, InvalidRequest
from octavo.llm import LLM
from tests.fakes.byte_tokenizer import BOS, EOS, byte_tokenizer
from tests.fakes.core import ScriptedCore, engine_config
from tests.fakes.engine import make_core


def make_llm(tmp_path: Path, core: ScriptedCore | None = None, **model: Any) -> LLM:
    tokenizer = byte_tokenizer(tmp_path)
    template = ChatTemplate.find(tmp_path, tokenizer)
    return LLM.from_engine(
        LLMEngine(engine_config(str(tmp_path), **model), core or ScriptedCore(), tokenizer, template)
    )


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """One that nothing is changed of."""
    return make_llm(tmp_path_factory.mktemp("llm"))


def texts(outputs: list[Any]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_prompts_come_as_text_ids_or_mappings_one_or_many(tmp_path: Path) -> None:
    llm = make_llm(tmp_path)
    for prompts, expected in (
        ("one", ["one"]),
        ([*b"one"], ["one"]),
        ({"prompt": "one"}, ["one"]),
        (["one", "two"], ["one", "two"]),
        ([[*b"one"], {"prompt_token_ids": [*b"two"]}, Prompt(text="six")], ["one", "two", "six"]),
        ([], []),
    ):
        assert texts(llm.generate(prompts)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("prompts", [None, 5])
def test_what_is_no_prompt_is_refused(prompts: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=f"prompts is {prompts}; give text"):
        make_llm(tmp_path).generate(prompts)


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", 0, [SamplingParams(), {"n": 2}]])
def test_what_are_no_parameters_is_refused(params: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="sampling_params is .*, expected SamplingParams or a list"):
        make_llm(tmp_path).generate(["a", "b"], params)


def test_outputs_come_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    prompts = ["a" * length for length in (9, 1, 5)]
    outputs = make_llm(tmp_path).generate(prompts)
    assert texts(outputs) == prompts
    assert [output.prompt for output in outputs] == prompts
    assert all(output.finished for output in outputs)


def test_parameters_are_for_all_or_for_each(tmp_path: Path) -> None:
    llm = make_llm(tmp_path)
    assert texts(llm.generate(["abc", "abc"], SamplingParams(max_tokens=1))) == ["a", "a"]
    each = [SamplingParams(max_tokens=number, output_kind=OutputKind.DELTA) for number in (1, 2)]
    assert texts(llm.generate(["abc", "abc"], each)) == ["a", "ab"]
    with pytest.raises(InvalidRequest, match="there are 1 prompts, but sampling_params has 2 entries"):
        llm.generate(["abc"], each)


def test_policies_can_be_used_offline(tmp_path: Path) -> None:
    core = ScriptedCore()
    llm = make_llm(tmp_path, core)
    llm.generate(["a", "b"], priority=[3, -1], tenant="alice", first_token_deadline_s=[None, 5.0])
    llm.chat([{"role": "user", "content": "c"}], priority=7, tenant=["bob"], first_token_deadline_s=2)
    llm.generate([{"prompt": "d", "cache_salt": "s"}])
    a, b, c, d = core.requests.values()
    assert [each.priority for each in (a, b, c, d)] == [3, -1, 7, 0]
    assert [each.tenant for each in (a, b, c, d)] == ["alice", "alice", "bob", None]
    due = [each.first_token_deadline and each.first_token_deadline - each.arrival_time for each in (a, b, c, d)]
    assert due == [None, pytest.approx(5), pytest.approx(2), None]
    assert d.cache_salt == "s"


def test_smaller_priorities_are_first_offline(tmp_path: Path) -> None:
    core = make_core(policy="priority", max_num_seqs=1)
    llm = LLM.from_engine(LLMEngine(engine_config(str(tmp_path)), core, byte_tokenizer(tmp_path)))
    outputs = llm.generate([[1], [2], [3]], SamplingParams(max_tokens=2), priority=[2, 3, 1])
    first_tokens = [output.metrics and output.metrics.first_token_time for output in outputs]
    assert sorted(range(3), key=lambda index: first_tokens[index] or 0.0) == [2, 0, 1]
    beams = llm.beam_search([[1], [2]], 2, max_tokens=2, priority=[1, 0], tenant="t")
    assert [len(output.outputs) for output in beams] == [2, 2]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"priority": [1]}, "there are 2 prompts, but priority has 1 entries"),
        ({"priority": "first"}, "priority is 'first', must be a whole number"),
        ({"priority": [1, 2**63]}, f"priority is {2**63}, must be a whole number of 64 bits"),
        ({"first_token_deadline_s": 0}, "first_token_deadline_s is 0, must be a number of seconds above 0"),
        ({"first_token_deadline_s": ["soon", None]}, "first_token_deadline_s is 'soon'"),
        ({"tenant": 5}, "tenant is 5, must be text"),
        ({"tenant": ["t" * 257, None]}, "tenant has 257 characters, must have at most 256"),
    ],
)
def test_what_policies_cannot_read_is_refused(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=words):
        make_llm(tmp_path).generate(["a", "b"], **given)


def test_explicit_parameters_are_used_as_they_are(tmp_path: Path) -> None:
    core = ScriptedCore()
    llm = make_llm(tmp_path, core, generation_defaults={"temperature": 0.5})
    llm.generate("abc")
    llm.generate("abc", SamplingParams())
    llm.generate("abc", llm.get_default_sampling_params(top_p=0.5))
    given = [(request.params.temperature, request.params.top_p) for request in core.requests.values()]
    assert given == [(0.5, 1.0), (1.0, 1.0), (0.5, 0.5)]


def test_refused_prompt_carries_its_error_while_the_others_finish(tmp_path: Path) -> None:
    prompts: list[Any] = ["one", "", [999], {"text": "x"}, "two"]
    outputs = make_llm(tmp_path).generate(prompts)
    assert texts(outputs) == ["one", "", "", "", "two"]
    errors = [output.error for output in outputs]
    assert [error and error.field for error in errors] == [None, "prompt", "prompt_token_ids", "prompt", None]
    assert all(error is None or error.is_client_error for error in errors)
    assert [output.outputs[0].finish_reason for output in outputs] == ["stop", "error", "error", "error", "stop"]


@pytest.mark.parametrize(
    ("arguments", "field", "words"),
    [
        ({"beam_width": 0}, "beam_width", "beam_width is 0, must be at least 1"),
        ({"beam_width": 2000}, "beam_width", "beam_width is 2000, must be at most 1024"),
        ({"beam_width": 2.5}, "beam_width", "beam_width is 2.5, expected a whole number"),
        ({"beam_width": 2, "n": 3}, "n", "n is 3, must be at most beam_width, which is 2"),
        ({"beam_width": 2, "n": 0}, "n", "n is 0, must be at least 1"),
    ],
)
def test_wrong_searches_are_named_in_their_words(
    arguments: dict[str, Any], field: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        make_llm(tmp_path).beam_search("abc", **arguments)
    assert caught.value.field == field


def test_beams_that_the_engine_has_no_room_for_are_refused_by_their_name(tmp_path: Path) -> None:
    for width, room in ((300, "so many beams need 600 candidates"), (100, "the engine runs at most")):
        [output] = make_llm(tmp_path).beam_search("abc", width)
        assert output.error is not None
        assert output.error.message.startswith(f"beam_width is {width}, but {room}")
        assert output.error.field == "beam_width"
    [output] = make_llm(tmp_path).generate("abc", SamplingParams(best_of=100))
    assert output.error is not None
    assert output.error.field == "best_of"


def test_chat_goes_through_the_template(tmp_path: Path) -> None:
    core = ScriptedCore()
    llm = make_llm(tmp_path, core)
    one = [{"role": "user", "content": "hi"}]
    [output] = llm.chat(one)
    assert output.prompt == "<bos>[user]hi<eos>[assistant]"
    assert output.prompt_token_ids == [BOS, *b"[user]hi", EOS, *b"[assistant]"]
    assert [answer.prompt for answer in llm.chat([one, one], add_generation_prompt=False)] == ["<bos>[user]hi<eos>"] * 2
    [refused, fine] = llm.chat([[{"content": "no role"}], one])
    assert refused.error is not None
    assert refused.error.field == "messages[0].role"
    assert fine.error is None
    assert llm.chat([])[0].error is not None
    [refused] = llm.chat("hi")  # type: ignore[arg-type]
    assert refused.error is not None
    assert refused.error.message.startswith("messages is text")


def test_progress_is_shown_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm = make_llm(tmp_path)
    llm.generate(["abc", "de"])
    assert capsys.readouterr().err == ""
    llm.generate(["abc", "de"], use_tqdm=True)
    assert "2/2 prompts" in capsys.readouterr().err


class InterruptedCore(ScriptedCore):
    """Presses Ctrl-C inside its third step."""

    def step(self) -> StepOutputs:
        if self.num_steps == 2:
            signal.raise_signal(signal.SIGINT)
        return super().step()


def test_interrupt_ends_the_batch_between_steps_and_leaves_the_model_usable(tmp_path: Path) -> None:
    core = InterruptedCore()
    llm = make_llm(tmp_path, core)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abcdef", "ghijkl"])
    assert (core.num_steps, core.aborted) == (3, ["0", "1"])
    assert texts(llm.generate("again")) == ["again"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_interrupt_does_not_wait_for_the_step(tmp_path: Path) -> None:
    def press_twice(request: EngineCoreRequest, index: int) -> list[int]:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return []

    with pytest.raises(KeyboardInterrupt):
        make_llm(tmp_path, ScriptedCore(reply=press_twice)).generate("abc")


def test_batch_runs_in_any_thread(tmp_path: Path) -> None:
    llm = make_llm(tmp_path)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.extend(texts(llm.generate(["abc"]))))
    thread.start()
    thread.join(100)
    assert found == ["abc"]


def test_failure_of_the_core_surfaces_once_and_is_named_afterwards(tmp_path: Path) -> None:
    llm = make_llm(tmp_path, ScriptedCore(fail_at_step=2))
    with pytest.raises(RuntimeError, match="the fake core fails"):
        llm.generate(["abc"])
    with pytest.raises(EngineDeadError, match="the fake core fails"):
        llm.generate(["abc"])


def test_leaving_the_context_gives_the_model_back(tmp_path: Path) -> None:
    core = ScriptedCore()
    with make_llm(tmp_path, core) as llm:
        llm.generate("abc")
    assert core.is_shut_down


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LLM(gpu_memory_utilisation=0.5), "did you mean gpu_memory_utilization"),
        (lambda: LLM(max_num_seqs=0), "max_num_seqs"),
        (lambda: LLM(data_parallel_size=2), "data_parallel_size is 2, and an engine in process"),
        (lambda: LLM(prefill=1, decode=1), "prefill is 1, and an engine in process"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_loaded(make: Callable[[], LLM], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def test_model_may_come_from_a_variable_and_a_keyword_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_MODEL", "/from/variable")
    with pytest.raises(CheckpointError, match="/from/variable"):
        LLM()
    with pytest.raises(CheckpointError, match="/from/keyword"):
        LLM(model="/from/keyword")


def real_llm(tmp_path: Path, **options: Any) -> LLM:
    """Over the real scheduler: 64 blocks of four tokens, and bytes as tokens."""
    core = make_core(**options)
    core.ready = msgspec.structs.replace(core.ready, vocab_size=260, max_model_len=100)
    turn = "{% if add_generation_prompt %}!{% endif %}"
    tokenizer = byte_tokenizer(
        tmp_path, chat_template="{% for message in messages %}<{{ message.content }}>{% endfor %}" + turn
    )
    config = engine_config(str(tmp_path))
    config = msgspec.structs.replace(
        config, cache=CacheConfig(dtype="float32", enable_prefix_caching=options.get("enable_prefix_caching", True))
    )
    return LLM.from_engine(LLMEngine(config, core, tokenizer, ChatTemplate.find(tmp_path, tokenizer)))


GREEDY = SamplingParams(max_tokens=1, temperature=0)


def test_a_prefix_is_pinned_before_it_is_computed_in_all_forms_of_a_prompt(tmp_path: Path) -> None:
    for prefix, prompt in (
        ("0123456789", "0123456789 and more"),
        ([*b"0123456789"], [*b"0123456789 and more"]),
        ({"prompt": "0123456789", "cache_salt": "s"}, {"prompt": "0123456789 and more", "cache_salt": "s"}),
        ({"prompt": "0123456789", "cache_namespace": "n"}, {"prompt": "0123456789 and more", "cache_namespace": "n"}),
        ([{"role": "system", "content": "01234567"}], "<01234567><user's turn>!"),
    ):
        llm = real_llm(tmp_path, num_blocks=12)
        pinned = llm.pin_prefix(prefix, ttl_s=1e6)  # type: ignore[arg-type]
        assert pinned == PinnedPrefix(num_tokens=8, because="only full blocks are kept, of 4 tokens each")
        (output,) = llm.generate(prompt, GREEDY)  # type: ignore[arg-type]
        assert (output.num_cached_tokens, output.cache_miss_reason) == (0, "the next block is new")
        llm.generate("z" * 40, GREEDY)  # wants all the other blocks
        assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 8  # type: ignore[arg-type]
        assert llm.unpin_prefix(prefix)  # type: ignore[arg-type]
        assert not llm.unpin_prefix(prefix)  # type: ignore[arg-type]
        llm.generate("y" * 47, GREEDY)
        assert llm.generate(prompt, GREEDY)[0].num_cached_tokens < 8  # type: ignore[arg-type]


def test_only_prefixes_of_text_are_pinned(tmp_path: Path) -> None:
    llm = real_llm(tmp_path)
    for prefix, field in (
        ({"prompt": "0123456789", "multi_modal_data": {"image": 1}}, "multi_modal_data"),
        ({"prompt_embeds": np.zeros((9, 4))}, "prompt_embeds"),
    ):
        with pytest.raises(InvalidRequest, match=f"^{field} is not pinned: give a prefix of text or token ids$"):
            llm.pin_prefix(prefix, 1.0)


def test_an_output_says_why_it_found_no_more_in_the_cache(tmp_path: Path) -> None:
    llm = real_llm(tmp_path)

    def found(prompt: Any) -> tuple[int, str | None]:
        (output,) = llm.generate(prompt, GREEDY)
        return output.num_cached_tokens, output.cache_miss_reason

    assert found("0123456789") == (0, "the next block is new")
    assert found("0123456789") == (8, "the rest fills no block")
    assert found("01234567") == (7, None)
    assert found({"prompt": "0123456789", "cache_salt": "s"}) == (0, "the next block is new")
    assert found({"prompt": "0123456789", "cache_namespace": "s"}) == (0, "the next block is new")
    assert found({"prompt": "0123456789", "cache_namespace": "s"}) == (8, "the rest fills no block")
    assert found({"prompt": "0123456789", "cache_namespace": "s", "cache_salt": "s"}) == (0, "the next block is new")
    assert llm.reset_prefix_cache(reset_running_requests=True)
    assert found("0123456789") == (0, "the next block is new")
    (output,) = llm.generate("0123456789", SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert output.cache_miss_reason == "prompt_logprobs needs every position computed"
    (output,) = real_llm(tmp_path, enable_prefix_caching=False).generate("0123456789", GREEDY)
    assert output.cache_miss_reason == "prefix caching is off"


@pytest.mark.parametrize("ttl_s", [0, -1.0, float("nan"), float("inf"), 1e9, "5", None, True])
def test_a_time_that_is_none_is_refused(ttl_s: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="ttl_s is .*, must be a number of seconds above 0 and at most 31,536,000"):
        real_llm(tmp_path).pin_prefix("0123456789", ttl_s)


@pytest.mark.parametrize(
    ("prefix", "salt", "message"),
    [
        ("", None, "the prompt is empty"),
        ([1, 400], None, "prompt_token_ids contains 400; the model's token ids go from 0 to 259"),
        ("a" * 100, None, "the prompt has 100 tokens, but this model's maximum context length is 100"),
        ("0123", 5, "cache_salt is 5; give text"),
        ({"prompt": "0123", "cache_salt": "s"}, "t", "cache_salt is 't', and 's' in the prompt; give one"),
        (5, None, "prompt_token_ids is not a list of integers"),
        ([{"role": "user"}, 3], None, "messages"),
    ],
)
def test_a_prefix_that_is_none_is_refused(prefix: Any, salt: Any, message: str, tmp_path: Path) -> None:
    llm = real_llm(tmp_path)
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        llm.pin_prefix(prefix, 60.0, salt)
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        llm.unpin_prefix(prefix, salt)


def test_without_the_prefix_cache_nothing_can_be_pinned(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="the prefix cache is off; start the engine with enable_prefix_caching"):
        real_llm(tmp_path, enable_prefix_caching=False).pin_prefix("0123", 60.0)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.characters() | st.binary(max_size=2)
KEYS = st.sampled_from(["prompt", "prompt_token_ids", "cache_salt", "role", "content"]) | st.integers(0, 2)
ANYTHING = st.recursive(
    LEAVES, lambda some: st.lists(some, max_size=3) | st.dictionaries(KEYS, some, max_size=3), max_leaves=6
)


@settings(max_examples=60, deadline=None)
@given(things=st.lists(ANYTHING, min_size=1, max_size=3))
@example(things=[{"prompt": "a", 0: None}])
def test_whatever_stands_in_a_list_of_prompts_the_good_ones_are_answered(llm: LLM, things: list[Any]) -> None:
    first, *others, last = llm.generate(["good", *things, [97, 98]])
    assert texts([first, last]) == ["good", "ab"]
    assert len(others) == len(things)
    good = [{"role": "user", "content": "hi"}]
    first, *others = llm.chat([good, *things])
    assert first.error is None
    assert len(others) == len(things)


def test_text_that_is_no_unicode_is_refused_by_itself(tmp_path: Path) -> None:
    llm = make_llm(tmp_path)
    outputs = llm.generate(["one", "a\udcff", {"prompt": "two", "cache_salt": "\ud800"}, "three"])
    assert [output.error and output.error.field for output in outputs] == [None, "prompt", "cache_salt", None]
    assert texts(outputs) == ["one", "", "", "three"]
    good, bad = [{"role": "user", "content": "hi"}], [{"role": "user", "content": "\ud83d"}]
    outputs = llm.chat([good, bad, good])
    assert [output.error and output.error.field for output in outputs] == [None, "messages", None]
    for prefix in ("a\udcff", bad):
        with pytest.raises(InvalidRequest, match="lone surrogate"):
            llm.pin_prefix(prefix, 10)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="tenant is no valid Unicode"):
        llm.generate("one", tenant="\ud800")
    with pytest.raises(InvalidRequest, match="stop is no valid Unicode"):
        SamplingParams(stop="\ud800")


def test_a_chat_by_hand_is_the_chat_of_the_engine(tmp_path: Path) -> None:
    llm = make_llm(tmp_path)
    messages = [{"role": "user", "content": "hi"}]
    by_hand = llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True)
    assert llm.chat(messages)[0].prompt_token_ids == by_hand


def test_arguments_make_an_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[EngineArgs] = []
    engine = make_llm(tmp_path).engine

    def from_args(args: EngineArgs) -> LLMEngine:
        given.append(args)
        return engine

    monkeypatch.setattr(LLMEngine, "from_args", from_args)
    args = EngineArgs(max_num_seqs=3, served_model_name=("a", "b"))
    llm = LLM.from_engine_args(args)
    assert given == [dataclasses.replace(args, target_step_ms=0.0)]
    assert llm.llm_engine is llm.engine is engine
