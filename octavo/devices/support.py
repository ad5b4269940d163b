"""Features that a configuration may ask for and that not every device has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from octavo.config.schema import EngineConfig
from octavo.devices.device import Device, open_device
from octavo.errors import ConfigError
from octavo.platform import Platform


class Feature(NamedTuple):
    """A feature that a configuration may ask for and that not every device has."""

    name: str
    """Its name in tables and messages."""
    option: str
    """The option that asks for it."""
    wanted: Callable[[EngineConfig], bool]
    """Returns whether a configuration asks for it."""
    remedy: str = "leave it out"
    """How to configure an engine without it."""


FEATURES: Final[Mapping[str, Feature]] = {
    "adapters": Feature("adapters (LoRA)", "enable_lora", lambda config: config.lora.enable_lora),
    "draft_models": Feature("draft models and heads", "speculative_config", lambda config: config.draft is not None),
    "tensor_ranks": Feature(
        "tensor parallel", "tensor_parallel_size", lambda config: config.device.tensor_parallel_size > 1
    ),
    "stages": Feature(
        "pipeline parallel", "pipeline_parallel_size", lambda config: config.device.pipeline_parallel_size > 1
    ),
    "ray": Feature(
        "ranks that Ray places",
        "executor",
        lambda config: config.device.executor == "ray" and config.device.num_ranks > 1,
    ),
    "chosen_tokens": Feature(
        "contexts beyond index_topk (DeepSeek V3.2, GLM-5)",
        "max_model_len",
        lambda config: config.model.chooses_tokens,
        "set it to at most index_topk of config.json",
    ),
    "transfers": Feature(
        "disaggregated prefill, KV tiers",
        "role, prefill, kv_host_size or kv_disk",
        lambda config: config.transfer.moves_blocks,
    ),
}
"""The features by their names in a device's `lacks`."""


def open_supporting(config: EngineConfig, platform: Platform, place: int = 0) -> Device:
    """Return the device of a configuration, for the rank at `place` among those of this machine.

    Raises ConfigError for what is asked for and the device lacks, and as `open_device` does.
    """
    device = open_device(config.device, platform, place)
    for name, reason in device.lacks.items():
        feature = FEATURES[name]
        if feature.wanted(config):
            raise ConfigError(
                f"{feature.option} asks for {feature.name}, which the device {device.name} does not have: {reason}; "
                f"{feature.remedy}, or choose another device"
            )
    return device
