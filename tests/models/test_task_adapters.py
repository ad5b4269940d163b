"""The adapter of a task is added to the weights: the vectors are those of a model whose weights have it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.config.checkpoint import Checkpoint
from octavo.errors import CheckpointError, ConfigError, UnsupportedModel
from octavo.llm import LLM
from octavo.models.save import save_quantized
from octavo.models.task_adapters import adapted_tensors
from tests.fakes.checkpoints import edit_config, edit_tensors, rename_tensors
from tests.fakes.vector_models import save
from tests.models.test_encoders import TEXTS, hidden_of

BACKBONES: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 16, "num_key_value_heads": 2},
    "EuroBert": {"num_key_value_heads": 2},
}
TASKS = ["retrieval.query", "separation", "text-matching"]


def check(path: Path, model: Any, place: int, **arguments: Any) -> None:
    """Vectors are the normalised states of the token at `place`."""
    with LLM(str(path), **arguments) as llm:
        for output in llm.embed(TEXTS):
            want = torch.nn.functional.normalize(hidden_of(model, output.prompt_token_ids)[place], dim=-1)
            torch.testing.assert_close(torch.tensor(output.outputs.embedding), want, rtol=1e-4, atol=1e-5)


def write_adapters(path: Path, weights: dict[str, Tensor], tasks: list[str]) -> dict[str, dict[str, Tensor]]:
    """Write adapters for the projections of attention, and return what each adds to their weights."""
    added: dict[str, dict[str, Tensor]] = {}
    for task in tasks:
        factors: dict[str, Tensor] = {}
        added[task] = {}
        for name in (each for each in weights if each.endswith(("q_proj.weight", "o_proj.weight"))):
            a, b = torch.randn(4, weights[name].shape[1]) / 8, torch.randn(weights[name].shape[0], 4) / 8
            module = f"base_model.model.{name.removesuffix('.weight')}"
            factors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
            added[task][name] = 2.0 * b @ a
        folder = path / "adapters" / task
        folder.mkdir(parents=True)
        save_file(factors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    return added


@pytest.mark.parametrize("family", BACKBONES)
def test_jina_5_has_an_adapter_for_each_task(tmp_path: Path, family: str) -> None:
    model = save(tmp_path, f"{family}Model", **BACKBONES[family])
    edit_config(tmp_path, architectures=["JinaEmbeddingsV5Model"], model_type="jina_embeddings_v5")
    edit_config(tmp_path, is_decoder=family == "Qwen3")
    check(tmp_path, model, -1)  # a checkpoint of one task, without adapters
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    added = write_adapters(tmp_path, weights, ["retrieval", "clustering"])
    for task, arguments in (("retrieval", {}), ("clustering", {"hf_overrides": {"jina_task": "clustering"}})):
        changed = {name: value + added[task].get(name, 0.0) for name, value in weights.items()}
        model.load_state_dict(changed)
        check(tmp_path, model, -1, **arguments)
    with pytest.raises(CheckpointError, match=r'jina_task is "search", expected a task .* \(retrieval, clustering\)'):
        LLM(str(tmp_path), hf_overrides={"jina_task": "search"})
    with pytest.raises(ConfigError, match="has adapters of tasks, which are not added to quantised weights"):
        save_quantized(Checkpoint.open(tmp_path), tmp_path / "int8", "int8", 1)
    edit_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})
    with pytest.raises(UnsupportedModel, match="adapters of tasks are not added to quantised weights"):
        LLM(str(tmp_path))


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    model = save(tmp_path, "Qwen3Model", **BACKBONES["Qwen3"])
    edit_config(tmp_path, architectures=["JinaEmbeddingsV5Model"])
    write_adapters(tmp_path, {"layers.7.self_attn.q_proj.weight": torch.zeros(64, 64)}, ["retrieval"])
    with pytest.raises(CheckpointError, match=r"layers.7.self_attn.q_proj.lora_A.weight belongs to no weight"):
        LLM(str(tmp_path))
    write_adapters(tmp_path, {"layers.0.self_attn.q_proj.weight": torch.zeros(64, 32)}, ["clustering"])
    assert model.config.hidden_size == 64
    with pytest.raises(CheckpointError, match=r"expected matrices whose product is \[64, 64\]"):
        LLM(str(tmp_path), hf_overrides={"jina_task": "clustering"})


def test_an_adapter_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "Qwen3Model", **BACKBONES["Qwen3"])
    edit_config(tmp_path, architectures=["JinaEmbeddingsV5Model"])
    write_adapters(tmp_path, {"layers.0.self_attn.q_proj.weight": torch.zeros(64, 64)}, ["retrieval"])
    folder, loaded = tmp_path / "adapters" / "retrieval", Checkpoint.open(tmp_path)
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    factors = load_file(weights)
    for changes, said in (
        ({"lora_alpha": 1e308}, r"lora_alpha over the rank is 1\.25e\+307, expected a number of float32"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is true"),
    ):
        config.write_text(json.dumps({"peft_type": "LORA", "r": 8, **changes}))
        with pytest.raises(CheckpointError, match=said):
            adapted_tensors(loaded)
    config.write_text(json.dumps({"peft_type": "LORA", "r": 8}))
    for stored, said in (
        ({name: each for name, each in factors.items() if "lora_B" in name}, "lora_B.weight .* lacks the other factor"),
        ({}, "has no tensors"),
    ):
        save_file(stored, weights)
        with pytest.raises(CheckpointError, match=said):
            adapted_tensors(loaded)
    config.unlink()
    with pytest.raises(CheckpointError, match="it has none"):
        adapted_tensors(loaded)


def test_jina_3_has_adapters_beside_its_weights(tmp_path: Path) -> None:
    """They are those of all tasks, one behind the other; the factors of embeddings are in the other order."""
    model = save(tmp_path, "JinaEmbeddingsV3Model", type_vocab_size=1)
    rename_tensors(tmp_path, "", "roberta.")
    written = load_file(tmp_path / "model.safetensors")  # under the names of the releases
    names = ("embeddings.word_embeddings", "layers.0.self_attn.o_proj", "layers.1.mlp.fc1")
    stored: dict[str, Tensor] = {}
    removed: list[str] = []
    added: list[dict[str, Tensor]] = [{}, {}, {}]
    for name in names:
        weight = model.get_submodule(name).weight.detach()
        b, a = torch.randn(3, weight.shape[0], 4) / 8, torch.randn(3, 4, weight.shape[1]) / 8
        first, second = (b, a) if "embeddings" in name else (a, b)
        own = next(each for each, value in written.items() if torch.equal(value, weight))
        removed.append(own)
        beside = f"{own.removesuffix('.weight')}.parametrizations.weight"
        stored |= {f"{beside}.original": weight, f"{beside}.0.lora_A": first, f"{beside}.0.lora_B": second}
        for place, each in enumerate(added):
            each[f"{name}.weight"] = 0.5 * b[place] @ a[place]
    edit_tensors(tmp_path, remove=tuple(removed), **stored)
    rotary = {"model_type": "xlm-roberta", "position_embedding_type": "rotary"}
    edit_config(tmp_path, architectures=["XLMRobertaModel"], **rotary)
    edit_config(tmp_path, lora_adaptations=TASKS, lora_rank=4, lora_alpha=2)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for place, arguments in ((2, {}), (0, {"hf_overrides": {"jina_task": TASKS[0]}})):
        model.load_state_dict({name: value + added[place].get(name, 0.0) for name, value in weights.items()})
        check(tmp_path, model, 0, **arguments)
