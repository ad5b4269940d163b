"""An adapter of llama.cpp: a GGUF file, as its converter writes it of an adapter of PEFT."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.gguf.layout import adapter_tensors
from octavo.gguf.reader import GGUFFile, GGUFTensor, read_gguf_content
from octavo.layers.heads import Heads
from octavo.lora.adapter_config import AdapterConfig
from octavo.models.weight_files import FLOAT_TYPES


def read_gguf_adapter(
    path: Path, content: bytes, heads: Heads, family: str
) -> tuple[AdapterConfig, Mapping[str, Tensor]]:
    """Return the config and the tensors of an adapter, under the names that PEFT has for them.

    content: of the file at `path`, which is not read again. heads, family: of the model, and its class.
    Raises CheckpointError.
    """
    file = read_gguf_content(path, content)
    _expect(file, "general.type", "adapter")
    _expect(file, "adapter.type", "lora")
    if "adapter.alora.invocation_tokens" in file.metadata:
        raise CheckpointError(f"{path}: adapter.alora.invocation_tokens is there, expected an adapter for all tokens")
    tensors, ranks = {}, {}
    for module, which, tensor, turned in adapter_tensors(file, family):
        values = _values(tensor, content)
        if turned:
            num_heads = heads.query if turned == "q" else heads.kv
            if values.shape[0] % (2 * num_heads):
                raise CheckpointError(f"{path}: {tensor.name} has {values.shape[0]} rows, expected {num_heads} heads")
            values = values.reshape(num_heads, -1, 2, *values.shape[1:]).transpose(1, 2).flatten(0, 2)
        if which == "A":
            ranks[module] = values.shape[0]
        tensors[f"base_model.model.{module}.lora_{which}.weight"] = values
    rank = next(iter(ranks.values()), 1)
    others = {module: each for module, each in ranks.items() if each != rank}
    alpha = file.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, float) or not abs(alpha) < 1e30:
        raise CheckpointError(f"{path}: adapter.lora.alpha is {alpha!r}, expected a number")
    # without alpha B · A is added as it is
    alphas = {} if alpha else {module: float(each) for module, each in others.items()}
    return AdapterConfig(path, rank, alpha or float(rank), others, alphas, False, None), tensors


def _values(tensor: GGUFTensor, content: bytes) -> Tensor:
    dtype = FLOAT_TYPES.get(tensor.type)
    if dtype is None:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} is stored as {tensor.type}, expected one of {', '.join(FLOAT_TYPES)}; "
            "convert the adapter with --outtype f16"
        )
    data = bytearray(memoryview(content)[tensor.offset : tensor.offset + tensor.nbytes])
    return torch.frombuffer(data, dtype=dtype).view(tensor.shape)


def _expect(file: GGUFFile, key: str, expected: str) -> None:
    if (found := file.metadata.get(key)) != expected:
        raise CheckpointError(f"{file.path}: {key} is {found!r}, expected {expected}; give an adapter")
