"""Engine arguments as flags of programs that parse their own command line with argparse."""

from __future__ import annotations

import argparse

import pytest

from octavo import LLM, EngineArgs, FlexibleArgumentParser
from octavo.config.fields import arguments
from octavo.config.sources import engine_args
from octavo.errors import ConfigError


def parser() -> FlexibleArgumentParser:
    return EngineArgs.add_cli_args(FlexibleArgumentParser())


def test_flags_that_are_not_given_are_the_defaults() -> None:
    found = parser().parse_args([])
    assert set(vars(found)) == set(arguments(EngineArgs))
    assert EngineArgs.from_cli_args(found) == engine_args({}) == EngineArgs(**vars(found))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--max-model-len", "2k"], {"max_model_len": 2000}),
        (["--max_model_len=64"], {"max_model_len": 64}),
        (["--gpu-memory-utilization", "0.5"], {"gpu_memory_utilization": 0.5}),
        (["--enforce-eager"], {"enforce_eager": True}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (["--packed-cache-size", "1GiB"], {"packed_cache_size": 1 << 30}),
        (["--served-model-name", "a", "b"], {"served_model_name": ("a", "b")}),
        (["--limit-mm-per-prompt", '{"image": 2}'], {"limit_mm_per_prompt": {"image": 2}}),
        (["--hf-overrides", '{"a": 1}'], {"hf_overrides": {"a": 1}}),
    ],
)
def test_flags_become_the_values_of_their_arguments(words: list[str], expected: dict[str, object]) -> None:
    assert EngineArgs.from_cli_args(parser().parse_args(words)) == engine_args(expected)


def test_a_variable_is_the_default_of_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQS", "7")
    assert parser().parse_args([]).max_num_seqs == 7
    assert parser().parse_args(["--max-num-seqs", "8"]).max_num_seqs == 8


def test_a_program_sets_defaults_and_has_flags_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["program", "--role", "judge", "--my_flag", "1"])
    mine = parser()
    mine.set_defaults(model="somewhere")
    mine.add_argument("--role")
    mine.add_argument("--my_flag")
    found = mine.parse_args()
    assert (found.role, found.my_flag, found.model) == ("judge", "1", "somewhere")


def test_any_parser_of_argparse_gets_the_flags() -> None:
    found = EngineArgs.add_cli_args(argparse.ArgumentParser()).parse_args(["--seed", "3"])
    assert EngineArgs.from_cli_args(found).seed == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compilation-config", "3"], "; --compilation-config: on a GPU octavo chooses kernels"),
        (["--kv-cache-memory-bytes=3"], "; --kv-cache-memory-bytes: octavo calls it kv_cache_memory"),
        (["--max-num-seq-s", "3"], "did you mean max_num_seqs?"),
        (["--max-num-seqs", "many"], "'many', expected a whole number, at least 1"),
        (["--gpu-memory-utilization", "many"], "'many', expected a number, more than 0"),
    ],
)
def test_wrong_words_are_named_with_what_is_near(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(words)
    assert message in capsys.readouterr().err


def test_wrong_values_are_named_when_arguments_are_made() -> None:
    found = parser().parse_args(["--device", "abacus"])
    for make in (lambda: EngineArgs.from_cli_args(found), lambda: LLM(**vars(found))):
        with pytest.raises(ConfigError, match="device is 'abacus', must be one of"):
            make()


def test_the_help_has_every_argument(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--help"])
    shown = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in shown for name in arguments(EngineArgs))
