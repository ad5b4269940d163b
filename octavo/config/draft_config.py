"""The checkpoint of a draft model: it has to share the tokens of the model that verifies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from octavo.config.args import EngineArgs
from octavo.config.checkpoint import Checkpoint
from octavo.config.section import read_json_object
from octavo.config.speculative_args import ASSISTANT, MODEL_METHODS, DraftConfig, SpeculativeConfig
from octavo.core.vocabulary.ranked_tokens import ranked_beside, read_ranked
from octavo.errors import ConfigError

_TOKENIZER = "tokenizer.json"


def draft_config(
    args: EngineArgs, speculative: SpeculativeConfig, checkpoint: Checkpoint, tokenizer_path: Path, draft_path: Path
) -> DraftConfig:
    """Return the section of the model that guesses. Raises ConfigError where it cannot guess for `checkpoint`."""
    if args.pipeline_parallel_size > 1:
        raise ConfigError(
            f"speculative_config: method is {speculative.method}, and pipeline_parallel_size is "
            f"{args.pipeline_parallel_size}: a model that guesses runs beside ranks that have all layers; leave that "
            "at 1, take tensor_parallel_size, or the method ngram or suffix"
        )
    draws = speculative.draft_sample_method
    if args.tensor_parallel_size > 1 and draws != "greedy" and speculative.method != "draft_model":
        raise ConfigError(
            f"speculative_config: draft_sample_method is {draws}, and tensor_parallel_size is "
            f"{args.tensor_parallel_size}: all ranks make the guesses of a head together, and only one draws; take "
            "greedy"
        )
    is_own = speculative.method == "mtp" and draft_path == checkpoint.path
    overrides = args.hf_overrides if is_own else {}
    draft = Checkpoint.open(draft_path, overrides)
    if speculative.method == "draft_model":
        _check_tokens(checkpoint, tokenizer_path, draft, same_size=speculative.draft_sample_method == "same_key")
    elif not is_own:
        if speculative.method == "mtp":
            _check_assistant(args, draft)
        _check_sizes(checkpoint, draft)
    return DraftConfig(
        method=speculative.method,
        path=str(draft.path),
        quantization=speculative.quantization,
        activation_bits=args.activation_bits or 8,
        sample_method=speculative.draft_sample_method,
        is_parallel=speculative.parallel_drafting,
        overrides=overrides,
    )


def limited(speculative: SpeculativeConfig | None, draft_path: Path | None) -> SpeculativeConfig | None:
    """Return the config with no more guesses than a head makes at once. Raises CheckpointError."""
    if speculative is None or draft_path is None or (most := MODEL_METHODS[speculative.method].most) is None:
        return speculative
    least = min(most(Checkpoint.open(draft_path)), speculative.num_speculative_tokens)
    return msgspec.structs.replace(speculative, num_speculative_tokens=least)


def _check_assistant(args: EngineArgs, draft: Checkpoint) -> None:
    """Raise ConfigError where a checkpoint is no assistant of Gemma 4, or ranks share the caches that it reads."""
    if draft.architecture != ASSISTANT:
        raise ConfigError(
            f"speculative_config: method is mtp, and model is {draft.path}, whose architecture is "
            f"{draft.architecture}; mtp guesses with the layer of the model's own checkpoint, or with "
            f"{ASSISTANT}: leave model out, or take another method"
        )
    if args.tensor_parallel_size > 1:
        raise ConfigError(
            f"speculative_config: an assistant reads the model's keys and values, of which each rank has a part, and "
            f"tensor_parallel_size is {args.tensor_parallel_size}; leave that at 1, or take another method"
        )


def _check_sizes(checkpoint: Checkpoint, head: Checkpoint) -> None:
    """Raise ConfigError where a head was made for a model of other sizes."""
    for name in ("hidden_size", "vocab_size"):
        mine, theirs = checkpoint.positive(name), head.positive(name)
        if name == "hidden_size":
            sizes = (head.optional_positive(each) for each in ("target_hidden_size", "backbone_hidden_size"))
            theirs = next(filter(None, sizes), theirs)
        if mine != theirs:
            raise ConfigError(
                f"speculative_config: {name} is {theirs:,} in {head.origin(name)}, and {mine:,} in that of the model; "
                "take a head that was made for this model"
            )


def _check_tokens(checkpoint: Checkpoint, tokenizer_path: Path, draft: Checkpoint, *, same_size: bool) -> None:
    """Raise ConfigError where an id stands for different tokens in both models."""
    sizes = checkpoint.positive("vocab_size"), draft.positive("vocab_size")
    own, others = _tokens(tokenizer_path), _tokens(draft.path)
    if sizes[0] != sizes[1] and (same_size or own is None or others is None):
        because = " (draft_sample_method same_key draws from equally many)" if same_size else ""
        raise ConfigError(
            f"speculative_config: the vocabulary of the draft model {draft.path} has {sizes[1]:,} tokens, that of the "
            f"model has {sizes[0]:,}{because}; take a draft model with the same tokenizer"
        )
    if own is None or others is None:
        return
    for token_id in sorted(own.keys() | others.keys()):
        mine, theirs = own.get(token_id), others.get(token_id)
        # one release may name more of the spare ids than another
        if mine != theirs and mine is not None and theirs is not None:
            raise ConfigError(
                f"speculative_config: token {token_id} is {theirs!r} in the tokenizer of the draft model {draft.path} "
                f"({len(others):,} tokens), and {mine!r} in that of the model ({len(own):,} tokens); take a draft "
                "model with the same tokenizer"
            )


def _tokens(path: Path) -> Mapping[int, str] | None:
    """Return the tokens of a tokenizer.json by their ids; None where there is none with a table of them."""
    file = path / _TOKENIZER if path.is_dir() else path
    if (ranked := ranked_beside(path)) is not None:
        values, _ = read_ranked(ranked)
    elif file.name != _TOKENIZER or not file.is_file():
        return None
    else:
        values = read_json_object(file)
    vocabulary = values.get("model", {}).get("vocab")
    if isinstance(vocabulary, list):  # (token, score) by id
        tokens = {token_id: str(token) for token_id, (token, _) in enumerate(vocabulary)}
    elif isinstance(vocabulary, dict):
        tokens = {int(token_id): str(token) for token, token_id in vocabulary.items()}
    else:
        return None
    return tokens | {int(each["id"]): str(each["content"]) for each in values.get("added_tokens") or []}
