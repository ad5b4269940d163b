"""`octavo explain`."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import msgspec

from octavo.cli.explain import _without_weights, prepared, render_operators
from octavo.cli.main import EXIT_ERROR, main
from octavo.config.args import EngineArgs
from octavo.config.resolve import configure
from tests.cli.conftest import Command
from tests.fakes.checkpoints import edit_config


def test_facts_machine_memory_and_operators_are_shown(tiny_model: str, command: Command) -> None:
    shown = command("explain", tiny_model, "--max-num-seqs", "4", "--num-gpu-blocks-override", "33").out
    for heading in ("model\n", "\nmachine\n", "\nmemory plan (cpu)\n", "\noperators\n"):
        assert heading in shown
    assert "LlamaForCausalLM" in shown
    assert "33 blocks of 16 tokens" in shown
    assert "num_gpu_blocks_override" in shown
    assert "256 tokens" in shown


def test_replicas_have_a_plan_of_their_share(tiny_model: str, command: Command) -> None:
    shared = command("explain", tiny_model, "--data-parallel-size", "2", "--kv-cache-memory", "8MiB").out
    assert "\neach of 2 replicas has the following\n\nmemory plan" in shared
    alone = command("explain", tiny_model, "--kv-cache-memory", "4MiB").out
    blocks = r"([\d,]+) blocks of 16 tokens"
    assert re.findall(blocks, shared) == re.findall(blocks, alone)


def test_what_the_rounding_of_activations_costs_is_shown(tiny_model: str, command: Command) -> None:
    for bits, error in (("8", "0.8 %"), ("16", "0.003 %")):
        assert (
            f"rounded to {bits} bits a token, {error} of a product"
            in command("explain", tiny_model, "--quantization", "int8", "--activation-bits", bits).out
        )
    assert (
        "activation_bits=4 is refused: bits are 8 or 16"
        in command("explain", tiny_model, "--quantization", "int8", "--activation-bits", "4", code=EXIT_ERROR).err
    )


def test_operators_with_one_choice_and_reason_are_listed_together() -> None:
    choices = [("device", "cpu", "auto"), *((f"op{n}", "native", "compiled") for n in range(4)), ("one", "other", "")]
    expected = "operators\n  device  cpu    auto\n  one     other\n  native for 4: compiled\n    op0, op1, op2, op3"
    assert render_operators(choices) == expected
    assert render_operators(choices[:4]).splitlines()[2] == "  op0     native  compiled"


def test_an_overridden_operator_says_so(tiny_model: str, command: Command) -> None:
    (line,) = [
        line
        for line in command("explain", tiny_model, "--op-overrides", "rms_norm=reference").out.splitlines()
        if line.strip().startswith("rms_norm")
    ]
    assert "override" in line


def test_an_unknown_operator_is_an_error(tiny_model: str, command: Command) -> None:
    assert (
        "did you mean rms_norm?"
        in command("explain", tiny_model, "--op-overrides", "rmsnorm=reference", code=EXIT_ERROR).err
    )


def test_too_long_a_context_is_an_error(tiny_model: str, command: Command) -> None:
    assert "must be at most 256" in command("explain", tiny_model, "--max-model-len", "257", code=EXIT_ERROR).err


def test_weights_of_a_hub_model_are_left_there(tiny_model: str) -> None:
    assert _without_weights(EngineArgs(model="owner/model")).load_format == "dummy"
    assert _without_weights(EngineArgs(model=tiny_model)).load_format == "auto"
    assert _without_weights(EngineArgs()).load_format == "auto"


def test_a_checkpoint_without_weights_can_be_explained(tiny_model: str, tmp_path: Path, command: Command) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(tiny_model) / name, tmp_path)
    shown = command("explain", str(tmp_path), "--dtype", "bfloat16").out
    assert re.search(r"number format +bfloat16\n", shown)
    assert "not counted" in shown
    assert main(["explain", str(tmp_path)]) == 0
    edit_config(tmp_path, architectures=["UnheardOfForCausalLM"])
    assert "there is no model family UnheardOf yet" in command("explain", str(tmp_path), code=EXIT_ERROR).err


def test_what_a_start_refuses_is_named_after_the_plan(tiny_model: str, tmp_path: Path, command: Command) -> None:
    shutil.copy(Path(tiny_model) / "config.json", tmp_path)
    shown = command("explain", str(tmp_path), code=EXIT_ERROR)
    assert "\nmemory plan" in shown.out
    assert "has no tokenizer.json" in shown.err
    shutil.copytree(tiny_model, tmp_path, dirs_exist_ok=True)
    edit_config(tmp_path, intermediate_size=48)
    assert "the two do not belong together" in command("explain", str(tmp_path), code=EXIT_ERROR).err


def test_a_wrong_task_is_refused_without_weights(tiny_model: str, tmp_path: Path, command: Command) -> None:
    shutil.copytree(Path(tiny_model), tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors*"))
    folder = tmp_path / "adapters" / "retrieval"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    edit_config(tmp_path, architectures=["JinaEmbeddingsV5Model"], model_type="qwen3", jina_task="retrieve")
    error = command("explain", str(tmp_path), code=EXIT_ERROR).err
    assert 'jina_task is "retrieve", expected a task that this checkpoint has an adapter for (retrieval)' in error


def test_each_rank_has_a_plan_with_the_blocks_that_every_rank_has_room_for(tiny_model: str) -> None:
    config = configure(EngineArgs(model=tiny_model, kv_cache_memory="8MiB"))
    (only,), operators, _ = prepared(config)
    alone = only.render()
    assert alone.startswith("memory plan (")
    device = dataclasses.replace(config.device, tensor_parallel_size=2, pipeline_parallel_size=2)
    shared, _, _ = prepared(msgspec.structs.replace(config, device=device))
    plans = [plan.render() for plan in shared]
    assert [re.findall(r"\b[0-3] of 4\b.*", plan) != [] for plan in plans] == [True] * 4
    assert len({re.findall(r"([\d,]+) blocks of 16", plan)[0] for plan in plans}) == 1
    assert ["available to this rank, its share" in plan for plan in (alone, *plans)] == [False] + [True] * 4
    weights = [float(re.findall(r"weights +([\d.]+) KiB", plan)[0]) for plan in (alone, *plans)]
    assert sum(weights[1:3]) < weights[0]
    assert ("device", "cpu") in {operator[:2] for operator in operators}


def test_ranks_that_share_layers_are_explained_by_a_flag(tiny_model: str, command: Command) -> None:
    assert re.findall(r"rank (\d) of 2", command("explain", tiny_model, "--tensor-parallel-size", "2").out) == [
        "0",
        "1",
    ]


def test_what_is_kept_on_disk_is_explained(tiny_model: str, tmp_path: Path, command: Command) -> None:
    assert re.search(
        r"kept KV\n  kv_disk  not measured yet", command("explain", tiny_model, "--kv-disk", str(tmp_path / "kv")).out
    )
    assert not (tmp_path / "kv").exists()
