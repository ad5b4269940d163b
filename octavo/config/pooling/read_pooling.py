"""Reads how a checkpoint makes vectors or scores, from its config.json and the files of sentence-transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from octavo.config.args import PoolingArgs
from octavo.config.checkpoint import Checkpoint
from octavo.config.media.media_families import media_family
from octavo.config.pooling.pooler_config import with_overrides
from octavo.config.pooling.pooling_config import (
    EMBEDDING_GEMMA,
    ENCODERS,
    MODES,
    SIGLIP,
    DenseModule,
    PoolingConfig,
    TokenHeads,
    sees_both,
)
from octavo.config.pooling.projections import PROJECTED, with_projection
from octavo.config.pooling.sentence_modules import activation_named, listed_modules, read_modules
from octavo.config.pooling.task_adapters import task_adapter
from octavo.config.released.retrieval import RETRIEVAL
from octavo.config.section import read_json_object
from octavo.core.pooling import CLASSIFY, EMBED, TOKEN_CLASSIFY, TOKEN_EMBED
from octavo.errors import CheckpointError, ConfigError
from octavo.gguf.encoders import dense_layers
from octavo.gguf.tokenizer import token_id

_JUDGES: Final = "classifier_from_token"
"""vLLM's key for the tokens of a model that judges by its next token."""
_M3_WEIGHTS, _M3_VECTORS = "sparse_linear.pt", "colbert_linear.pt"
_ALIGNER: Final = "classify_num"
"""The key for the number of labels of Qwen3-ForcedAligner: times, in steps, of the tokens that ask for one."""
_MASKED: Final = "ForMaskedLM"
"""The ending of models that guess masked tokens."""
_GUESSERS: Final = ("bert", "camembert", "deberta-v2", "distilbert", "ernie", "mpnet", "roberta", "xlm-roberta")
"""`model_type` of the encoders whose heads for masked tokens are read."""
_HEADS: Final[Mapping[str, Mapping[str, Any]]] = {
    _ALIGNER: {"task": TOKEN_CLASSIFY, "head": "lm_head", "activation": "softmax"},
    _MASKED: {"task": TOKEN_CLASSIFY, "head": "vocabulary", "activation": "softmax", "sparse": None},
    "ForSequenceClassification": {"task": CLASSIFY},
    "ForTokenClassification": {"task": TOKEN_CLASSIFY, "head": "token"},
    "InternLM2ForRewardModel": {"task": TOKEN_CLASSIFY, "head": "value", "labels": ("LABEL_0",)},
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
    task_adapter(checkpoint, checkpoint.path)  # refuses a wrong task
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
    if head == _MASKED and args.convert != CLASSIFY:
        head = None  # many models for vectors have this ending
    modules = None if checkpoint.gguf else listed_modules(checkpoint.path)
    is_asked = args.runner == "pooling" or args.convert in (EMBED, CLASSIFY)
    lacks_head = re.search("(?<!LMHead)(?<!Chat)Model$", _architecture(checkpoint)) is not None  # for tokens
    stated, is_judge = _of_metadata(checkpoint)
    is_judge |= checkpoint.values.get(_JUDGES) is not None
    is_judge &= head is None and args.convert != EMBED
    has_files = stated is not None or modules is not None
    has_files |= _architecture(checkpoint) in PROJECTED or RETRIEVAL in checkpoint.values
    if not (is_asked or is_encoder or head is not None or lacks_head or has_files or is_judge):
        return None
    found = _with_longest(checkpoint, _pooling(checkpoint, stated, modules, is_causal=not is_encoder))
    found = with_projection(checkpoint, _architecture(checkpoint), found)
    if head is not None:
        return _with_head(checkpoint, found, head)
    if args.convert == CLASSIFY or is_judge or (found.token_ids and args.convert != EMBED):
        return _judge(checkpoint, found)
    return _vectors(checkpoint, found)


def _pooling(
    c: Checkpoint, stated: str | None, modules: list[tuple[str, Path]] | None, *, is_causal: bool
) -> PoolingConfig:
    """Return which hidden states make a vector, and the layers behind them.

    stated: by a GGUF file. modules: those of sentence-transformers, where there are any.
    """
    mode = "cls" if c.values.get("model_type") in ENCODERS else "lasttoken"
    if _is_of_nvidia(c):
        # the names of NVIDIA's configs
        modes = {"avg": "mean", "cls": "cls", "last": "lasttoken"}
        mode = modes[c.expect("pooling", *modes, default="avg")]
    if c.values.get("model_type") == EMBEDDING_GEMMA:
        mode = "mean"
    found = PoolingConfig(is_causal=is_causal, modes=(stated or mode,), normalize=True)
    if c.gguf is not None:
        file = str(c.gguf.path.absolute())
        behind = (
            DenseModule("", inputs, outputs, bias=False, file=file, prefix=prefix)
            for prefix, inputs, outputs in dense_layers(c.gguf)
        )
        return msgspec.structs.replace(found, dense=tuple(behind))
    return found if modules is None else read_modules(c.path, modules, found)


def _with_longest(c: Checkpoint, found: PoolingConfig) -> PoolingConfig:
    """Return the config with the longest prompt, where the first rows of the table of positions stand for padding."""
    if (kind := c.values.get("model_type")) not in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        return found
    num_rows = c.max_model_len()
    padding = 1 if kind == "mpnet" else c.int("pad_token_id", 1)
    least = 0 if c.gguf is None else -1  # a GGUF file may have no rows for padding
    if not least <= padding < num_rows - 1:
        raise c.error("pad_token_id", f"{least} to {num_rows - 2:,}, with rows of positions behind it")
    longest = num_rows - padding - 1
    return msgspec.structs.replace(found, max_tokens=min(longest, found.max_tokens or longest))


def _with_head(c: Checkpoint, found: PoolingConfig, head: str) -> PoolingConfig:
    """Return the config of a model with a head of labels, an ending of `_HEADS`."""
    found = msgspec.structs.replace(found, **_HEADS[head])
    if c.values.get("model_type") == "modernbert" and found.task == CLASSIFY:
        found = msgspec.structs.replace(found, modes=(c.expect("classifier_pooling", "cls", "mean"),))
    if c.values.get("model_type") == "eurobert" and found.task == CLASSIFY:
        modes = {"bos": "cls", "mean": "mean", "late": "scores"}
        mode = modes[c.expect("classifier_pooling", *modes, default="late")]
        found = msgspec.structs.replace(found, head="dense", modes=(mode,))
    if head == _ALIGNER:
        return msgspec.structs.replace(found, labels=tuple(map(str, range(c.positive(_ALIGNER)))))
    if head == _MASKED:
        if c.values.get("model_type") not in _GUESSERS:
            raise ConfigError(
                f"convert is classify, but guesses of masked tokens of {c.architecture} are not implemented, only "
                f"those of the types {', '.join(_GUESSERS)}; leave it out"
            )
        return msgspec.structs.replace(found, size=c.positive("vocab_size"))
    if _is_of_nvidia(c):  # whose code divides scores by it
        c.expect("temperature", 1.0, default=1.0)
    return found if found.labels else _classifier(c, found)


def _judge(c: Checkpoint, found: PoolingConfig) -> PoolingConfig:
    """Return the config of a model whose scores are made of the logits of tokens."""
    named = None if found.token_ids else _named_tokens(c)
    token_ids, vocab_size = found.token_ids or named or _yes_and_no(c), c.positive("vocab_size")
    if not all(0 <= each < vocab_size for each in token_ids):
        raise CheckpointError(
            f"{c.path}: scores are made of the logits of the tokens {token_ids}, expected tokens from 0 to "
            f"{vocab_size - 1:,}"
        )
    is_written = not named or c.bool("is_original_qwen3_reranker", False)
    found = msgspec.structs.replace(found, task=CLASSIFY, token_ids=token_ids, has_template=is_written)
    return _classifier(c, found)


def _vectors(c: Checkpoint, found: PoolingConfig) -> PoolingConfig:
    """Return the config of a model that makes vectors."""
    width = c.positive("n_embd" if "n_embd" in c.values else "hidden_size")  # of GPT-2 and its relatives
    if c.values.get("model_type") == "opt":  # whose states are projected before the head alone
        c.expect("word_embed_proj_dim", width, default=width)
    if c.values.get("model_type") == EMBEDDING_GEMMA:
        width = c.positive("embedding_dim", 768)
    if media_family(_architecture(c)).is_dual:
        width = c.stored.positive("projection_dim", 512)
        if c.values.get("model_type") in SIGLIP:
            width = c.positive("projection_size", c.positive("hidden_size"))
            found = msgspec.structs.replace(found, padded_length=c.max_model_len())
    size = found.dense[-1].outputs if found.dense else width * len(found.modes)
    if _architecture(c) == "BertSpladeSparseEmbeddingModel":
        found = msgspec.structs.replace(found, sparse="max", normalize=False)
    if found.sparse is not None:
        return msgspec.structs.replace(found, size=c.positive("vocab_size"))
    if found.task == TOKEN_EMBED:
        return msgspec.structs.replace(found, size=size)
    return msgspec.structs.replace(found, task=EMBED, token_ids=(), size=size, token_heads=_token_heads(c))


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


def _is_of_nvidia(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has the keys of NVIDIA's Llama whose tokens see both sides."""
    architecture = _architecture(checkpoint)
    return "Bidirectional" in architecture or media_family(architecture).images == "pages"


def _head(checkpoint: Checkpoint) -> str | None:
    """Return the ending of `_HEADS` that the checkpoint's architecture has."""
    if checkpoint.values.get(_ALIGNER) is not None:
        return _ALIGNER
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
    kind = c.values.get("problem_type")
    if kind == "multi_label_classification":
        activation = "sigmoid"
    # numbers and rewards have no bounds
    if kind == "regression" or _architecture(c) == "JambaForSequenceClassification":
        activation = "identity"
    if path is not None:
        where = c.origin("sentence_transformers", "sbert_ce_default_activation_function")
        activation = activation_named(path, where, "activation_fn")
    return msgspec.structs.replace(found, labels=labels, activation=activation)


def _named_tokens(c: Checkpoint) -> tuple[int, ...]:
    """Return the tokens that `classifier_from_token` names in the order of `token_ids`: it has one, or those for false
    and true. () where it is absent. Raises CheckpointError."""
    names = c.values.get(_JUDGES)
    if names is None:
        return ()
    is_pair = isinstance(names, list) and len(names) == 2
    method = "from_2_way_softmax" if is_pair else "no_post_processing"
    c.expect("method", method, default=method)
    words = _vocabulary(c, names) if isinstance(names, list) and all(isinstance(each, str) for each in names) else {}
    if not words or len(names) > 2 or any(name not in words for name in names):
        raise c.error(_JUDGES, "one token of the tokenizer, or one for false and one for true")
    return tuple(words[name] for name in reversed(names))


def _vocabulary(c: Checkpoint, wanted: Sequence[str]) -> Mapping[str, Any]:
    """Return the ids of tokens by their texts, of those wanted at least where the tokenizer has them."""
    if c.gguf is not None:
        ids = {word: token_id(c.gguf, word) for word in wanted}
        return {word: number for word, number in ids.items() if number is not None}
    if not (file := c.path / "tokenizer.json").is_file():
        return {}
    model = read_json_object(file).get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    return vocabulary if isinstance(vocabulary, Mapping) else {}


def _yes_and_no(c: Checkpoint) -> tuple[int, ...]:
    """Return the tokens of a model that is asked for yes or no, as Qwen3-Reranker is. Raises ConfigError."""
    words = _vocabulary(c, ("yes", "no"))
    if not {"yes", "no"} <= words.keys() or c.values.get("model_type") in ENCODERS:
        raise ConfigError(
            f"convert is classify, but {c.architecture} has no scores of labels, and its tokenizer no tokens yes and "
            "no to score with; leave it out"
        )
    return words["yes"], words["no"]
