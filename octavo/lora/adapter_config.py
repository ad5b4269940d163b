"""adapter_config.json of PEFT: the fields that change the result, and the values that are refused."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from octavo.errors import CheckpointError

CONFIG_FILE: Final = "adapter_config.json"

_ABSENT: Final = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "alora_invocation_tokens",
    "layer_replication",
    "trainable_token_indices",
    "use_qalora",
    "use_bdlora",
    "velora_config",
    "monteclora_config",
    "arrow_config",
    "kasa_config",
)
"""Options that change the computation and are not supported: they have to be absent or off."""

_INITS: Final = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base model as it is."""

_MOST_REPEATS: Final = 4
_MOST_RANK: Final = 1 << 16
_PLAIN: Final = re.compile(r"[\w.\-]+")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The fields of an adapter_config.json that was checked."""

    path: Path
    rank: int
    alpha: float
    ranks: dict[str, int]
    """Ranks by patterns of modules' names."""
    alphas: dict[str, float]
    is_rank_stabilised: bool
    targets: tuple[str, ...] | None
    """Names of modules, or the ends of names; None where the config has a pattern: then the tensors say it."""
    parameters: tuple[str, ...] = ()
    """Names of stacked weights of experts, or the ends of names."""

    @classmethod
    def parse(cls, path: Path, content: bytes) -> AdapterConfig:
        """Check the content of the file at `path`, which is not read again: it may have changed.

        Raises CheckpointError with the field, its value and what was expected.
        """
        try:
            values = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: is no JSON") from error
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: is no JSON object")
        _expect(path, values, "peft_type", values.get("peft_type") == "LORA", "LORA")
        for field in _ABSENT:
            _expect(path, values, field, not values.get(field), "absent or off: it is not implemented")
        _expect(path, values, "bias", values.get("bias", "none") == "none", "none: adapters with biases are not loaded")
        init = values.get("init_lora_weights", True)
        allowed = f"true, false, gaussian, eva or orthogonal: {init} changes the base model; convert the adapter"
        _expect(path, values, "init_lora_weights", init in _INITS, allowed)
        rank, alpha = values.get("r", 8), values.get("lora_alpha", 8)
        _expect(path, values, "r", _is_rank(rank), f"a whole number from 1 to {_MOST_RANK:,}")
        _expect(path, values, "lora_alpha", _is_alpha(alpha), "a number")
        patterns = {name: values.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
        for (name, pattern), is_value in zip(patterns.items(), (_is_rank, _is_alpha), strict=True):
            is_right = (
                isinstance(pattern, dict) and all(map(is_value, pattern.values())) and all(map(_is_cheap, pattern))
            )
            _expect(path, values, name, is_right, "numbers by names of modules, or by patterns without nested repeats")
        targets, parameters = values.get("target_modules"), values.get("target_parameters") or []
        _expect(path, values, "target_parameters", _are_names(parameters), "names of stacked weights")
        if targets is None and parameters:
            targets = []
        is_pattern = isinstance(targets, str) and targets
        _expect(path, values, "target_modules", _are_names(targets) or is_pattern, "names or a pattern")
        return cls(
            path,
            rank,
            float(alpha),
            patterns["rank_pattern"],
            {key: float(value) for key, value in patterns["alpha_pattern"].items()},
            bool(values.get("use_rslora")),
            None if isinstance(targets, str) else tuple(targets or ()),
            tuple(parameters),
        )

    def names_part_of(self, module: str) -> bool:
        """Return whether `parameters` names a weight of a module."""
        return any(is_end_of(each.rpartition(".")[0], module) for each in self.parameters)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module by its full name."""
        return next((rank for key, rank in self.ranks.items() if _matches(key, module)), self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of B · A of a module."""
        rank = self.rank_of(module)
        alpha = next((alpha for key, alpha in self.alphas.items() if _matches(key, module)), self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def is_end_of(target: str, module: str) -> bool:
    """Return whether `target` is the name of a module, or the last parts of it."""
    return module == target or module.endswith(f".{target}")


def _matches(key: str, module: str) -> bool:
    # names, which nearly all keys are, with dots that a pattern would take for any character
    return is_end_of(key, module) or re.match(rf"(.*\.)?({key})$", module) is not None


def _is_cheap(key: Any) -> bool:
    """Return whether a pattern compiles, and compares with a name in little time."""
    if not isinstance(key, str) or len(key) > 512:
        return False
    if _PLAIN.fullmatch(key):
        return True
    try:
        re.compile(key)
    except (re.error, RecursionError, OverflowError):
        return False
    return len(re.findall(r"[*+{]", key)) <= _MOST_REPEATS and not re.search(r"\)[*+{]|\\\d", key)


def _are_names(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, str) and each for each in values)


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST_RANK


def _is_alpha(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30


def _expect(path: Path, values: dict[str, Any], field: str, is_right: object, expected: str) -> None:
    if not is_right:
        raise CheckpointError(f"{path}: {field} is {str(values.get(field))[:80]!r}, expected {expected}")
