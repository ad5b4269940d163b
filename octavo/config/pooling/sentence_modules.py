"""The files of sentence-transformers: which modules stand behind a model, and the prompts before texts.

They are written in two layouts: the class paths and keys of the releases before 5.4, and those of later ones. Modules
are known by the last word of their class path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from octavo.config.pooling.late_interaction import module_files
from octavo.config.pooling.pooling_config import MODES, DenseModule, PoolingConfig
from octavo.config.section import Section, read_section, shown
from octavo.core.pooling import TOKEN_EMBED
from octavo.errors import CheckpointError, UnsupportedModel

_OLD_MODES: Final[Mapping[str, str]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The flags of older files, in the order in which the parts of a vector stand where several are set."""
_ORDER: Final = (
    *("Transformer", "MLMTransformer", "SpladePooling", "Pooling", "LogitScore", "Dense", "MultiVectorMask"),
    "Normalize",
)
_ACTIVATIONS: Final = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "Sigmoid": "sigmoid"}
"""torch's classes of activations, and functions of `torch.nn.functional` and `torch`."""


def listed_modules(folder: Path) -> list[tuple[str, Path]] | None:
    """Return the last word of the class path of each module, and its folder; None without modules.json."""
    file = folder / "modules.json"
    if not file.is_file():
        return None
    try:
        listed = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(listed, list) or not listed:
            raise TypeError(shown(listed))
        found = [(str(each["type"]).rpartition(".")[2], str(each.get("path") or "")) for each in listed]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: is no list of modules with type and path ({error}); download it again"
        ) from error
    for _, path in found:
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise CheckpointError(f"{file}: path is {shown(path)}, expected a folder of the checkpoint")
    return [(kind, folder / path) for kind, path in found]


def read_modules(folder: Path, modules: list[tuple[str, Path]], found: PoolingConfig) -> PoolingConfig:
    """Return the config with what the modules of sentence-transformers say. Raises UnsupportedModel for others."""
    dense: list[DenseModule] = []
    normalize, mask = False, None
    changes: dict[str, Any] = {}
    for kind, path in modules:
        if kind in ("Transformer", "MLMTransformer"):
            changes["max_tokens"] = _max_tokens(path)
        elif kind == "Pooling":
            changes["modes"] = _read_modes(read_section(path / "config.json"))
        elif kind == "Dense":
            dense.append(_read_dense(folder, path))
        elif kind == "Normalize":
            normalize = True
        elif kind == "SpladePooling":
            splade = read_section(path / "config.json")
            changes["sparse"] = splade.expect("pooling_strategy", "max", "sum")
            changes["num_logs"] = 1 + (splade.expect("activation_function", "relu", "log1p_relu") == "log1p_relu")
        elif kind == "MultiVectorMask":
            mask = path
        elif kind == "LogitScore":
            score = read_section(path / "config.json")
            other = score.optional_int("false_token_id")
            changes["token_ids"] = (score.int("true_token_id"), *(() if other is None else (other,)))
        else:
            raise UnsupportedModel(
                f"{folder / 'modules.json'}: type is {shown(kind)}, expected Transformer, Pooling, Dense, Normalize, "
                "MultiVectorMask, SpladePooling or LogitScore; this module is not implemented"
            )
    kinds = [kind for kind, _ in modules]
    if sorted(kinds, key=_ORDER.index) != kinds:
        raise UnsupportedModel(
            f"{folder / 'modules.json'}: the modules are {', '.join(kinds)}, expected Transformer, Pooling, Dense and "
            "Normalize, or Transformer, Dense, MultiVectorMask and Normalize, in this order"
        )
    prompts, default = _prompts(folder / "config_sentence_transformers.json")
    if mask is not None or ("Dense" in kinds and "Pooling" not in kinds):
        late = module_files(folder, modules[0][1], mask, prompts)
        changes |= {"task": TOKEN_EMBED, "late": late}
        normalize |= mask is None  # PyLate does so without a module
    return msgspec.structs.replace(
        found, normalize=normalize, dense=tuple(dense), prompts=prompts, default_prompt=default, **changes
    )


def _max_tokens(folder: Path) -> int | None:
    """Return the longest prompt in tokens, where one of the files that have had that names it."""
    for name in ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json"):
        if (folder / name).is_file():
            return read_section(folder / name).optional_positive("max_seq_length")
    return None


def _read_modes(c: Section) -> tuple[str, ...]:
    """Read the modes of pooling in either layout. Raises CheckpointError or UnsupportedModel."""
    if c.values.get("include_prompt") is False:
        c.expect("include_prompt", True)
    modes = c.values.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _OLD_MODES.items() if c.bool(flag, False)]
    listed = [modes] if isinstance(modes, str) else modes
    if not isinstance(listed, list) or not listed or any(mode not in MODES for mode in listed):
        raise c.error("pooling_mode", f"one or several of {', '.join(MODES)}")
    return tuple(listed)


def _read_dense(folder: Path, path: Path) -> DenseModule:
    c = read_section(path / "config.json")
    c.expect("use_residual", False)
    return DenseModule(
        str(path.relative_to(folder)),
        c.positive("in_features"),
        c.positive("out_features"),
        activation_named(
            c.str("activation_function", "torch.nn.modules.linear.Identity"), c.where, "activation_function"
        ),
        c.bool("bias", True),
    )


def activation_named(path: object, where: str, name: str) -> str:
    """Return the function that a class path of torch names. Raises UnsupportedModel."""
    word = str(path).rpartition(".")[2].removesuffix("()")
    if word not in _ACTIVATIONS:
        raise UnsupportedModel(f"{where}: {name} is {shown(path)}, expected one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[word]


def _prompts(file: Path) -> tuple[dict[str, str], str]:
    """Return the prompts by name, and the one that is used where no other is named; "" for none."""
    c = read_section(file, may_lack=True)
    given = c.section("prompts")
    prompts = {} if given is None else given.values
    if any(not isinstance(text, str) for text in prompts.values()):
        raise c.error("prompts", "an object from names to texts")
    name = c.values.get("default_prompt_name")
    if name is not None and name not in prompts:
        raise c.error("default_prompt_name", "null or one of prompts")
    return dict(prompts), "" if name is None else prompts[name]
