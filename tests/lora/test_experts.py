"""Adapters of experts compute what PEFT's do, and the same bits in every batch."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, LoRARequest, SamplingParams
from octavo.config.schema import LoRAConfig
from octavo.distributed.mesh import Mesh
from octavo.lora.slots import planned_bytes
from tests.distributed.threads import run_on, thread_meshes
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import load_oracle, make_checkpoint
from tests.fakes.gguf_files import Stored, convert
from tests.lora.adapted_run import AdaptedRun
from tests.lora.adapter_folders import edit
from tests.lora.test_bases import q8_0, same_alone_and_beside_others

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed"),
    pytest.mark.filterwarnings("ignore"),  # what PEFT uses of transformers is deprecated there
]
PROMPT = list(range(3, 24))
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def save_adapter(base: Path, folder: Path, parameters: list[str], seed: int = 1, **config: Any) -> torch.Tensor:
    """Write an adapter of PEFT's own, and return what its model computes: logits [tokens, vocabulary]."""
    from peft import LoraConfig, get_peft_model

    made = LoraConfig(r=4, lora_alpha=6, target_parameters=parameters, **{"target_modules": ["q_proj"], **config})
    model = get_peft_model(load_oracle(base), made)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(folder)
    with torch.inference_mode():
        logits: torch.Tensor = model.eval()(input_ids=torch.tensor([PROMPT])).logits[0]
    return logits


@pytest.mark.parametrize(
    ("family", "parameters", "config"),
    [
        ("qwen3_moe", BOTH, {}),
        ("mixtral", BOTH[1:], {"use_rslora": True}),
        ("gpt_oss", BOTH, {"rank_pattern": {"experts.down_proj": 7}}),
        pytest.param("deepseek_v3", BOTH, {"target_modules": ["o_proj"]}, marks=pytest.mark.long),
        pytest.param("olmoe", BOTH[:1], {"alpha_pattern": {"gate_up_proj": 3}}, marks=pytest.mark.long),
    ],
)
def test_adapters_of_experts_compute_what_peft_does(
    family: str, parameters: list[str], config: dict[str, Any], tmp_path: Path
) -> None:
    base = make_checkpoint(family, tmp_path / "base")
    expected = save_adapter(base, tmp_path / "adapter", parameters, **config)
    run = AdaptedRun(base, [tmp_path / "adapter"], experts=True)
    found = run.logits([("x", PROMPT, 1)])["x"]
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (run.logits([("x", PROMPT, 0)])["x"] - expected).abs().max() > 1e-3 * expected.abs().max()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "mlp_only_layers": [], "vocab_size": 300}
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("base"), **sizes)


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    for name, parameters in (("a", BOTH), ("b", BOTH[1:])):
        save_adapter(base, root / name, parameters, seed=ord(name))
    return [root / "a", root / "b"]


WAYS = [("float32", None), ("bfloat16", None), ("bfloat16", "int8"), ("float32", "int4")]


@pytest.mark.parametrize("way", WAYS)
def test_a_row_has_the_same_bits_anywhere(base: Path, folders: list[Path], way: tuple[str, str | None]) -> None:
    options: dict[str, Any] = {"dtype": getattr(torch, way[0]), "method": way[1], "experts": True}
    run, plain = AdaptedRun(base, folders, **options), AdaptedRun(base, **options)
    alone = {slot: run.logits([("x", PROMPT, slot)])["x"] for slot in range(3)}
    assert torch.equal(alone[0], plain.logits([("x", PROMPT, 0)])["x"])
    assert len({each.sum().item() for each in alone.values()}) == 3
    mixed = run.logits(
        [("1", PROMPT[:9], 1), ("0", PROMPT[:1], 0), ("2", PROMPT, 2), ("b", PROMPT, 1)],
        [("0", PROMPT[1:12], 0), ("1", PROMPT[9:20], 1)],
        [("0", PROMPT[12:], 0), ("1", PROMPT[20:], 1)],
    )
    for name, slot in (("0", 0), ("1", 1), ("2", 2), ("b", 1)):
        assert torch.equal(mixed[name], alone[slot]), f"slot {slot}"


@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize("way", WAYS[:3])
def test_ranks_compute_the_bits_of_one_rank(
    base: Path, folders: list[Path], way: tuple[str, str | None], whole_experts: bool
) -> None:
    options: dict[str, Any] = {"dtype": getattr(torch, way[0]), "method": way[1], "experts": True}
    rows = [(str(slot), PROMPT, slot) for slot in range(3)]
    expected = AdaptedRun(base, folders, **options).logits(rows)

    def of_rank(mesh: Mesh) -> dict[str, torch.Tensor]:
        return AdaptedRun(base, folders, mesh=mesh, **options).logits(rows)

    for found in run_on(thread_meshes(2, whole_experts=whole_experts), of_rank):
        for name in expected:
            assert torch.equal(found[name], expected[name]), name


def test_requests_with_adapters_of_experts_get_what_they_get_alone(base: Path, folders: list[Path]) -> None:
    write_byte_tokenizer(base)
    adapters = [None, *(LoRARequest(each.name, n, str(each)) for n, each in enumerate(folders, 1))]
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True)
    asked = [(PROMPT[:length], each) for length in (3, 20) for each in adapters]
    sizes: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_model_len": 128, "max_num_seqs": 8}
    found = []
    for args in ({}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2, "max_num_batched_tokens": 16}):
        given = {"dtype": "float32", "enable_lora": True, "enable_lora_experts": True, "max_loras": 2, **sizes, **args}
        with LLM(str(base), threads=1, **given) as llm:
            if not args:
                found.append([llm.generate([p], params, lora_request=[each])[0].outputs for p, each in asked])
            outputs = llm.generate([p for p, _ in asked], params, lora_request=[each for _, each in asked])
            found.append([each.outputs for each in outputs])
    assert all(each == found[0] for each in found)
    assert len({str(each) for each in found[0]}) == len(asked)


def test_adapters_of_experts_over_stored_codes_give_the_same_bits_in_every_batch(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "head_dim": 32}
    base = make_checkpoint("qwen3_moe", tmp_path / "base", mlp_only_layers=[], **sizes)
    save_adapter(base, tmp_path / "adapter", BOTH)

    def store(name: str, tensor: torch.Tensor) -> Stored:
        kind, _, content = q8_0(name, tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() == 3 else tensor)
        return kind, tuple(tensor.shape), content

    same_alone_and_beside_others(
        AdaptedRun(convert(base, "qwen3moe", store=store), [tmp_path / "adapter"], experts=True)
    )


def test_the_plan_counts_the_matrices_of_every_expert(base: Path) -> None:
    model = AdaptedRun(base).loaded
    sizes: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "lora_dtype": "bfloat16"}
    without, with_experts = (
        planned_bytes(model, LoRAConfig(enable_lora_experts=is_on, **sizes), 16) for is_on in (False, True)
    )
    experts, layers, elements = 6, 3, 8 * ((64 + 128) + (64 + 64))
    assert with_experts - without == 2 * 2 * layers * experts * elements


def test_adapters_of_experts_that_do_not_fit_are_refused_by_name(base: Path, tmp_path: Path) -> None:
    folder, run = tmp_path / "adapter", AdaptedRun(base, experts=True)
    save_adapter(base, folder, BOTH)

    def refused(message: str, run: AdaptedRun = run, **changes: Any) -> None:
        copy = tmp_path / message[:9]
        copy.mkdir()
        for each in folder.iterdir():
            (copy / each.name).write_bytes(each.read_bytes())
        assert re.search(message, run.read(edit(copy, **changes))), run.read(copy)

    refused("enable_lora_experts", AdaptedRun(base))
    refused("holds .*gate_up_proj, which target_parameters", target_parameters=BOTH[1:])
    refused("target_parameters names .*odd", target_parameters=[*BOTH, "odd.weight"])
    refused("require .* of gate_up_proj or .* of down_proj", rank_pattern={"experts.down_proj": 5})
    name = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
    tensor = load_file(folder / "adapter_model.safetensors")[name]
    refused("lora_A.weight holds NaN", tensors={name: torch.full_like(tensor, torch.nan)})
    refused("lora_B.weight is missing", remove=("layers.0.mlp.experts.lora_B.weight",))
    other = name.replace("layers.0", "layers.9")
    wrong = {other: tensor, other.replace("lora_A", "lora_B"): tensor.clone()}
    refused("layers.9.mlp.experts has no stacked weights", tensors=wrong)
    save_file({}, folder / "adapter_model.safetensors")
    assert "holds no tensors" in run.read(folder)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "target_parameters": "x"}))
    assert "target_parameters is 'x'" in run.read(folder)
