"""The forms in which callers give prompts, and the one normal form."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, TypedDict

import msgspec

from octavo.core.cache_key import namespace_digest
from octavo.core.media import MediaInput
from octavo.core.prompt_embeds import FIELD, read_embeds
from octavo.core.request_limits import check_field
from octavo.errors import InvalidRequest


class Prompt(msgspec.Struct, frozen=True):
    """Text or token ids, exactly one of the two. `add_special_tokens`: BOS still has to be added to the text.

    `cache_salt`: only prompts with the same salt share cached prefixes. `cache_namespace`: a secret of the
    sender; only prompts with the same one share cached prefixes, whatever their salts. `cuts`: positions in the text
    that no token spans, because the spelling of a special token is meant as text there. `prediction`: the text that
    probably follows, or its tokens: guesses for an engine that speculates. `second`: the second text of a pair, for a
    model that scores pairs; `second_start`: where it begins in the token ids, 0 for nowhere. `num_unseen`: the last
    token ids that no token sees, for a model that makes a vector of each (masks behind a query). `multi_modal_data`:
    what it brings besides text, by kind, as a caller in this process gives it; `media`: the same as encoders read it,
    or the vectors that are given in place of tokens. `media_places`: of a prompt that messages become, where these have
    the parts, by kind.
    """

    text: str | None = None
    token_ids: list[int] | None = None
    add_special_tokens: bool = True
    cache_salt: str | None = None
    cache_namespace: str | None = None
    cuts: tuple[int, ...] = ()
    prediction: str | list[int] | None = None
    second: str | None = None
    second_start: int = 0
    num_unseen: int = 0
    multi_modal_data: dict[str, Any] | None = None
    media: tuple[MediaInput, ...] = ()
    media_places: dict[str, list[str]] | None = None

    @property
    def namespace(self) -> str | None:
        """The digest that stands for the namespace in requests; None for none."""
        return None if self.cache_namespace is None else namespace_digest(self.cache_namespace)

    @classmethod
    def read(cls, value: PromptLike) -> Prompt:
        """Normalise one prompt. Raises InvalidRequest for anything that is neither text nor token ids."""
        if isinstance(value, Prompt):
            return value
        if isinstance(value, str):
            return cls(text=value)
        if isinstance(value, Mapping):
            if "decoder_prompt" in value:
                return cls.read(_joined(value))
            if set(value) - _BESIDE - _UNREAD not in ({"prompt"}, {"prompt_token_ids"}, {FIELD}):
                raise InvalidRequest(
                    f"a prompt given as a mapping has one of the keys prompt, prompt_token_ids and {FIELD}, and "
                    f"perhaps {', '.join(sorted(_BESIDE))}; got {sorted(map(str, value))}",
                    field="prompt",
                )
            beside: dict[str, Any] = {"multi_modal_data": _checked_media(value.get("multi_modal_data"))}
            beside["cache_salt"] = checked_cache_salt(value.get("cache_salt"))
            beside["cache_namespace"] = _checked_namespace(value.get("cache_namespace"))
            if "prompt" in value:
                return cls(text=_text(value["prompt"]), **beside)
            if "prompt_token_ids" in value:
                return cls(token_ids=_token_ids(value["prompt_token_ids"]), **beside)
            if beside["multi_modal_data"]:
                raise InvalidRequest(
                    f"multi_modal_data is given beside {FIELD}, which is the whole prompt; leave one of them out",
                    field="multi_modal_data",
                )
            return cls.of_embeds(read_embeds(value[FIELD]), **beside)
        return cls(token_ids=_token_ids(value))

    @classmethod
    def of_embeds(cls, embeds: MediaInput, **beside: Any) -> Prompt:
        """Return the prompt that is given as vectors."""
        # an id of each vocabulary; nothing reads it
        return cls(token_ids=[0] * embeds.num_embeddings, media=(embeds,), **beside)


PromptLike = str | Sequence[int] | Mapping[str, Any] | Prompt
"""Text, token ids, or a mapping with `prompt`, `prompt_token_ids` or `prompt_embeds` (vectors in place of those of
tokens, [tokens, width]), and perhaps `cache_salt`, `cache_namespace` and `multi_modal_data`; or, for a model that reads
through an encoder, with `encoder_prompt` and `decoder_prompt`."""

_BESIDE: Final = frozenset({"cache_salt", "cache_namespace", "multi_modal_data"})
_UNREAD: Final = frozenset({"multi_modal_uuids"})
"""Keys of vLLM's prompts that change nothing: images and sounds are known by their content."""


class _Beside(TypedDict, total=False):
    multi_modal_data: Mapping[str, Any] | None
    multi_modal_uuids: Mapping[str, Any] | None
    cache_salt: str | None
    cache_namespace: str | None


class TextPrompt(_Beside):
    """A prompt given as text: a mapping, under the name that vLLM has for it."""

    prompt: str


class TokensPrompt(_Beside):
    """A prompt given as token ids: a mapping, under the name that vLLM has for it."""

    prompt_token_ids: Sequence[int]


class EmbedsPrompt(_Beside):
    """A prompt given as vectors [tokens, width]: a mapping, under the name that vLLM has for it."""

    prompt_embeds: Any


PromptType = PromptLike
"""vLLM's name for what a prompt may be."""


def is_single_prompt(value: Any) -> bool:
    """Return True for one prompt, False for a list of prompts. An empty list is an empty list of prompts."""
    if isinstance(value, str | Mapping | Prompt):
        return True
    return isinstance(value, Sequence) and len(value) > 0 and all(_is_int(item) for item in value)


def listed(prompts: Any) -> list[Any]:
    """Return one prompt in a list, or a list of prompts. Raises InvalidRequest for anything else."""
    if is_single_prompt(prompts):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidRequest(f"prompts is {prompts!r}; give text, token ids, or a list of them", field="prompts")
    return list(prompts)


def checked_cache_salt(value: Any) -> str | None:
    """Return a salt, or None for none. Raises InvalidRequest for anything but text."""
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"cache_salt is {value!r}; give text, or leave it out", field="cache_salt")
    check_field("cache_salt", value)
    return value if value is None else checked_text(value, "cache_salt")


def one_salt(prompt: Prompt, cache_salt: str | None) -> str | None:
    """Return the salt of a prompt, or the one given beside it. Raises InvalidRequest for two different ones."""
    checked_cache_salt(cache_salt)
    if None not in (prompt.cache_salt, cache_salt) and prompt.cache_salt != cache_salt:
        raise InvalidRequest(
            f"cache_salt is {cache_salt!r}, and {prompt.cache_salt!r} in the prompt; give one", field="cache_salt"
        )
    return prompt.cache_salt if cache_salt is None else cache_salt


def checked_text(text: str, field: str) -> str:
    """Return `text`. Raises InvalidRequest for a lone surrogate, which UTF-8 cannot encode.

    A lone surrogate comes from bytes that were decoded with `surrogateescape`, as Python does with the command line, or
    from half of a pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{field} is no valid Unicode text: the character at position {error.start} is a lone surrogate "
            f"(U+{ord(text[error.start]):04X}); decode its bytes as UTF-8, for instance with errors='replace'",
            field=field,
        ) from error
    return text


def check_token_ids(token_ids: Collection[int], vocab_size: int, field: str) -> None:
    """Raise InvalidRequest for a token id that the model does not have."""
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{field} contains {token_id}; the model's token ids go from 0 to {vocab_size - 1}", field=field
            )


def _checked_namespace(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        # the salt is a secret: the message does not show it
        raise InvalidRequest("cache_namespace is not text; give text, or leave it out", field="cache_namespace")
    return value


def _joined(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoder's prompt with what the encoder reads. Raises InvalidRequest."""
    encoder, decoder = value.get("encoder_prompt"), value["decoder_prompt"]
    if set(value) - _BESIDE != {"encoder_prompt", "decoder_prompt"} or not isinstance(encoder, Mapping):
        raise InvalidRequest(
            "a prompt with decoder_prompt has an encoder_prompt too, which is a mapping with multi_modal_data; got "
            f"{sorted(map(str, value))}",
            field="encoder_prompt",
        )
    if encoder.get("prompt") or set(encoder) - {"prompt", "multi_modal_data"}:
        raise InvalidRequest(
            "encoder_prompt has text or other keys, expected an empty prompt and multi_modal_data: encoders read no "
            "text here",
            field="encoder_prompt",
        )
    own = decoder if isinstance(decoder, Mapping) else {"prompt": decoder}
    if not isinstance(decoder, Mapping | str):
        own = {"prompt_token_ids": decoder}
    beside = {name: value[name] for name in ("cache_salt", "cache_namespace") if name in value}
    return {**own, **beside, "multi_modal_data": encoder.get("multi_modal_data")}


def _checked_media(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(kind, str) for kind in value):
        raise InvalidRequest(
            'multi_modal_data is no mapping by kind, such as {"audio": (samples, rate)}', field="multi_modal_data"
        )
    return {kind: each for kind, each in value.items() if each is not None} or None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"prompt is {type(value).__name__}, expected text", field="prompt")
    return value


def _token_ids(value: Any) -> list[int]:
    if hasattr(value, "tolist"):  # an array of numpy, or a tensor
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not all(_is_int(item) for item in value):
        raise InvalidRequest(
            "prompt_token_ids is not a list of integers; give text, or a list of token ids", field="prompt_token_ids"
        )
    return list(value)
