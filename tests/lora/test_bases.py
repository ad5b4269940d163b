"""Adapters over other bases: recurrent layers, latents, stored codes, classes of transformers."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import LLM, LoRARequest, SamplingParams
from tests.fakes import quantized
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import load_oracle, make_checkpoint
from tests.fakes.gguf_files import Stored, convert, plain
from tests.fakes.strangers import make_stranger
from tests.lora.adapted_run import AdaptedRun
from tests.lora.adapter_folders import ATTENTION, LINEAR, make_adapter

PROMPT = list(range(3, 24))
LONG = pytest.mark.long
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}


def same_alone_and_beside_others(run: AdaptedRun) -> Tensor:
    """Return the logits of a prompt with the adapter, alone; beside others and in pieces they are compared by ==."""
    alone, base = run.logits([("x", PROMPT, 1)])["x"], run.logits([("x", PROMPT, 0)])["x"]
    steps = [[("x", PROMPT[:9], 1), ("y", PROMPT, 0)], [("z", PROMPT[:5], 0), ("x", PROMPT[9:], 1)]]
    mixed = run.logits(*steps)
    assert torch.equal(mixed["x"], alone)
    assert torch.equal(mixed["y"], base)
    assert (alone - base).abs().max() > 1e-2 * base.abs().max()
    return alone


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.filterwarnings("ignore")  # what PEFT uses of transformers is deprecated there
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen3_next", ("in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj")),
        ("bamba", ("in_proj",)),
        ("deepseek_v3", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")),
        pytest.param("qwen3_5", ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"), marks=LONG),
        pytest.param("falcon_h1", ("in_proj", "q_proj"), marks=LONG),
        pytest.param("granitemoehybrid", ("in_proj", "q_proj"), marks=LONG),
        pytest.param("lfm2", ("in_proj", "w1", "q_proj"), marks=LONG),
        pytest.param("mamba", ("in_proj", "x_proj"), marks=LONG),
        pytest.param("deepseek_v2", ("q_b_proj", "o_proj"), marks=LONG),
    ],
)
def test_adapters_of_recurrent_layers_and_latents_compute_what_peft_does(
    family: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    base = make_checkpoint(family, tmp_path / "base")
    model = get_peft_model(load_oracle(base), LoraConfig(r=4, lora_alpha=6, target_modules=list(targets)))
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    model.save_pretrained(tmp_path / "adapter")
    with torch.inference_mode():
        expected = model.eval()(input_ids=torch.tensor([PROMPT])).logits[0]
    found = same_alone_and_beside_others(AdaptedRun(base, [tmp_path / "adapter"]))
    # PEFT's own logits are half as far from those of float64
    assert (found - expected).abs().max() < 3e-5 * expected.abs().max()


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "target", "message"),
    [
        ("deepseek_v3", "kv_b_proj", r"self_attn\.kv_b_proj is no linear layer of this model that adapters may change"),
        ("llama", "lm_head", r"lm_head\.base_layer\.weight is no A or B of a linear layer"),
        ("llama", "embed_tokens", r"embed_tokens\.base_layer\.weight is no A or B of a linear layer"),
        ("qwen3_moe", "gate", r"target_parameters names gate\.weight"),
    ],
)
def test_what_peft_saves_of_other_modules_is_named(family: str, target: str, message: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = make_checkpoint(family, tmp_path / "base")
    get_peft_model(load_oracle(base), LoraConfig(target_modules=[target])).save_pretrained(tmp_path / "adapter")
    assert re.search(message, AdaptedRun(base).read(tmp_path / "adapter"))


def q8_0(name: str, tensor: Tensor) -> Stored:
    """Blocks of 32 codes with the nearest scale; norms stay plain."""
    if tensor.dim() != 2:
        return plain(tensor)
    groups = tensor.float().view(-1, 32)
    scales = (groups.abs().amax(1, keepdim=True) / 127).half()
    codes = (groups / scales.float()).round().clamp(-127, 127).to(torch.int8)
    return "Q8_0", tuple(tensor.shape), torch.cat((scales.view(torch.int8), codes), 1).numpy().tobytes()


Quantise = Callable[[Path], Path]


def by(encoding: tuple[Any, dict[str, Any]]) -> Quantise:
    return lambda path: quantized.quantize(path, *encoding)


BASES: dict[str, Quantise] = {
    "GGUF": lambda path: convert(path, "llama", store=q8_0),
    "GPTQ": by(quantized.gptq(8, 32, ordered=True)),
    "AWQ": by(quantized.awq(32)),
}


@pytest.mark.parametrize("kind", BASES)
def test_adapters_over_stored_codes_add_what_they_add_to_the_values_of_the_codes(kind: str, tmp_path: Path) -> None:
    base = make_checkpoint("llama", tmp_path / "base", **WIDE)
    adapter = make_adapter(base, tmp_path / "adapter", LINEAR)
    stored = BASES[kind](base)
    run = AdaptedRun(stored, [adapter])
    with_adapter, without = same_alone_and_beside_others(run), run.logits([("x", PROMPT, 0)])["x"]
    oracle = AdaptedRun(base, [adapter])  # which has the values of the codes, or nearly so
    expected, bare = (oracle.logits([("x", PROMPT, slot)])["x"] for slot in (1, 0))
    added, wanted = with_adapter - without, expected - bare
    assert (added - wanted).norm() < 0.2 * wanted.norm()


@pytest.mark.parametrize("model_type", ["vaultgemma"])
def test_adapters_over_a_class_of_transformers_give_what_they_give_alone(model_type: str, tmp_path: Path) -> None:
    base = make_stranger(model_type, tmp_path / "base")
    write_byte_tokenizer(base)
    adapter = LoRARequest("a", 1, str(make_adapter(base, tmp_path / "adapter", ATTENTION)))
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, ignore_eos=True)
    prompts = [[(7 * i) % 290 + 5 for i in range(length)] for length in (3, 40, 17)]
    asked = [(prompt, each) for prompt in prompts for each in (None, adapter)]
    sizes = {"max_model_len": 128, "max_num_batched_tokens": 24, "max_num_seqs": 8, "num_gpu_blocks_override": 64}
    with LLM(str(base), dtype="float32", enable_lora=True, **sizes) as llm:
        alone = [llm.generate([prompt], params, lora_request=[each])[0].outputs for prompt, each in asked]
        together = llm.generate([prompt for prompt, _ in asked], params, lora_request=[each for _, each in asked])
        assert [each.outputs for each in together] == alone
    assert all(alone[2 * i] != alone[2 * i + 1] for i in range(3))
