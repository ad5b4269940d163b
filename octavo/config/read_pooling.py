"""Reads how a checkpoint makes vectors or scores, from its config.json and the files of sentence-transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from octavo.config.args import PoolingArgs
from octavo.config.checkpoint import Checkpoint, read_json_object
from octavo.config.late_interaction import ARCHITECTURES, colbert_files
from octavo.config.pooler_config import with_overrides
from octavo.config.pooling_config import ENCODERS, MODES, DenseModule, PoolingConfig, TokenHeads, sees_both
from octavo.config.sentence_modules import activation_named, listed_modules, read_modules
from octavo.core.pooling import CLASSIFY, EMBED, TOKEN_CLASSIFY, TOKEN_EMBED
from octavo.errors import CheckpointError, ConfigError
from octavo.gguf.encoders import dense_layers
from octavo.gguf.tokenizer import token_id

_M3_WEIGHTS, _M3_VECTORS = "sparse_linear.pt", "colbert_linear.pt"
_HEADS: Final[Mapping[str, Mapping[str, Any]]] = {
    "ForSequenceClassification": {"task": CLASSIFY},
    "ForTokenClassification": {"task": TOKEN_CLASSIFY, "head": "token"},
    "ForRewardModel": {"task": TOKEN_CLASSIFY, "head": "reward", "labels": ("LABEL_0",)},
    "ForProcessRewardModel": {
        "task": TOKEN_CLASSIFY,
        "head": "reward",
        "labels": ("LABEL_0", "LABEL_1"),
        "activation": "softmax",
        "step_token_id": 151651,  # <extra_0>, which Qwen2.5-Math-PRM was trained with
    },
}
"""What models make whose architecture has one of these endings. Labels of the others are in config.json."""


def pooling_config(args: PoolingArgs, checkpoint: Checkpoint) -> PoolingConfig | None:
    """Return how the checkpoint makes vectors; None where it generates text. Raises CheckpointError, UnsupportedModel
    or ConfigError."""
    found = _of_files(args, checkpoint)
    if found is None and args.pooler_config:
        raise ConfigError("pooler_config is set, but the model generates text; set runner to pooling, or leave it out")
    return found if found is None else with_overrides(found, args.pooler_config)


def _of_files(args: PoolingArgs, checkpoint: Checkpoint) -> PoolingConfig | None:
    is_encoder = sees_both(checkpoint)
    if args.runner == "generate":
        if is_encoder:
            raise ConfigError("runner is generate, but the model is an encoder, which writes no text; leave it out")
        if args.convert not in ("auto", "none"):
            raise ConfigError(f"convert is {args.convert}, but runner is generate; leave one of them out")
        return None
    head = None if args.convert == EMBED else _head(checkpoint)
    modules = None if checkpoint.gguf else listed_modules(checkpoint.path)
    is_pooling = args.runner == "pooling" or args.convert in (EMBED, CLASSIFY) or is_encoder or head is not None
    # without a head for tokens
    is_pooling |= re.search("(?<!LMHead)(?<!Chat)Model$", _architecture(checkpoint)) is not None
    stated, is_judge = _of_metadata(checkpoint)
    is_judge &= head is None and args.convert != EMBED
    if not (is_pooling or stated or is_judge) and modules is None:
        return None
    found = PoolingConfig(
        is_causal=not is_encoder,
        modes=("cls" if checkpoint.values.get("model_type") in ENCODERS else "lasttoken",),
        normalize=True,
    )
    if "Bidirectional" in _architecture(checkpoint):
        # the names of NVIDIA's configs
        modes = {"avg": "mean", "cls": "cls", "last": "lasttoken"}
        found = msgspec.structs.replace(found, modes=(modes[checkpoint.expect("pooling", *modes, default="avg")],))
    if stated:
        found = msgspec.structs.replace(found, modes=(stated,))
    if checkpoint.gguf is not None:
        file = str(checkpoint.gguf.path.absolute())
        behind = (
            DenseModule("", inputs, outputs, bias=False, file=file, prefix=prefix)
            for prefix, inputs, outputs in dense_layers(checkpoint.gguf)
        )
        found = msgspec.structs.replace(found, dense=tuple(behind))
    if modules is not None:
        found = read_modules(checkpoint.path, modules, found)
    if (kind := checkpoint.values.get("model_type")) in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        # the first rows of the table of positions stand for padding
        num_rows = checkpoint.max_model_len()
        padding = 1 if kind == "mpnet" else checkpoint.int("pad_token_id", 1)
        if not -1 <= padding < num_rows - 1:
            raise checkpoint.error("pad_token_id", f"-1 to {num_rows - 2:,}, with rows of positions behind it")
        longest = num_rows - padding - 1
        found = msgspec.structs.replace(found, max_tokens=min(longest, found.max_tokens or longest))
    if found.late is None and _architecture(checkpoint) in ARCHITECTURES:
        late, dense = colbert_files(checkpoint)
        found = msgspec.structs.replace(found, task=TOKEN_EMBED, late=late, dense=(dense,))
    if head is not None:
        found = msgspec.structs.replace(found, **_HEADS[head])
        if checkpoint.values.get("model_type") == "modernbert" and found.task == CLASSIFY:
            mode = checkpoint.expect("classifier_pooling", "cls", "mean")
            found = msgspec.structs.replace(found, modes=(mode,))
        return found if found.labels else _classifier(checkpoint, found)
    if args.convert == CLASSIFY or is_judge or (found.token_ids and args.convert != EMBED):
        token_ids = found.token_ids or _yes_and_no(checkpoint)
        vocab_size = checkpoint.positive("vocab_size")
        if not all(0 <= each < vocab_size for each in token_ids):
            raise CheckpointError(
                f"{checkpoint.path}: scores are made of the logits of the tokens {token_ids}, expected tokens from 0 "
                f"to {vocab_size - 1:,}"
            )
        return _classifier(checkpoint, msgspec.structs.replace(found, task=CLASSIFY, token_ids=token_ids))
    size = found.dense[-1].outputs if found.dense else checkpoint.positive("hidden_size") * len(found.modes)
    if _architecture(checkpoint) == "BertSpladeSparseEmbeddingModel":
        found = msgspec.structs.replace(found, sparse="max", normalize=False)
    if found.sparse is not None:
        return msgspec.structs.replace(found, size=checkpoint.positive("vocab_size"))
    if found.late is not None:
        return msgspec.structs.replace(found, size=size)
    return msgspec.structs.replace(found, task=EMBED, token_ids=(), size=size, token_heads=_token_heads(checkpoint))


def _of_metadata(c: Checkpoint) -> tuple[str | None, bool]:
    """Return the mode of pooling that a GGUF file states, and whether it makes scores."""
    if c.gguf is None:
        return None, False
    mode = c.expect("pooling_mode", *MODES) if "pooling_mode" in c.values else None
    return mode, c.bool("is_ranking", False)


def _token_heads(c: Checkpoint) -> TokenHeads | None:
    """Return the heads of BGE-M3, where its files are there."""
    if not (c.path / _M3_WEIGHTS).is_file() or not (c.path / _M3_VECTORS).is_file():
        return None
    width = c.positive("hidden_size")
    return TokenHeads(
        vectors=DenseModule("", width, width, file=_M3_VECTORS, prefix=""),
        weights=DenseModule("", width, 1, "relu", file=_M3_WEIGHTS, prefix=""),
        first=c.int("bos_token_id", 0),
        last=c.int("eos_token_id", 2),
    )


def _architecture(checkpoint: Checkpoint) -> str:
    """Return the first architecture that the checkpoint names; "" for none."""
    names = checkpoint.values.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _head(checkpoint: Checkpoint) -> str | None:
    """Return the ending of `_HEADS` that the checkpoint's architecture has."""
    return next((ending for ending in _HEADS if _architecture(checkpoint).endswith(ending)), None)


def _classifier(c: Checkpoint, found: PoolingConfig) -> PoolingConfig:
    """Return the config of a model with a score for each label, of a prompt or of each token."""
    names = c.values.get("id2label") or {}
    if not isinstance(names, Mapping):
        raise c.error("id2label", "an object from numbers to names of labels")
    num_labels = 1 if found.token_ids else c.positive("num_labels", len(names) or 2)
    labels = tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(num_labels))
    stated = c.section("sentence_transformers")
    path = None if stated is None else stated.values.get("activation_fn")
    path = path or c.values.get("sbert_ce_default_activation_function")
    activation = "sigmoid" if num_labels == 1 else "softmax"
    if c.values.get("problem_type") == "multi_label_classification":
        activation = "sigmoid"
    if path is not None:
        where = c.origin("sentence_transformers", "sbert_ce_default_activation_function")
        activation = activation_named(path, where, "activation_fn")
    return msgspec.structs.replace(found, labels=labels, activation=activation)


def _yes_and_no(c: Checkpoint) -> tuple[int, ...]:
    """Return the tokens of a model that is asked for yes or no, as Qwen3-Reranker is. Raises ConfigError."""
    words: Mapping[str, Any] = {}
    if c.gguf is not None:
        ids = {word: token_id(c.gguf, word) for word in ("yes", "no")}
        words = {word: number for word, number in ids.items() if number is not None}
    elif (file := c.path / "tokenizer.json").is_file():
        model = read_json_object(file).get("model")
        vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
        words = vocabulary if isinstance(vocabulary, Mapping) else {}
    if not {"yes", "no"} <= words.keys() or c.values.get("model_type") in ENCODERS:
        raise ConfigError(
            f"convert is classify, but {c.architecture} has no scores of labels, and its tokenizer no words yes and no "
            "by which it could judge; leave it out"
        )
    return words["yes"], words["no"]
