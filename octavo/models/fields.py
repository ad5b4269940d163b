"""Fields of configs as tables: the values that a family states, and those that are read from its config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from octavo.config.checkpoint import Checkpoint
from octavo.layers.elementwise import OPERATOR_OF
from octavo.models.config import read_windows, windows_by_kind


class Read:
    """A field that `function` reads, which is given the checkpoint and the other arguments."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        self._function, self._arguments, self._named = function, arguments, named

    def __call__(self, c: Checkpoint) -> Any:
        """Return the field. Raises CheckpointError or UnsupportedModel."""
        return self._function(c, *self._arguments, **self._named)


def fields(**own: Any) -> Mapping[str, Any]:
    """Return fields by their names, each a value or a `Read`."""
    return own


def read_fields(c: Checkpoint, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return all fields; each `Read` is replaced by the value that it reads. Raises CheckpointError or
    UnsupportedModel."""
    return {name: each(c) if isinstance(each, Read) else each for name, each in fields.items()}


def flag(name: str, default: bool = False) -> Read:
    """Read true or false."""
    return Read(Checkpoint.bool, name, default)


def eps(name: str = "rms_norm_eps", default: float = 1e-5) -> Read:
    """Read the eps, which is added under the root of a norm."""
    return Read(Checkpoint.positive_float, name, default)


def activation(default: str) -> Read:
    """Read the name of an activation, one of `OPERATOR_OF`."""
    return Read(Checkpoint.expect, "hidden_act", *OPERATOR_OF, default=default)


def chosen(name: str, default: bool, value: Any) -> Read:
    """Return `value` where the config has true, else None."""
    return Read(lambda c: value if c.bool(name, default) else None)


def read_cap(c: Checkpoint, name: str, default: float | None) -> float | None:
    """Return the soft cap `name`: None where it is null, `default` where the config does not have it."""
    if name not in c.values:
        return default
    return None if c.values[name] is None else c.positive_float(name)


UNRELEASED: Final = "no release has it, and it is not implemented"
BIAS: Final = flag("attention_bias")
MLP_BIAS: Final = flag("mlp_bias")
TIED: Final = flag("tie_word_embeddings", True)
EPS: Final = eps()
HEAD_DIM: Final = Read(Checkpoint.positive, "head_dim", 128)
BY_KIND: Final = Read(windows_by_kind)
WHERE_STATED: Final = Read(lambda c: read_windows(c, is_windowed=c.values.get("sliding_window") is not None))
"""The windows of layers where the config has one."""
WHERE_USED: Final = Read(lambda c: read_windows(c, is_windowed=c.bool("use_sliding_window", False)))
"""The windows of layers where the config says that they are used."""
BEHIND: Final[Mapping[str, str]] = {
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
"""Usual names of norms behind attention and MLP, for `RENAMED`."""
BETWEEN: Final[Mapping[str, str]] = {
    "attention_output_norm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp_output_norm": "post_mlp_layernorm",
}
"""Names of norms before and behind attention and MLP in the releases of Arcee and Huawei."""
GPT2: Final[Mapping[str, str]] = {
    "embed_tokens": "wte",
    "embed_positions": "wpe",
    "layers": "h",
    "norm": "ln_f",
    "input_layernorm": "ln_1",
    "self_attn": "attn",
    "qkv_proj": "c_attn",
    "o_proj": "c_proj",
    "post_attention_layernorm": "ln_2",
    "up_proj": "c_fc",
    "down_proj": "c_proj",
}
"""Names of GPT-2's modules."""
LING: Final[Mapping[str, str]] = {
    "embed_tokens": "word_embeddings",
    "self_attn": "attention",
    "qkv_proj": "query_key_value",
    "o_proj": "dense",
    "q_norm": "query_layernorm",
    "k_norm": "key_layernorm",
}
"""Names of the modules of Ling."""
