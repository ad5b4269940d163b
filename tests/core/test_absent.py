"""What is said to options of other engines."""

from __future__ import annotations

import re

import pytest

import octavo
from octavo import LLM, AsyncLLMEngine, LLMEngine
from octavo.cli.main import EXIT_USAGE, main
from octavo.config.args import EngineArgs
from octavo.config.server_args import ServerArgs
from octavo.config.sources import engine_args, known_arguments, read_environment
from octavo.core.absent import absent_names, absent_options, remark, renamed_options, value_remark
from octavo.core.sampling_params import SamplingParams
from octavo.errors import ConfigError, InvalidRequest


def test_what_is_there_is_not_said_to_be_absent() -> None:
    there = {*known_arguments(), *SamplingParams.__struct_fields__}
    assert there & set(absent_options()) == set()


def test_other_names_lead_to_arguments() -> None:
    assert set(renamed_options().values()) <= {*known_arguments(), *SamplingParams.__struct_fields__}


def test_options_about_kv_between_engines_lead_to_the_roles_and_tiers_that_octavo_has() -> None:
    assert remark("kv_transfer_config", ()) == ": give prefill and decode, or role on each machine and octavo proxy"
    assert remark("kv_offloading_size", ()) == ": octavo calls it kv_host_size"
    assert "octavo proxy" in remark("data_parallel_address", ())


def test_a_feature_that_is_not_there_yet_is_named_and_no_other_option_suggested() -> None:
    said = "enable_prompt_adapter is not an argument of LLM: prompt adapters are not there yet"
    with pytest.raises(ConfigError, match=f"^{said}$"):
        engine_args({"enable_prompt_adapter": True}, environ={})
    with pytest.raises(ConfigError, match=r"OCTAVO_ENABLE_PROMPT_ADAPTER, .*: prompt adapters are not there yet$"):
        read_environment({"OCTAVO_ENABLE_PROMPT_ADAPTER": "1"})
    with pytest.raises(ConfigError, match=r"of EngineArgs: give speculative_config$"):
        EngineArgs(speculative_model="small")
    with pytest.raises(ConfigError, match=r"of ServerArgs: octavo calls it allowed_origins$"):
        ServerArgs(allow_origins=["*"])
    with pytest.raises(InvalidRequest, match="guided_json is not a sampling parameter: give structured_outputs"):
        SamplingParams(guided_json={})


def test_a_mistyped_name_is_answered_with_the_nearest() -> None:
    assert remark("max_num_seq", known_arguments()) == "; did you mean max_num_seqs?"
    assert remark("zzz", known_arguments()) == ""


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("device", "gpu", "give cuda for a GPU of NVIDIA"),
        ("quantization", "awq", "quantised already"),
        ("dtype", "half", "octavo calls it float16"),
    ],
)
def test_a_value_of_other_engines_is_answered_with_what_to_do(
    name: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is '{value}', must be one of .*; .*{said}$"):
        EngineArgs(**{name: value})
    assert main(["run", f"--{name}", value, "Once"]) == EXIT_USAGE
    line = capsys.readouterr().err
    assert line.startswith(f"octavo: --{name} {value}: ")
    assert line.endswith(f"{said}\n")
    assert value_remark(name, "auto") is None


@pytest.mark.parametrize("name", absent_names())
def test_what_a_program_imports_or_calls_is_absent_with_a_reason(name: str) -> None:
    assert name not in octavo.__all__
    with pytest.raises(ImportError, match=re.escape(f"octavo has no {name}: {absent_names()[name]}")):
        exec(f"from octavo import {name}")
    for cls in (LLM, LLMEngine, AsyncLLMEngine):
        assert name not in vars(cls)


def test_a_method_that_is_absent_says_why() -> None:
    engine = AsyncLLMEngine.from_engine_args(EngineArgs())
    with pytest.raises(AttributeError, match=r"'AsyncLLMEngine' object has no attribute 'apply_model': octavo runs no"):
        engine.apply_model  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"'AsyncLLMEngine' object has no attribute 'nothing'$"):
        engine.nothing  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'apply_model': octavo runs"):
        LLM.__new__(LLM).apply_model  # type: ignore[attr-defined]  # noqa: B018
