"""What a checkpoint says about vectors that are made of hidden states: sentence-transformers' files and config.json.

sentence-transformers writes its files in two layouts: the class paths and keys of its releases before 5.4, and those of
later ones. Modules are known by the last word of their class path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from octavo.config.checkpoint import Checkpoint, read_json_object
from octavo.config.pooling_args import PoolingArgs
from octavo.config.section import Section, shown
from octavo.core.pooling import CLASSIFY, EMBED
from octavo.errors import CheckpointError, ConfigError, UnsupportedModel

ENCODERS: Final = frozenset({"bert", "roberta", "xlm-roberta", "modernbert", "nomic_bert", "gte", "new"})
"""`model_type` of the models whose tokens see those behind them too."""
MODES: Final = ("cls", "lasttoken", "mean", "max", "weightedmean", "mean_sqrt_len_tokens")
_OLD_MODES: Final[Mapping[str, str]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The flags of older files, in the order in which the parts of a vector stand where several are set."""
_ACTIVATIONS: Final = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "Sigmoid": "sigmoid"}
"""torch's classes of activations, and functions of `torch.nn.functional` and `torch`."""


class DenseModule(msgspec.Struct, frozen=True):
    """A linear layer behind pooling: its folder, its activation and whether it has a bias."""

    folder: str
    inputs: int
    outputs: int
    activation: str = "identity"
    bias: bool = True


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How vectors or scores are made of the hidden states of a prompt.

    modes: of `MODES`; the parts of a vector stand side by side where there are several.
    labels: the names of the scores. activation: of scores, "sigmoid", "softmax" or "identity".
    token_ids: of a model that judges by its next token, the tokens for true and, if given, false.
    prompts: texts before a prompt by name. max_tokens: of a prompt, where the checkpoint says. size: elements of a
    vector.
    """

    task: str = EMBED
    modes: tuple[str, ...] = ("lasttoken",)
    is_causal: bool = True
    normalize: bool = False
    dense: tuple[DenseModule, ...] = ()
    labels: tuple[str, ...] = ()
    activation: str = "identity"
    token_ids: tuple[int, ...] = ()
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    max_tokens: int | None = None
    size: int = 0

    @property
    def needs_whole_prompts(self) -> bool:
        """Whether all tokens of a prompt are computed in one step."""
        return not self.is_causal or self.modes != ("lasttoken",)


def pooling_config(args: PoolingArgs, checkpoint: Checkpoint) -> PoolingConfig | None:
    """Return how the checkpoint makes vectors; None where it generates text. Raises CheckpointError, UnsupportedModel
    or ConfigError."""
    is_encoder = checkpoint.str("model_type", "") in ENCODERS
    is_encoder |= checkpoint.values.get("use_bidirectional_attention") is True
    if args.runner == "generate":
        if is_encoder:
            raise ConfigError("runner is generate, but the model is an encoder, which writes no text; leave it out")
        if args.convert not in ("auto", "none"):
            raise ConfigError(f"convert is {args.convert}, but runner is generate; leave one of them out")
        return None
    is_classifier = _is_classifier(checkpoint)
    modules = None if checkpoint.gguf else _modules(checkpoint.path)
    is_pooling = args.runner == "pooling" or args.convert in (EMBED, CLASSIFY) or is_encoder or is_classifier
    if not is_pooling and modules is None:
        return None
    found = PoolingConfig(is_causal=not is_encoder, modes=("cls" if is_encoder else "lasttoken",), normalize=True)
    if modules is not None:
        found = _read_modules(checkpoint.path, modules, found)
    if checkpoint.values.get("model_type") in ("roberta", "xlm-roberta"):
        # the first rows of the table of positions stand for padding
        longest = checkpoint.max_model_len() - checkpoint.int("pad_token_id", 1) - 1
        found = msgspec.structs.replace(found, max_tokens=min(longest, found.max_tokens or longest))
    if checkpoint.values.get("model_type") == "modernbert" and is_classifier:
        mode = checkpoint.expect("classifier_pooling", "cls", "mean")
        found = msgspec.structs.replace(found, modes=(mode,))
    if args.convert == EMBED or not (is_classifier or found.token_ids):
        if args.convert == CLASSIFY:
            return _classifier(checkpoint, msgspec.structs.replace(found, token_ids=_yes_and_no(checkpoint)))
        size = found.dense[-1].outputs if found.dense else checkpoint.positive("hidden_size") * len(found.modes)
        return msgspec.structs.replace(found, task=EMBED, token_ids=(), size=size)
    return _classifier(checkpoint, found)


def _is_classifier(checkpoint: Checkpoint) -> bool:
    names = checkpoint.values.get("architectures")
    return isinstance(names, list) and bool(names) and str(names[0]).endswith("ForSequenceClassification")


def _classifier(c: Checkpoint, found: PoolingConfig) -> PoolingConfig:
    """Return the config of a model with a score for each label."""
    names = c.values.get("id2label") or {}
    num_labels = 1 if found.token_ids else c.positive("num_labels", len(names) or 2)
    if not isinstance(names, Mapping):
        raise c.error("id2label", "an object from numbers to names of labels")
    labels = tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(num_labels))
    stated = c.section("sentence_transformers")
    path = None if stated is None else stated.values.get("activation_fn")
    path = path or c.values.get("sbert_ce_default_activation_function")
    activation = "sigmoid" if num_labels == 1 else "softmax"
    if c.values.get("problem_type") == "multi_label_classification":
        activation = "sigmoid"
    if path is not None:
        where = c.origin("sentence_transformers", "sbert_ce_default_activation_function")
        activation = _activation(path, where, "activation_fn")
    return msgspec.structs.replace(found, task=CLASSIFY, labels=labels, activation=activation)


def _yes_and_no(c: Checkpoint) -> tuple[int, ...]:
    """Return the tokens of a model that is asked for yes or no, as Qwen3-Reranker is. Raises ConfigError."""
    file = c.path / "tokenizer.json"
    model = read_json_object(file).get("model") if file.is_file() else None
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    words = vocabulary if isinstance(vocabulary, Mapping) else {}
    if not {"yes", "no"} <= words.keys() or c.values.get("model_type") in ENCODERS:
        raise ConfigError(
            f"convert is classify, but {c.architecture} has no scores of labels, and its tokenizer no words yes and no "
            "by which it could judge; leave it out"
        )
    return words["yes"], words["no"]


def _modules(folder: Path) -> list[tuple[str, Path]] | None:
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


def _read_modules(folder: Path, modules: list[tuple[str, Path]], found: PoolingConfig) -> PoolingConfig:
    """Return the config with what the modules of sentence-transformers say. Raises UnsupportedModel for others."""
    dense: list[DenseModule] = []
    normalize = False
    changes: dict[str, Any] = {}
    for kind, path in modules:
        if kind == "Transformer":
            changes["max_tokens"] = _max_tokens(path)
        elif kind == "Pooling":
            changes["modes"] = _read_modes(_section(path / "config.json"))
        elif kind == "Dense":
            dense.append(_read_dense(folder, path))
        elif kind == "Normalize":
            normalize = True
        elif kind == "LogitScore":
            score = _section(path / "config.json")
            other = score.optional_int("false_token_id")
            changes["token_ids"] = (score.int("true_token_id"), *(() if other is None else (other,)))
        else:
            raise UnsupportedModel(
                f"{folder / 'modules.json'}: type is {shown(kind)}, expected Transformer, Pooling, Dense, Normalize or "
                "LogitScore; this module is not implemented"
            )
    kinds = [kind for kind, _ in modules]
    if sorted(kinds, key=("Transformer", "Pooling", "LogitScore", "Dense", "Normalize").index) != kinds:
        raise UnsupportedModel(
            f"{folder / 'modules.json'}: the modules are {', '.join(kinds)}, expected Transformer, Pooling, Dense and "
            "Normalize in this order"
        )
    prompts, default = _prompts(folder / "config_sentence_transformers.json")
    return msgspec.structs.replace(
        found, normalize=normalize, dense=tuple(dense), prompts=prompts, default_prompt=default, **changes
    )


def _section(file: Path) -> Section:
    return Section(read_json_object(file), str(file))


def _max_tokens(folder: Path) -> int | None:
    """Return the longest prompt in tokens, where one of the files that have had that names it."""
    for name in ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json"):
        if (folder / name).is_file():
            return _section(folder / name).optional_positive("max_seq_length")
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
    c = _section(path / "config.json")
    return DenseModule(
        str(path.relative_to(folder)),
        c.positive("in_features"),
        c.positive("out_features"),
        _activation(c.str("activation_function", "torch.nn.modules.linear.Identity"), c.where, "activation_function"),
        c.bool("bias", True),
    )


def _activation(path: object, where: str, name: str) -> str:
    """Return the function that a class path of torch names. Raises UnsupportedModel."""
    word = str(path).rpartition(".")[2].removesuffix("()")
    if word not in _ACTIVATIONS:
        raise UnsupportedModel(f"{where}: {name} is {shown(path)}, expected one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[word]


def _prompts(file: Path) -> tuple[dict[str, str], str]:
    """Return the prompts by name, and the one that is used where no other is named; "" for none."""
    if not file.is_file():
        return {}, ""
    c = _section(file)
    given = c.section("prompts")
    prompts = {} if given is None else given.values
    if any(not isinstance(text, str) for text in prompts.values()):
        raise c.error("prompts", "an object from names to texts")
    name = c.values.get("default_prompt_name")
    if name is not None and name not in prompts:
        raise c.error("default_prompt_name", "null or one of prompts")
    return dict(prompts), "" if name is None else prompts[name]
