"""Bits to which activations are rounded before they are multiplied with quantised weights."""

from __future__ import annotations

from octavo.config.args import EngineArgs
from octavo.config.checkpoint import QUANTIZATION, Checkpoint
from octavo.config.pooling.pooling_config import sees_both


def activation_bits(args: EngineArgs, checkpoint: Checkpoint, *, has_gpus: bool) -> int:
    """Return the bits that are asked for, or what suits the weights and the device."""
    if args.activation_bits is not None:
        return args.activation_bits
    # vectors lose more by rounding than texts: docs/recipes/gguf.md has figures
    loses_much = checkpoint.gguf is not None and sees_both(checkpoint)
    return 16 if (_are_kept(args, checkpoint) if has_gpus else loses_much) else 8


def _are_kept(args: EngineArgs, checkpoint: Checkpoint) -> bool:
    """Return whether quantised weights are made for activations that are not rounded (W4A16, W8A16)."""
    if args.quantization is not None:
        return args.quantization != "int8"
    stored_as = checkpoint.section(QUANTIZATION)
    if stored_as is None or checkpoint.gguf is not None:
        return False
    groups = stored_as.values.get("config_groups")
    schemes = groups.values() if isinstance(groups, dict) else ()
    return not any(isinstance(each, dict) and each.get("input_activations") for each in schemes)
