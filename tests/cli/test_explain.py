"""`octavo explain`."""

from __future__ import annotations

import pytest

from octavo.cli.main import EXIT_ERROR, main


def test_facts_machine_memory_and_operators_are_shown(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", tiny_model, "--max-num-seqs", "4", "--num-gpu-blocks-override", "33"]) == 0
    shown = capsys.readouterr().out
    for heading in ("model\n", "\nmachine\n", "\nmemory plan (cpu)\n", "\noperators\n"):
        assert heading in shown
    assert "LlamaForCausalLM" in shown
    assert "33 blocks of 16 tokens" in shown
    assert "num_gpu_blocks_override" in shown
    assert "256 tokens" in shown


def test_an_overridden_operator_says_so(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", tiny_model, "--op-overrides", "rms_norm=reference"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("rms_norm")]
    assert "override" in line


def test_an_unknown_operator_is_an_error(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", tiny_model, "--op-overrides", "rmsnorm=reference"]) == EXIT_ERROR
    assert "did you mean rms_norm?" in capsys.readouterr().err


def test_too_long_a_context_is_an_error(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", tiny_model, "--max-model-len", "257"]) == EXIT_ERROR
    assert "must be at most 256" in capsys.readouterr().err
