"""Makes the request that the core accepts from what a caller wrote, and raises errors for all that is wrong with it."""

from __future__ import annotations

import hashlib
import itertools
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from octavo.config.schema import EngineConfig, ModelConfig
from octavo.core.adapter import LoRARequest
from octavo.core.media import num_positions_of
from octavo.core.messages import CoreReady, EngineCoreRequest
from octavo.core.pooling import PoolingParams
from octavo.core.prompt import Prompt, PromptLike, check_token_ids, checked_text, one_salt
from octavo.core.request_options import RequestOptions
from octavo.core.sampling_params import MAX_SEED, SamplingParams
from octavo.engine.adapter_files import AdapterFiles
from octavo.engine.input.vector_input import FOR_VECTORS, VectorInput, pair_of
from octavo.engine.text.chat_template import ChatOptions, ChatTemplate, Message, no_template
from octavo.engine.text.template_budget import RenderLimits
from octavo.engine.text.tokenizer import Tokenizer
from octavo.errors import ContextTooLong, InvalidRequest
from octavo.multimodal.reader import MediaReader, placeholders
from octavo.multimodal.vector_parts import prompt_of

PrefixLike = PromptLike | Sequence[Message]
"""What may be pinned: a prompt's beginning in any form of a prompt, or the first messages of conversations."""


class InputSetup(msgspec.Struct, frozen=True):
    """The properties of the model and the engine that requests are checked with."""

    model: ModelConfig
    ready: CoreReady
    max_num_seqs: int
    enable_prefix_caching: bool = True
    speculates: bool = False
    enable_lora: bool = False
    max_num_batched_tokens: int = 2048

    @classmethod
    def of(cls, config: EngineConfig, ready: CoreReady) -> InputSetup:
        """Return the properties of an engine whose core has measured `ready`."""
        return cls(
            config.model,
            ready,
            config.scheduler.max_num_seqs,
            config.cache.enable_prefix_caching,
            speculates=config.speculative is not None,
            enable_lora=config.lora.enable_lora,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        )


class InputProcessor:
    """Turns prompts and sampling parameters into `EngineCoreRequest`s, or raises InvalidRequest with the remedy.

    Without a seed of the engine it draws one, so that no two processors give their requests the same seeds.

    Safe to use from several threads, so that tokenising a long prompt does not block an event loop.
    """

    def __init__(
        self,
        setup: InputSetup,
        *,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.ready = setup.ready
        self.vectors = VectorInput(setup.model.pooling, tokenizer, setup.ready)
        self._setup = setup
        self._model = setup.model
        self._adapter_files = AdapterFiles()
        self.media = MediaReader(
            setup.model, setup.ready, tokenizer.encode, setup.max_num_batched_tokens, token_text=tokenizer.token_text
        )
        self._clock = clock
        self._seed = secrets.randbits(63) if setup.model.seed is None else setup.model.seed
        # counted by namespace, so that a seed does not depend on how many requests others have sent
        self._counters: defaultdict[str | None, Iterator[int]] = defaultdict(itertools.count)
        ends = setup.model.eos_token_ids or (() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))
        # an id without logits never comes; some checkpoints write -1 for none
        self._end_token_ids = tuple(token_id for token_id in ends if 0 <= token_id < setup.ready.vocab_size)

    @property
    def tokenizer_info(self) -> dict[str, Any]:
        """Return the checkpoint's settings of its tokenizer, with the chat template in use."""
        template = self.chat_template
        return self.tokenizer.config | ({} if template is None else {"chat_template": template.source})

    def default_sampling_params(self, **explicit: Any) -> SamplingParams:
        """Return the defaults of the checkpoint's generation_config.json, with `explicit` values over them."""
        return SamplingParams.over_defaults(self._model.generation_defaults, explicit)

    def render_chat(
        self, messages: Sequence[Message], options: ChatOptions | None = None, limits: RenderLimits | None = None
    ) -> Prompt:
        """Return the prompt that a conversation becomes. Templates write BOS themselves, so none is added to it.

        limits: what the rendering may cost. Raises InvalidRequest.
        """
        options = options or ChatOptions()
        template = self.chat_template
        if options.chat_template is not None:
            template = ChatTemplate(options.chat_template, self.tokenizer.special_tokens, "the request's chat_template")
        if template is None:
            raise no_template()
        messages, media, places, vectors = self.media.parted(messages)
        values = {**self._model.default_chat_template_kwargs, **(options.chat_template_kwargs or {})}
        given = (messages, values, options.tools)
        spellings = self.tokenizer.spellings_with(self.media.words if media else ())
        hidden = given if options.allow_special_tokens_in_content else spellings.hide(given, "messages")
        options = msgspec.structs.replace(options, chat_template_kwargs=hidden[1], tools=hidden[2])
        stand_ins = {kind: self.tokenizer.token_text(one) for kind, one in self.media.markers.items() if kind in media}
        text = template.render(hidden[0], options, limits, stand_ins)
        text, cuts = (text, ()) if hidden is given else spellings.show(text)
        if vectors:
            self.check_text_length(text, "messages")
            return prompt_of(text, cuts, vectors, self.tokenizer.encode)
        beside: dict[str, Any] = {"multi_modal_data": media or None, "media_places": places}
        return Prompt(checked_text(text, "messages"), None, False, cuts=cuts, **beside)

    def pair_prompt(self, query: str, document: str, instruct: str | None = None) -> Prompt:
        """Return the prompt of a pair for a model that scores pairs. Raises InvalidRequest."""
        return pair_of(self.vectors, self.chat_template, query, document, instruct)

    def process(
        self,
        request_id: str,
        prompt: PromptLike,
        params: SamplingParams | PoolingParams,
        options: RequestOptions | None = None,
    ) -> EngineCoreRequest:
        """Return a request within all limits. Raises InvalidRequest (ContextTooLong, RequestTooLarge)."""
        checked_text(request_id, "request_id")
        prompt, options = Prompt.read(prompt), options or RequestOptions()
        pooled, namespace, num_kept = None, prompt.namespace, params.truncate_prompt_tokens
        if isinstance(params, PoolingParams):
            token_ids, pooled = self.vectors.read(self.media.spelled(prompt), params)
            params = FOR_VECTORS
        else:
            self.vectors.refuse_text()
            params = self._with_all_logprobs(params)
            token_ids = self.tokenised(prompt, num_kept, params.max_tokens or 1)
        token_ids, media = self.media.read(prompt, token_ids, num_kept)
        num_positions = num_positions_of(len(token_ids), media)
        if media:
            self.media.check_embeds(media, params)
            self._check_length(len(token_ids), "prompt", num_positions)
        adapter = self.resolved(options.lora_request or self.media.own_adapter(media))
        options = msgspec.structs.replace(
            options, cache_salt=one_salt(prompt, options.cache_salt), lora_request=adapter
        )
        self._check_params(params)
        bad_words = self._bad_words(params.bad_words)
        self._check_something_is_left(params, bad_words)
        if pooled is None:
            max_tokens = self._max_tokens(num_positions, params)
            drawn = request_seed(self._seed, next(self._counters[namespace]))
            seed = drawn if params.seed is None else params.seed
            params = msgspec.structs.replace(params, max_tokens=max_tokens, seed=seed)
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            arrival_time=self._clock(),
            end_token_ids=() if params.ignore_eos else self._end_token_ids,
            bad_words_token_ids=bad_words,
            cache_namespace=namespace,
            prediction_token_ids=self.predicted(prompt),
            adapter=None if adapter is None else adapter.key,
            pooled=pooled,
            media=media,
            placeholders=placeholders(media),
            **msgspec.structs.asdict(options),
        )

    def resolved(self, adapter: LoRARequest | None) -> LoRARequest | None:
        """Return an adapter with the digest of its files, which are read where they are new. Raises InvalidRequest."""
        if adapter is None:
            return None
        if not self._setup.enable_lora:
            raise InvalidRequest(
                f"lora_request is {adapter.lora_name}, and this engine runs no adapters; start it with enable_lora",
                field="lora_request",
                code="unsupported_parameter",
            )
        return self._adapter_files.resolve(adapter)

    def read_prefix(self, prompt: PrefixLike) -> Prompt:
        """Return a prefix of prompts: text, token ids, or messages, behind which no turn of the model is opened."""
        given: Any = prompt
        if isinstance(given, list | tuple) and given and isinstance(given[0], Mapping):
            return self.render_chat(given, ChatOptions(add_generation_prompt=False))
        return Prompt.read(given)

    def process_prefix(
        self, prompt: Prompt, cache_salt: str | None = None, adapter: LoRARequest | None = None
    ) -> tuple[list[int], str | None, str | None, str | None]:
        """Return token ids, salt, namespace digest and the adapter's key of a prefix to pin or unpin. Raises
        InvalidRequest."""
        if not self._setup.enable_prefix_caching:
            raise InvalidRequest(
                "prefixes cannot be pinned: the prefix cache is off; start the engine with enable_prefix_caching",
                code="unsupported_parameter",
            )
        if prompt.media or prompt.multi_modal_data:
            field = "prompt_embeds" if prompt.media else "multi_modal_data"
            raise InvalidRequest(f"{field} is not pinned: give a prefix of text or token ids", field=field)
        adapter = self.resolved(adapter)
        key = None if adapter is None else adapter.key
        return self.tokenised(prompt), one_salt(prompt, cache_salt), prompt.namespace, key

    def predicted(self, prompt: Prompt) -> list[int]:
        """Return the tokens that a prompt says will follow, at most as many as the context has; none where no engine
        speculates. They only serve as guesses, so any text is accepted."""
        if not self._setup.speculates or not prompt.prediction:
            return []
        given, limit = prompt.prediction, self.ready.max_model_len
        if isinstance(given, str):
            longest = self.tokenizer.longest_token_chars * limit
            given = self.tokenizer.encode(given[:longest], add_special_tokens=False)
        return [each for each in given[:limit] if 0 <= each < self.ready.vocab_size]

    def tokenised(self, prompt: Prompt, num_kept: int | None = None, num_generated: int = 1) -> list[int]:
        """Return the token ids of a prompt that fits the context. Raises InvalidRequest.

        num_kept: the last tokens that are kept, -1 for those that fit beside `num_generated`; None keeps all.
        """
        if prompt.token_ids is not None:
            token_ids, field = prompt.token_ids, "prompt_token_ids"
            check_token_ids(token_ids, self.ready.vocab_size, field)
        else:
            field = "prompt"
            if num_kept is None:
                self.check_text_length(prompt.text or "", field)
            prompt = self.media.spelled(prompt)
            token_ids = self.tokenizer.encode(prompt.text or "", prompt.add_special_tokens, prompt.cuts)
            outside = [token_id for token_id in token_ids if token_id >= self.ready.vocab_size]
            if outside:
                raise InvalidRequest(
                    f"the tokenizer makes the id {outside[0]} of this prompt, but the model's vocabulary has "
                    f"{self.ready.vocab_size} ids; the tokenizer belongs to another model",
                    field=field,
                )
        if not token_ids:
            raise InvalidRequest(
                "the prompt is empty; it must have at least one token", field=field, code="empty_prompt"
            )
        limit = self.ready.max_model_len
        if num_kept is not None:
            token_ids = token_ids[-(num_kept if num_kept > 0 else max(1, limit - num_generated)) :]
        self._check_length(len(token_ids), field)
        return token_ids

    def _check_length(self, num_tokens: int, field: str, num_positions: int = 0) -> None:
        limit = self.ready.max_model_len
        if max(num_tokens, num_positions) >= limit:
            beyond = f" and its videos last {num_positions} positions" if num_positions > num_tokens else ""
            raise ContextTooLong(
                f"the prompt has {num_tokens} tokens{beyond}, but this model's maximum context length is "
                f"{limit} and at least one token is for the answer; shorten the prompt to {limit - 1} tokens"
                f"{self._longer_context()}",
                field=field,
            )

    def check_text_length(self, text: str, field: str) -> None:
        """Raise ContextTooLong for a text that is too long whatever its tokens are, before it is tokenised."""
        limit = self.ready.max_model_len
        if self.tokenizer.has_more_tokens(text, limit):
            raise ContextTooLong(
                f"the prompt has {len(text)} characters, but this model's maximum context length is {limit} tokens, "
                f"which cannot stand for so many; shorten the prompt{self._longer_context()}",
                field=field,
            )

    def _longer_context(self) -> str:
        return " or raise max_model_len" if self._model.user_set_max_model_len else ""

    def _with_all_logprobs(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the size of the vocabulary for -1 log-probabilities."""
        most, vocab_size = self._model.max_logprobs, self.ready.vocab_size
        limit, changes = vocab_size if most < 0 else min(most, vocab_size), {}
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(params, field)
            if value == -1:
                changes[field] = vocab_size
            if value is not None and changes.get(field, value) > limit:
                asked = f"-1, which is all {vocab_size} tokens" if value == -1 else value
                raise InvalidRequest(
                    f"{field} is {asked}, must be at most {limit}; ask for fewer, or raise max_logprobs", field=field
                )
        return msgspec.structs.replace(params, **changes) if changes else params

    def _check_params(self, params: SamplingParams) -> None:
        if params.logprob_token_ids is not None and self._model.logprobs_mode != "raw_logprobs":
            raise InvalidRequest(
                "logprob_token_ids are described by the model's own distribution, and this engine has logprobs_mode = "
                f"{self._model.logprobs_mode}; leave them out, or start it with raw_logprobs",
                field="logprob_token_ids",
            )
        if params.use_beam_search:
            num_ends = 0 if params.ignore_eos else len(self._end_token_ids)
            needed = max(2, 1 + num_ends + len(params.stop_token_ids)) * params.width
            if needed > self.ready.vocab_size:
                raise InvalidRequest(
                    f"{params.width_field} is {params.width}, but so many beams need {needed} candidates and the "
                    f"vocabulary has {self.ready.vocab_size} tokens; ask for fewer",
                    field=params.width_field,
                )
        for field in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "logit_bias"):
            check_token_ids(getattr(params, field) or (), self.ready.vocab_size, field)

    def _check_something_is_left(self, params: SamplingParams, bad_words: Collection[tuple[int, ...]]) -> None:
        """Raise InvalidRequest for parameters that bar every token from the start on. Where longer bad words leave none
        later on, the sampler ends the request with its reason, and a beam search ends by itself."""
        if params.use_beam_search:
            return
        barred = {ids[0] for ids in bad_words if len(ids) == 1}
        if params.min_tokens > 0:
            barred.update(params.stop_token_ids, () if params.ignore_eos else self._end_token_ids)
        allowed = params.allowed_token_ids
        if len(barred) >= self.ready.vocab_size or (allowed is not None and barred.issuperset(allowed)):
            field = "vocabulary" if allowed is None else "allowed_token_ids"
            others = [name for name in ("min_tokens", "bad_words") if getattr(params, name)]
            raise InvalidRequest(
                f"{field} leaves no token that {' and '.join(others)} would not bar: min_tokens bars the end tokens, "
                f"bad_words the words of one token; allow other tokens, or leave {' or '.join(others)} out",
                field=None if allowed is None else field,
            )

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams) -> int:
        """Return the tokens that each sequence may produce: by default the rest of context and KV cache."""
        context_left, check_runs_alone = self.ready.max_model_len - num_prompt_tokens, self.ready.cache.check_runs_alone
        wanted = params.max_tokens
        if wanted is not None and wanted > context_left and wanted == self._model.generation_defaults.get("max_tokens"):
            wanted = None  # the checkpoint's default does not fit: what fits is meant
        if wanted is not None:
            if wanted > context_left:
                raise ContextTooLong(
                    f"the prompt has {num_prompt_tokens} token{'s' * (num_prompt_tokens != 1)} and max_tokens is "
                    f"{wanted}, together {num_prompt_tokens + wanted}, but this model's maximum context length is "
                    f"{self.ready.max_model_len}; set max_tokens to at most {context_left}, or "
                    f"shorten the prompt{self._longer_context()}",
                    field="max_tokens",
                )
            check_runs_alone(num_prompt_tokens, wanted, params, self._setup.max_num_seqs)
            return wanted
        check_runs_alone(num_prompt_tokens, 1, params, self._setup.max_num_seqs)
        max_tokens = min(context_left, self.ready.cache.max_tokens_that_fit(num_prompt_tokens, params.width))
        if max_tokens < max(1, params.min_tokens):
            if params.min_tokens > context_left:
                raise ContextTooLong(
                    f"min_tokens is {params.min_tokens}, but behind a prompt of {num_prompt_tokens} tokens the context "
                    f"has room for {context_left}; lower min_tokens, or shorten the prompt{self._longer_context()}",
                    field="min_tokens",
                )
            check_runs_alone(num_prompt_tokens, max(1, params.min_tokens), params, self._setup.max_num_seqs)
        return max_tokens

    def _bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            variants = self.tokenizer.encode_word(word)
            if not variants:
                raise InvalidRequest(
                    f"bad_words contains {word!r}, which has no tokens; leave it out", field="bad_words"
                )
            # a variant with an id that the model has no logits for cannot come about
            sequences.update(dict.fromkeys(ids for ids in variants if max(ids) < self.ready.vocab_size))
        return tuple(sequences)


def open_tokenizer(model: ModelConfig) -> tuple[Tokenizer, ChatTemplate | None]:
    """Return the tokenizer of a model and its chat template, if it has one. Raises CheckpointError."""
    tokenizer = Tokenizer.open(model.tokenizer_path)
    template = ChatTemplate.find(model.tokenizer_path, tokenizer, model.chat_template)
    if template is None and model.path != model.tokenizer_path:
        template = ChatTemplate.find(model.path, tokenizer)
    return tokenizer, template


def request_seed(engine_seed: int, number: int) -> int:
    """Return the seed of the request with this number among those without one."""
    digest = hashlib.blake2b(f"{engine_seed}:{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED
