"""The tokenizer of a GGUF file: GPT-2's kind (byte-level BPE), SentencePiece's with scores and Gemma 4's with merges,
and what ends a text. `encoder_tokenizer` has those of encoders.

Pre-tokenizers follow the tokenizer.json of the models that llama.cpp's names of them stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from octavo.core.vocabulary.sentence_pieces import piece_merges
from octavo.core.vocabulary.tiktoken import GPT4, QWEN
from octavo.core.vocabulary.tiktoken import PATTERN as KIMI
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.gguf.encoder_tokenizer import add_ends, unigram, word_piece, word_pieces
from octavo.gguf.reader import Array, GGUFFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPECIAL = (_UNKNOWN, _CONTROL)
_WORDS: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN35: Final = QWEN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES: Final = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+END|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*END"
_TEKKEN: Final = _CASES.replace("END", "") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_GPT4O: Final = (
    _CASES.replace("END", f"{_CONTRACTIONS}?") + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_DEEPSEEK3: Final = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_CJK: Final = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_CODER: Final = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
# letters with case; the original lists those of its version of Unicode
_DEEPSEEK: Final = (
    *(r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _CJK, r"\p{N}"),
)
_FALCON: Final = (r"[\p{P}\$\+<=>\^~\|`]+", _WORDS, "[0-9][0-9][0-9]")
_DEFAULT: Final = (r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]")
_SPLITS: Final[Mapping[str, Sequence[str]]] = {
    **dict.fromkeys(("default", ""), _DEFAULT),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "gigachat", "trillion"), (_WORDS,)),
    **dict.fromkeys(("roberta-bpe", "modern-bert"), (_WORDS,)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), (GPT4,)),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (GPT4,)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "solar-open", "bailingmoe", "bailingmoe2"),
        (QWEN,),
    ),
    "qwen35": (_QWEN35,),
    **dict.fromkeys(("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone"), (r"\p{N}", _WORDS)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    "falcon": _FALCON,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-llm": _DEEPSEEK,
    "kimi-k2": (KIMI,),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("cohere2moe", "tiny_aya"), (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), (_GPT4O,)),
}
"""Patterns that cut a text, by `tokenizer.ggml.pre`; each cuts the pieces of the one before."""
_WITH_BOS: Final = ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken")
"""Pre-tokenizers whose texts begin with BOS where the file does not say; words that are tokens are not merged."""
_NFC: Final = ("qwen2", "qwen35", "deepseek-r1-qwen", "stablelm2", "command-r")
_TOOL_ANSWERS: Final = "<|tool_response>"
"""The token that Gemma 4 writes after its tool calls; files store it as text."""
_ENDS: Final = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>"),
    *(_TOOL_ANSWERS, "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "<|user|>", "[EOS]", "<EOT>", "_<EOT>"),
}
"""Control tokens that end a turn, as llama.cpp has them."""


def end_tokens(file: GGUFFile) -> list[int]:
    """Return the ids that end a text: those that the metadata name, and control tokens that are known to."""
    named = [file.metadata.get(f"tokenizer.ggml.{each}_token_id") for each in ("eos", "eot", "eom")]
    tokens, types = _listed(file, "tokens"), _listed(file, "token_type")
    kinds = zip(tokens, types, strict=False)
    known = {text: at for at, (text, kind) in enumerate(kinds) if kind == _CONTROL or text == _TOOL_ANSWERS}
    ends = _ENDS & known.keys()
    if {"<|return|>", "<|call|>", "<|end|>"} <= ends:  # gpt-oss ends a message with it, not its turn
        ends -= {"<|end|>"}
    if known.get("<|user|>") != named[0]:
        ends -= {"<|user|>"}
    return list(
        dict.fromkeys([*(each for each in named if isinstance(each, int)), *sorted(known[each] for each in ends)])
    )


def token_id(file: GGUFFile, text: str) -> int | None:
    """Return the id of a token by its text; None where there is none."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    return tokens.place(text) if isinstance(tokens, Array) else None


def read_tokenizer(file: GGUFFile) -> tuple[Backend, dict[str, str], dict[str, Any]]:
    """Return the tokenizer, the texts of named special tokens, and what a tokenizer_config.json would say.

    Raises CheckpointError, and UnsupportedModel for another kind of tokenizer.
    """
    from tokenizers import AddedToken

    model, tokens = file.metadata.get("tokenizer.ggml.model"), _listed(file, "tokens")
    types = _listed(file, "token_type") or [_NORMAL] * len(tokens)
    if not tokens:
        raise CheckpointError(
            f"{file.path}: has no tokenizer (tokenizer.ggml.tokens); name the original model with the argument "
            "tokenizer"
        )
    if len(types) != len(tokens):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens has {len(tokens)}, token_type {len(types)} elements")
    tokens = word_pieces(tokens, types) if model == "bert" else tokens
    ids: dict[str, int] = {}
    for number, token in enumerate(tokens):
        ids.setdefault(token, number)
    if (maker := _MAKERS.get(str(model))) is None:
        raise UnsupportedModel(
            f"{file.path}: tokenizer.ggml.model is {model!r}, expected {' or '.join(_MAKERS)}; name the model's "
            "original directory or hub name with the argument tokenizer"
        )
    try:
        backend = maker(file, ids, types)
        added = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (*_SPECIAL, _USER_DEFINED)]
        backend.add_tokens([AddedToken(token, special=kind in _SPECIAL, normalized=False) for token, kind in added])
        has_ends = add_ends(file, backend, ids)
    except (CheckpointError, UnsupportedModel):
        raise
    except Exception as error:  # the library raises bare Exception for every kind of damage
        raise CheckpointError(f"{file.path}: its tokenizer is not usable ({error}); download it again") from error
    names = {each: each for each in ("bos", "eos", "cls", "mask")}
    names |= {"unknown": "unk", "padding": "pad", "seperator": "sep"}
    names |= {each: f"fim_{each}" for each in ("prefix", "suffix", "middle")}  # the older names of the next three
    names |= {"fim_pre": "fim_prefix", "fim_suf": "fim_suffix", "fim_mid": "fim_middle"}
    names |= {"fim_rep": "fim_repository", "fim_sep": "fim_file", "fim_pad": "fim_padding"}
    special = {}
    for theirs, ours in names.items():
        at = file.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(at, int) and 0 <= at < len(tokens):
            special[f"{ours}_token"] = tokens[at]
    starts = model in ("llama", "gemma4") or file.metadata.get("tokenizer.ggml.pre") in _WITH_BOS
    template = file.metadata.get("tokenizer.chat_template")
    ends = {"add_bos_token": starts, "add_eos_token": False}
    config = {
        **({} if has_ends else {key: bool(file.metadata.get(f"tokenizer.ggml.{key}", ends[key])) for key in ends}),
        **special,
        **({"chat_template": template} if isinstance(template, str) else {}),
    }
    return backend, special, config


def _byte_level(file: GGUFFile, ids: dict[str, int], types: list[int]) -> Backend:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    kind = file.metadata.get("tokenizer.ggml.pre", "default")
    if kind not in _SPLITS:
        raise UnsupportedModel(
            f"{file.path}: tokenizer.ggml.pre is {kind!r}, expected one of {', '.join(filter(None, _SPLITS))}; name "
            "the model's original directory or hub name with the argument tokenizer"
        )
    backend = Tokenizer(models.BPE(ids, _stated_merges(file), ignore_merges=kind in _WITH_BOS))
    if kind in _NFC:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[kind]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _stated_merges(file: GGUFFile) -> list[tuple[str, str]]:
    merges = []
    for merge in _listed(file, "merges"):
        cut = merge.find(" ", 1)
        merges.append((merge[:cut], merge[cut + 1 :]))
    return merges


def _sentence_pieces(file: GGUFFile, ids: dict[str, int], types: list[int]) -> Backend:
    from tokenizers import Tokenizer, decoders, models, normalizers

    states_merges = file.metadata.get("tokenizer.ggml.model") == "gemma4"
    scores = _listed(file, "scores")
    if not states_merges and len(scores) != len(types):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.scores has {len(scores)} of {len(types)} elements")
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id")
    unknown_text = next((token for token, number in ids.items() if number == unknown), None)
    has_bytes = _BYTE in types
    pieces = {token: number for token, number in ids.items() if types[number] in (_NORMAL, _USER_DEFINED, _UNUSED)}
    merges = _stated_merges(file) if states_merges else piece_merges(pieces, scores)
    model = models.BPE(ids, merges, unk_token=unknown_text, fuse_unk=True, byte_fallback=has_bytes)
    backend = Tokenizer(model)
    starts_with_space = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", not states_merges))
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if starts_with_space else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if starts_with_space else [])])
    return backend


def _listed(file: GGUFFile, name: str) -> list[Any]:
    """Return a list of the tokenizer, empty where there is none. Raises CheckpointError for something else."""
    value = file.metadata.get(f"tokenizer.ggml.{name}")
    if value is None:
        return []
    if not isinstance(value, Array):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.{name} is {value!r}, expected a list")
    found, kind = value.values(), float if name == "scores" else int if name == "token_type" else str
    if not _are(found, kind):
        raise CheckpointError(f"{file.path}: tokenizer.ggml.{name} has elements that are no {kind.__name__}")
    return found


def _are(values: Iterable[object], kind: type) -> bool:
    return all(isinstance(each, kind) for each in values)


_MAKERS: Final[Mapping[str, Callable[[GGUFFile, dict[str, int], list[int]], Backend]]] = {
    "gpt2": _byte_level,
    "llama": _sentence_pieces,
    "gemma4": _sentence_pieces,
    "bert": word_piece,
    "t5": unigram,
}
"""The functions that make a tokenizer, by `tokenizer.ggml.model`."""
