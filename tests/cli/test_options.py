"""Flags made from fields."""

from __future__ import annotations

from typing import Any

import pytest
from cyclopts import App

from octavo.cli.options import Given, joined_fields, one_value_each, with_options
from octavo.config.args import EngineArgs
from octavo.config.fields import arguments
from octavo.config.server_args import ServerArgs
from octavo.core.repetition import RepetitionDetectionParams
from octavo.core.sampling_params import SamplingParams
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.errors import InvalidRequest


def call(line: list[str], *classes: type, **options: Any) -> Given:
    """What a command with the flags of `classes` gets from a command line."""
    seen: list[Given] = []

    @with_options(*classes, **options)
    def command(*, given: Given) -> int:
        seen.append(given)
        return 0

    app = App(default_command=command)
    app(line, exit_on_error=False, print_error=False, result_action="return_value")
    return seen[0]


def flag_values(name: str) -> tuple[list[str], Any]:
    """A command line that sets an argument to something else than its default, and the value that it should have."""
    argument = (arguments(EngineArgs) | arguments(ServerArgs))[name]
    flag, arg = f"--{name.replace('_', '-')}", argument.arg
    if arg.choices is not None:
        other = next(c for c in arg.choices if c != argument.default and (arg.only is None or c in arg.only))
        return [flag, other], other
    if argument.kind is bool:
        return ([flag.replace("--", "--no-", 1)], False) if argument.default else ([flag], True)
    if name == "trusted_proxies":
        return [flag, "10.0.0.1", flag, "10.1.0.0/16"], ("10.0.0.1", "10.1.0.0/16")
    if argument.kind is tuple:
        return [flag, "a", flag, "b"], ("a", "b")
    if name == "speculative_config":
        return [flag, '{"method": "ngram", "prompt_lookup_max": 3}'], {"method": "ngram", "prompt_lookup_max": 3}
    if argument.of is Any and argument.kind is dict:
        return [flag, '{"enable_thinking": false}'], {"enable_thinking": False}
    if name == "limit_mm_per_prompt":
        return [flag, "image=3"], {"image": 3}
    if argument.kind is dict:
        texts = {"a": "1", "b": "2.5"}
        pairs = [word for key, text in texts.items() for word in (flag, f"{key}={text}")]
        return pairs, {key: argument.of(text) for key, text in texts.items()}
    if arg.is_bytes:
        size = 3 << 40 if name == "max_bodies_size" else 3 << 20  # all bodies together have room for the largest
        return [flag, str(size)], size
    if arg.is_gib:
        return [flag, "512MiB"], 0.5
    if argument.kind is str:
        text = "http://collector" if name == "otlp_traces_endpoint" else "text"
        return [flag, text], text
    value = argument.kind(arg.le if arg.le is not None and arg.le <= 2 else 3)
    return [flag, str(value)], value


NEEDED = {
    **{name: {"ssl_certfile": "file"} for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_ciphers")},
    "ssl_cert_reqs": {"ssl_certfile": "file", "ssl_ca_certs": "file"},
    "allow_credentials": {"allowed_origins": "http://page"},
}
"""What some arguments need beside them."""


@pytest.mark.parametrize("cls", [EngineArgs, ServerArgs])
def test_every_argument_has_a_flag_that_sets_it(cls: type[EngineArgs] | type[ServerArgs]) -> None:
    flags = {name: flag_values(name) for name, each in arguments(cls).items() if each.arg.only is None}
    given = call([word for line, _ in flags.values() for word in line], cls, ServerArgs)  # a server has those of both
    assert given.values.keys() == flags.keys()
    for name, (_, expected) in flags.items():
        alone = Given(None, NEEDED.get(name, {}) | {name: given.values[name]})
        assert getattr(alone.arguments(cls), name) == expected, name


def test_flags_that_were_not_given_let_other_sources_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQS", "7")
    given = call(["--block-size", "8"], EngineArgs)
    assert given.values == {"block_size": 8}
    assert given.arguments(EngineArgs).max_num_seqs == 7


def test_model_may_be_the_first_word() -> None:
    assert call(["m"], EngineArgs, model="positional").arguments(EngineArgs).model == "m"
    assert call(["--model", "m"], EngineArgs, model="positional").arguments(EngineArgs).model == "m"


def test_the_class_named_first_has_the_flag_that_two_want() -> None:
    given = call(["--seed", "5"], SamplingParams, EngineArgs)
    assert given.sampling({}).seed == 5


def test_sampling_flags_win_over_defaults() -> None:
    given = call(["--temperature", "0.5", "--stop", "a", "--stop", "b"], SamplingParams)
    params = given.sampling({"temperature": 0.9, "top_p": 0.8})
    assert (params.temperature, params.top_p, params.stop) == (0.5, 0.8, ("a", "b"))


def test_parameters_that_are_objects_are_given_as_json() -> None:
    form = '{"choice": ["yes", "no"], "disable_any_whitespace": true}'
    params = call(["--structured-outputs", form], SamplingParams).sampling({})
    assert params.structured_outputs == StructuredOutputsParams(choice=("yes", "no"), disable_any_whitespace=True)
    with pytest.raises(InvalidRequest, match=r"structured_outputs is '\{choice', which is no JSON .*; give such as"):
        call(["--structured-outputs", "{choice"], SamplingParams).sampling({})
    with pytest.raises(InvalidRequest, match="expected an object with one of"):
        call(["--structured-outputs", '"yes"'], SamplingParams).sampling({})
    wanted = call(["--repetition-detection", '{"max_pattern_size": 2, "min_count": 3}'], SamplingParams).sampling({})
    assert wanted.repetition_detection == RepetitionDetectionParams(max_pattern_size=2, min_count=3)


def test_a_search_leaves_out_the_defaults_of_drawing() -> None:
    given = call(["--use-beam-search", "--n", "3"], SamplingParams)
    params = given.sampling({"temperature": 0.9, "top_p": 0.8, "max_tokens": 7})
    assert params == SamplingParams(use_beam_search=True, n=3, max_tokens=7)


def test_negative_numbers_are_values_not_flags() -> None:
    assert call(["--presence-penalty", "-1.5"], SamplingParams).sampling({}).presence_penalty == -1.5


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("serve m --served-model-name a b --port 1", "serve m --served-model-name a --served-model-name b --port 1"),
        ("serve m --lora_modules a=1 b=2 -tp 2", "serve m --lora_modules a=1 --lora_modules b=2 -tp 2"),
        ("serve m --allowed-origins=a b", "serve m --allowed-origins=a b"),
        ("serve m --port 1 2 --enforce-eager", "serve m --port 1 2 --enforce-eager"),
    ],
)
def test_several_values_may_follow_the_flag_of_a_list(words: str, expected: str) -> None:
    assert one_value_each(words.split(), EngineArgs, ServerArgs) == expected.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--speculative-config.method mtp --port 1", ["--port", "1", "--speculative-config", '{"method": "mtp"}']),
        ("--hf_overrides.a.b=1.5 --hf_overrides.a.c x", ["--hf_overrides", '{"a": {"b": 1.5, "c": "x"}}']),
        ("--hf-overrides.a 1 --hf-overrides.a.b 2", ["--hf-overrides", '{"a": {"b": 2}}']),
        ("--port.a 1 --speculative-config.method", ["--port.a", "1", "--speculative-config.method"]),
    ],
)
def test_fields_of_an_object_may_have_flags_of_their_own(words: str, expected: list[str]) -> None:
    assert joined_fields(words.split(), EngineArgs) == expected
