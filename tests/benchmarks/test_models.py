"""The random checkpoints are what transformers makes of the same config, and octavo runs them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.models import CONFIGS, tensor_shapes, write_checkpoint
from octavo import LLM, SamplingParams

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 56,
    "ffn_dim": 56,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_tensors_are_those_of_the_architecture(name: str) -> None:
    config = CONFIGS[name]
    keys = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    transformers_config = transformers.AutoConfig.for_model(config["model_type"], **keys)
    with torch.device("meta"):
        model = getattr(transformers, config["architectures"][0])(transformers_config)
    expected = {parameter_name: tuple(parameter.shape) for parameter_name, parameter in model.named_parameters()}
    assert dict(tensor_shapes(config)) == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_a_checkpoint_of_each_family_runs(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name] | {key: value for key, value in SMALL.items() if key in CONFIGS[name]}
    path = write_checkpoint(tmp_path / name, config)
    with LLM(str(path), max_num_seqs=2, num_gpu_blocks_override=16) as llm:
        (output,) = llm.generate("octavo", SamplingParams(max_tokens=3, temperature=0, ignore_eos=True), use_tqdm=False)
    assert output.prompt_token_ids == [llm.get_tokenizer().token_id(letter) for letter in "octavo"]
    assert len(output.outputs[0].token_ids) == 3


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    config = CONFIGS["opt-125m"] | {key: value for key, value in SMALL.items() if key in CONFIGS["opt-125m"]}
    first, again, other = (
        (write_checkpoint(tmp_path / name, config, seed) / "model.safetensors").read_bytes()
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    assert first == again
    assert first != other
