"""Typed reading of the objects in JSON files."""

from __future__ import annotations

import builtins
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

from octavo.errors import CheckpointError, UnsupportedModel

T = TypeVar("T")

REQUIRED: Final[Any] = object()
LARGEST_SIZE: Final = 2**31 - 1
MOST_LAYERS: Final = 1 << 10
COUNTS: Final[Mapping[builtins.str, builtins.int]] = {
    **dict.fromkeys(
        (
            *("num_hidden_layers", "num_layers", "n_layer", "encoder_layers", "decoder_layers", "depth"),
            *("encoder_num_hidden_layers", "decoder_num_hidden_layers"),
        ),
        MOST_LAYERS,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 1 << 13),
    "hc_sinkhorn_iters": 1 << 10,
    **dict.fromkeys(
        (
            *("num_attention_heads", "num_key_value_heads", "linear_num_value_heads", "linear_num_key_heads"),
            *("n_heads", "n_kv_heads", "head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"),
        ),
        1 << 13,
    ),
    **dict.fromkeys(("num_labels", "mm_tokens_per_image", "image_seq_length"), 1 << 16),
}
"""The most there may be of what is made, or done, one by one: more would take minutes before weights are looked at."""
_TYPE_WORDS: Final[Mapping[builtins.type, builtins.str]] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
}


class Section:
    """Typed reading of one JSON object; every complaint names the file, the key, what was found and what is expected.

    A key that is `null` counts as absent. overrides: the values that a person has put over those of the file, which
    complaints name instead of it.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        prefix: str = "",
        overrides: Mapping[builtins.str, Any] = MappingProxyType({}),
    ) -> None:
        self.values = values
        self.where = where
        self._prefix = prefix
        self._overrides = overrides

    def int(self, name: str, default: builtins.int = REQUIRED) -> builtins.int:
        """Return the integer `name`; required when no default is given."""
        return self._read(name, int, default)

    def float(self, name: str, default: builtins.float = REQUIRED) -> builtins.float:
        """Return the number `name`, an integer included; JSON's NaN and Infinity are refused."""
        try:
            value = float(self._read(name, float, default))
        except OverflowError:  # an integer of hundreds of digits
            value = math.inf
        if not math.isfinite(value):
            raise self.error(name, "a finite number")
        return value

    def positive_float(self, name: builtins.str, default: builtins.float = REQUIRED) -> builtins.float:
        """Return the number `name`, above 0: a factor or a base."""
        value = self.float(name, default)
        if value <= 0.0:
            raise self.error(name, "a number above 0")
        return value

    def bool(self, name: str, default: builtins.bool = REQUIRED) -> builtins.bool:
        """Return the flag `name`."""
        return self._read(name, bool, default)

    def str(self, name: str, default: builtins.str = REQUIRED) -> builtins.str:
        """Return the string `name`."""
        return self._read(name, str, default)

    def optional_int(self, name: builtins.str) -> builtins.int | None:
        """Return the integer `name`, or None when it is absent or null."""
        return None if self.values.get(name) is None else self.int(name)

    def positive(self, name: builtins.str, default: builtins.int = REQUIRED) -> builtins.int:
        """Return the integer `name`, at least 1: a size or a count."""
        return self._counted(name, 1, default)

    def count(self, name: builtins.str, default: builtins.int = REQUIRED) -> builtins.int:
        """Return the integer `name`, at least 0: how many there are of what a model may lack."""
        return self._counted(name, 0, default)

    def _counted(self, name: builtins.str, least: builtins.int, default: builtins.int) -> builtins.int:
        value = self.int(name, default)
        if value < least:
            raise self.error(name, f"an integer of at least {least}")
        most = COUNTS.get(name, LARGEST_SIZE)
        if value > most:
            raise self.error(name, f"an integer of at most {most}")
        return value

    def optional_positive(self, name: builtins.str) -> builtins.int | None:
        """Return the integer `name`, at least 1, or None when it is absent or null."""
        return None if self.values.get(name) is None else self.positive(name)

    def divisor(
        self, name: builtins.str, of: builtins.str, whole: builtins.int, default: builtins.int = REQUIRED
    ) -> builtins.int:
        """Return the integer `name`, at least 1, which divides `whole`, the value of `of`."""
        found = self.positive(name, default)
        if whole % found:
            raise self.error(name, f"a divisor of {of}, which is {whole}")
        return found

    def listed(
        self, name: builtins.str, count: builtins.int, fits: Callable[[Any], builtins.bool], expected: builtins.str
    ) -> list[Any]:
        """Return the list `name` of `count` values, each of which `fits`; else it is not as `expected`."""
        found = self.values.get(name)
        if not isinstance(found, list) or len(found) != count or not all(map(fits, found)):
            raise self.error(name, expected)
        return found

    def section(self, name: builtins.str) -> Section | None:
        """Return the object `name`, or None when it is absent or null."""
        if self.values.get(name) is None:
            return None
        own = self._overrides.get(name)
        overrides = own if isinstance(own, Mapping) else {}
        return Section(self._read(name, dict, {}), self.where, f"{self._path(name)}.", overrides)

    def part(self, name: builtins.str) -> Section:
        """Return the object `name`, or an empty one when it is absent or null."""
        return self.section(name) or Section({}, self.where, f"{self._path(name)}.")

    def expect(self, name: builtins.str, *allowed: object, default: object = REQUIRED) -> Any:
        """Return the value of `name` when it is one of `allowed`; any other is a model that is not implemented.

        Without a `default` an absent key stands for the first allowed value.
        """
        value = self.values.get(name)
        if value is None:
            value = allowed[0] if default is REQUIRED else default
        if value not in allowed:
            wanted = " or ".join(json.dumps(each) for each in allowed)
            raise UnsupportedModel(
                f"{self.origin(name)}: {self._path(name)} is {shown(value)}, expected {wanted}; "
                "this variant of the model is not implemented"
            )
        return value

    def expect_all(self, **expected: object) -> None:
        """Raise where a key has another value than the expected one; an absent key has it."""
        for name, value in expected.items():
            self.expect(name, value)

    def refuse(self, *names: builtins.str, because: builtins.str) -> None:
        """Raise when one of `names` is set to anything but null, false or empty."""
        for name in names:
            if self.values.get(name):
                raise UnsupportedModel(
                    f"{self.origin(name)}: {self._path(name)} is {shown(self.values[name])}; {because}"
                )

    def error(self, name: builtins.str, expected: builtins.str) -> CheckpointError:
        """Return the complaint that `name` is not as `expected`."""
        found = f"is {shown(self.values[name])}" if name in self.values else "is missing"
        return CheckpointError(f"{self.origin(name)}: {self._path(name)} {found}, expected {expected}")

    def origin(self, *names: builtins.str) -> builtins.str:
        """Return where the values of these keys come from; without names, those of all keys."""
        if not names:
            return f"{self.where} with --hf-overrides" if self._overrides else self.where
        return f"--hf-overrides (over {self.where})" if self._overrides.keys() & set(names) else self.where

    def _path(self, name: builtins.str) -> builtins.str:
        """Return where the key is in the file."""
        return f"{self._prefix}{name}"

    def _read(self, name: builtins.str, kind: type[T], default: T) -> T:
        value: T | None = self.values.get(name)
        if value is None:
            if default is REQUIRED:
                raise self.error(name, _TYPE_WORDS[kind])
            return default
        # an integer is a fine number, but a flag is no integer although Python says so
        accepted = (int, float) if kind is float else (kind,)
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise self.error(name, _TYPE_WORDS[kind])
        return value


def shown(value: object) -> str:
    """Return `value` as JSON, cut to a length that fits a message."""
    is_plain = isinstance(value, int | float | Mapping | Sequence | None)
    text = json.dumps(value, ensure_ascii=False) if is_plain else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises CheckpointError with the place of the damage."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{path}: is not valid JSON (line {error.lineno}, column {error.colno}: {error.msg}); download it again"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {shown(value)}, expected a JSON object")
    return value


def read_section(file: Path, *, may_lack: bool = False) -> Section:
    """Return the keys of a JSON file; none where it is absent and `may_lack`. Raises CheckpointError."""
    return Section({} if may_lack and not file.is_file() else read_json_object(file), str(file))
