"""Cost models by name and from files: a roofline of a model on one device or on several that share its layers."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from octavo.errors import ConfigError
from octavo.simulate.cost_model import STEP_S, CostModel, Roofline
from octavo.simulate.device import DataSheet, device_names, read_device
from octavo.simulate.model_facts import ModelFacts

_KV_BYTES: Final = 2
"""Of one element of keys and values: bfloat16."""


def roofline(model: ModelFacts, device: DataSheet, tensor_parallel_size: int = 1) -> Roofline:
    """Return the costs of a model whose every layer is split over so many devices. Raises ConfigError.

    The group counts as one device with the memory and the rates of all. Besides, each layer adds two all-reduces of
    hidden_size activations a token: a ring moves 2 (N - 1) / N of these bytes through each device's link, and takes
    all_reduce_s however few they are. Heads of keys and values are kept once per device where there are fewer of them.
    """
    size = tensor_parallel_size
    if model.num_heads % size or (model.num_kv_heads % size and size % model.num_kv_heads):
        raise ConfigError(
            f"tensor_parallel_size is {size}, must divide the {model.num_heads} attention heads of {model.name}, and "
            f"divide or be a multiple of its {model.num_kv_heads} heads of keys and values"
        )
    if size > 1 and device.link_bytes_per_s is None:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but {device.name} has no link_bytes_per_s; add it to the device's file"
        )
    num_kv_heads = max(model.num_kv_heads, size)
    flops = (device.fp8_flops_per_s if model.is_fp8 else None) or device.flops_per_s
    all_reduces = 2 * model.num_layers if size > 1 else 0
    activation_bytes = 2 * model.hidden_size * 2 * (size - 1) / size
    return Roofline(
        name=f"{model.name} on {f'{size} × ' if size > 1 else ''}{device.name}",
        weight_bytes=model.bytes_per_parameter * model.num_parameters,
        kv_bytes_per_token=2.0 * _KV_BYTES * model.num_layers * num_kv_heads * model.head_dim,
        flops_per_token=2.0 * model.num_active_parameters,
        flops_per_pair=4.0 * model.num_layers * model.num_heads * model.head_dim,
        device_bytes=size * device.memory_bytes,
        bytes_per_s=size * device.bandwidth_reached * device.bytes_per_s,
        flops_per_s=size * device.arithmetic_reached * flops,
        swap_bytes_per_s=size * device.host_bytes_per_s,
        step_s=STEP_S + all_reduces * device.all_reduce_s,
        token_s=all_reduces * activation_bytes / (device.link_bytes_per_s or 1.0),
        sliding_window=model.sliding_window,
        expert_bytes=model.bytes_per_parameter * model.num_expert_parameters,
        expert_share=model.expert_share,
    )


# ---- by name ----


def _shape(
    billions: float,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    hidden_size: int,
    sliding_window: int | None = None,
) -> ModelFacts:
    return ModelFacts(
        name="",
        num_parameters=1e9 * billions,
        num_active_parameters=1e9 * billions,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        hidden_size=hidden_size,
        sliding_window=sliding_window,
    )


_MODELS: Final = {
    "opt-13b": _shape(12.9, 40, 40, 40, 5120),
    "llama-2-13b": _shape(13.0, 40, 40, 40, 5120),
    "llama-3.1-8b": _shape(8.03, 32, 32, 8, 4096),
    "mistral-7b-v0.1": _shape(7.24, 32, 32, 8, 4096, sliding_window=4096),
    "qwen3-0.6b": _shape(0.6, 28, 16, 8, 1024),
    "qwen3-4b": _shape(4.02, 36, 32, 8, 2560),
    "qwen3-14b": _shape(14.8, 40, 40, 8, 5120),
}
"""Shapes of published checkpoints; bfloat16."""


def preset(name: str) -> Roofline:
    """Return the costs of DEVICE/MODEL, such as h100/llama-3.1-8b. Raises ConfigError that names what there is."""
    device_name, _, model_name = name.partition("/")
    if device_name not in device_names() or model_name not in _MODELS:
        raise ConfigError(
            f"cost_model is {name!r}, which is neither a file nor DEVICE/MODEL with a device of "
            f"{', '.join(device_names())} and a model of {', '.join(_MODELS)}; any other model is given by --model and "
            "--device"
        )
    return msgspec.structs.replace(roofline(_MODELS[model_name], read_device(device_name)), name=name)


def load_cost_model(source: str) -> CostModel:
    """Return a cost model from a JSON file, or a preset by name. Raises ConfigError."""
    path = Path(source).expanduser()
    if not path.is_file():
        if source.endswith(".json"):
            raise ConfigError(
                f"cost_model is {source!r}: there is no such file; octavo bench calibrate --output FILE makes one"
            )
        return preset(source)
    try:
        model: CostModel = msgspec.json.decode(path.read_bytes(), type=CostModel)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{source} is not a cost model: {error}") from error
    return model
