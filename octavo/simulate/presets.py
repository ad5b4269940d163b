"""Cost models by name and from files: a roofline of a model on one device or on several."""

from __future__ import annotations

from os.path import expanduser
from pathlib import Path
from typing import Final

import msgspec

from octavo.errors import ConfigError
from octavo.simulate.cost_model import STEP_S, CostModel, Roofline
from octavo.simulate.device import DataSheet, device_names, read_device
from octavo.simulate.model_facts import NAMED, ModelFacts

_STATE_BYTES: Final = 4
"""Bytes of one element of a state: float32."""
_KV_BYTES: Final = 2
"""Bytes of one element of keys and values, and of activations sent between devices: bfloat16."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks of one engine: `tensor` of them share each layer, and `pipeline` stages share the layers.

    reduce: how the ranks combine a layer. gather: all four linears are split by outputs, which is exact. sum: two of
    them are split by inputs.
    """

    tensor: int = 1
    pipeline: int = 1
    reduce: str = "gather"

    @property
    def size(self) -> int:
        return self.tensor * self.pipeline


ALONE: Final = Layout()


def roofline(model: ModelFacts, device: DataSheet, layout: Layout = ALONE) -> Roofline:
    """Return the costs of a model on so many devices. Raises ConfigError for a layout that does not divide the model.

    The devices of a stage count as one device with their total memory and rates. Besides, each layer has collectives,
    each of which takes collective_s and moves bytes through the link of each device: two all-reduces of hidden_size
    activations a token, 2 (N - 1) / N of their bytes, or four gathers, (N - 1) / N of theirs. A stage sends hidden_size
    activations a token to the next one. If there are fewer heads of keys and values than devices, each device keeps
    one. Traffic between hosts goes over the network.
    """
    size = layout.tensor
    _check(model, device, layout)
    num_kv_heads = max(model.num_kv_heads, size)
    num_attending = model.num_layers - model.num_recurrent_layers
    flops = (device.fp8_flops_per_s if model.is_fp8 else None) or device.flops_per_s
    num_collectives, width = 2 * model.num_layers, 2 * model.num_layers * 2 * model.hidden_size
    if layout.reduce == "gather":
        heads = model.num_heads * model.head_dim
        num_collectives, width = (
            2 * num_collectives,
            model.num_layers * (heads + 2 * model.hidden_size + model.intermediate_size),
        )
    collective_s, link = device.link(size)
    handoff_s, wire = device.link(layout.size)
    num_handoffs = layout.pipeline - 1
    is_shared = float(size > 1)
    return Roofline(
        name=f"{model.name} on {f'{layout.size} × ' if layout.size > 1 else ''}{device.name}",
        weight_bytes=model.bytes_per_parameter * model.num_parameters,
        kv_bytes_per_token=float(_KV_BYTES * num_attending * num_kv_heads * model.kv_elements_per_head),
        flops_per_token=2.0 * model.num_active_parameters,
        flops_per_pair=2.0 * num_attending * model.num_heads * model.elements_per_pair,
        device_bytes=layout.size * device.memory_bytes,
        bytes_per_s=size * device.bandwidth_reached * device.bytes_per_s,
        flops_per_s=size * device.arithmetic_reached * flops,
        swap_bytes_per_s=layout.size * device.host_bytes_per_s,
        step_s=STEP_S
        + (device.channel_s if layout.size > 1 else 0.0)
        + is_shared * num_collectives * collective_s
        + num_handoffs * handoff_s,
        token_s=_KV_BYTES * (is_shared * width * (size - 1) / size / link + num_handoffs * model.hidden_size / wire),
        sliding_window=model.sliding_window,
        windowed_share=model.windowed_share,
        state_bytes=_STATE_BYTES * model.state_elements,
        num_layers=model.num_layers,
        expert_bytes=model.bytes_per_parameter * model.num_expert_parameters,
        expert_share=model.expert_share,
        num_stages=layout.pipeline,
    )


def _check(model: ModelFacts, device: DataSheet, layout: Layout) -> None:
    size = layout.tensor
    if model.num_heads % size or (model.num_kv_heads % size and size % model.num_kv_heads):
        raise ConfigError(
            f"tensor_parallel_size is {size}, must divide the {model.num_heads} attention heads of {model.name}, and "
            f"divide or be a multiple of its {model.num_kv_heads} heads of keys and values"
        )
    if layout.pipeline > model.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size is {layout.pipeline}, must be at most the {model.num_layers} layers of "
            f"{model.name}"
        )
    if layout.size > 1 and device.link_bytes_per_s is None:
        name = "tensor_parallel_size" if size > 1 else "pipeline_parallel_size"
        raise ConfigError(
            f"{name} is {max(size, layout.pipeline)}, but {device.name} has no link_bytes_per_s; add it to the "
            "device's file"
        )


def preset(name: str) -> Roofline:
    """Return the costs of DEVICE/MODEL, such as h100/llama-3.1-8b. Raises ConfigError, which lists the presets."""
    device_name, _, model_name = name.partition("/")
    if device_name not in device_names() or model_name not in NAMED:
        raise ConfigError(
            f"cost_model is {name!r}, which is neither a file nor DEVICE/MODEL with a device of "
            f"{', '.join(device_names())} and a model of {', '.join(NAMED)}; any other model is given by --model and "
            "--device"
        )
    return msgspec.structs.replace(roofline(NAMED[model_name], read_device(device_name)), name=name)


def load_cost_model(source: str) -> CostModel:
    """Return a cost model from a JSON file, or a preset by name. Raises ConfigError."""
    path = Path(expanduser(source))
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
