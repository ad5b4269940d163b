"""`LLM`: generate text for a batch of prompts, offline."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack, cast

import msgspec

from octavo.config.args import EngineArgs
from octavo.config.fields import values_of
from octavo.config.schema import EngineConfig
from octavo.config.sources import engine_args
from octavo.core.absent import says_what_it_lacks
from octavo.core.outputs import RequestOutput
from octavo.core.param import checked_number
from octavo.core.pooling import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    scored_pair,
)
from octavo.core.prompt import Prompt, PromptLike, listed
from octavo.core.request_options import BatchKeywords, RequestOptions, one_for_each, options_of_each
from octavo.core.sampling_params import SamplingParams, documented_fields
from octavo.engine.batches import Batches, ParamsLike
from octavo.engine.input.listwise import list_prompt, list_scores, lists_of
from octavo.engine.input.vector_input import matched
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.output.vector_output import array_of
from octavo.engine.text.chat_template import ChatKeywords, ChatOptions, Message
from octavo.engine.text.chat_tokenizer import ChatTokenizer
from octavo.errors import InvalidRequest

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def of_engine(method: Callable[Concatenate[LLMEngine, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a method of `LLM` that calls this method of its engine."""

    def call(self: Any, /, *arguments: P.args, **keywords: P.kwargs) -> T:
        result: T = getattr(self.engine, method.__name__)(*arguments, **keywords)
        return result

    return functools.update_wrapper(call, method)


@says_what_it_lacks
class LLM:
    """A model in this process.

    `model` is a hub name or a directory; None takes OCTAVO_MODEL, else octavo-tiny, the demonstration model that ships
    with the package. Every other keyword is a field of EngineArgs; an unknown one is a ConfigError that names the
    nearest. Use it as a context manager, or call `close`, to release the memory. `target_step_ms` is 0 by default:
    whole outputs are returned, so throughput counts and the time between tokens does not. Several threads may use it at
    once: their requests run in the same steps.
    """

    def __init__(self, model: str | None = None, **keywords: Any) -> None:
        given = keywords if model is None else {"model": model, **keywords}
        args = engine_args(given)
        if args.target_step_ms is None:
            args = dataclasses.replace(args, target_step_ms=0.0)
        self.engine = self.llm_engine = LLMEngine.from_args(args)
        self._batches = Batches(self.engine)
        _log.info("%s", self.engine.ready.plan)

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> LLM:
        """Return an `LLM` over an existing engine."""
        llm = cls.__new__(cls)
        llm.engine = llm.llm_engine = engine
        llm._batches = Batches(engine)
        return llm

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """Return an `LLM` with these arguments."""
        return cls(**values_of(engine_args, EngineArgs))

    @property
    def config(self) -> EngineConfig:
        return self.engine.config

    def get_tokenizer(self) -> ChatTokenizer:
        """Return the tokenizer and the chat template, with the methods of transformers' tokenizers."""
        return ChatTokenizer(self.engine.tokenizer, self.engine.render_chat)

    get_default_sampling_params = of_engine(LLMEngine.default_sampling_params)

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike = None,
        use_tqdm: bool | None = None,
        **options: Unpack[BatchKeywords],
    ) -> list[RequestOutput]:
        """Continue one prompt or a list of them: text, token ids, or mappings with `prompt` or `prompt_token_ids` and
        optionally `cache_salt` and `cache_namespace` (only prompts with equal ones share cached prefixes).

        sampling_params: for all prompts, or a list with one for each; None takes the model's defaults. use_tqdm: show a
        progress bar on stderr; None shows it on a terminal. options: the fields of `RequestOptions` (priority,
        first_token_deadline_s, tenant, cache_salt, lora_request), each for all prompts or as a list with one for each.
        Outputs come in the order of the prompts. A prompt that is refused has an output with `error`; others go on.
        Ctrl-C ends all of them and leaves the model usable.
        """
        given = listed(prompts)
        makers = [partial(Prompt.read, prompt) for prompt in given]
        return self._batches.run(makers, sampling_params, options_of_each(len(given), options), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ParamsLike = None,
        use_tqdm: bool | None = None,
        **options: Unpack[ChatKeywords],
    ) -> list[RequestOutput]:
        """Continue one conversation (a list of messages) or a list of them, through the model's chat template.

        options: the fields of `ChatOptions` (chat_template, add_generation_prompt, …), and those of `RequestOptions`.
        All other arguments are as in `generate`.
        """
        makers, each = self._conversations(messages, options)
        return self._batches.run(makers, sampling_params, each, use_tqdm)

    def enqueue(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike = None,
        use_tqdm: bool | None = None,
        **options: Unpack[BatchKeywords],
    ) -> list[str]:
        """Add requests without waiting for them, and return their ids. Arguments are those of `generate`; use_tqdm has
        no effect. The requests run while `wait_for_completion`, which returns their outputs, or any other call steps
        the engine.
        """
        given = listed(prompts)
        makers = [partial(Prompt.read, prompt) for prompt in given]
        return self._batches.add(makers, sampling_params, options_of_each(len(given), options))

    def enqueue_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ParamsLike = None,
        use_tqdm: bool | None = None,
        **options: Unpack[ChatKeywords],
    ) -> list[str]:
        """Add conversations without waiting, as `enqueue` adds prompts. Arguments are those of `chat`."""
        makers, each = self._conversations(messages, options)
        return self._batches.add(makers, sampling_params, each)

    def wait_for_completion(self, *, use_tqdm: bool | None = None) -> list[RequestOutput]:
        """Return the outputs of all requests that were added with `enqueue` or `enqueue_chat` since the last call, in
        their order. Raises ConfigError while the engine sleeps, and keeps the requests."""
        return self._batches.wait(use_tqdm)

    def _conversations(self, messages: Any, options: ChatKeywords) -> tuple[list[Any], list[RequestOptions]]:
        """Return a function for each conversation that makes its prompt, and the options of its request."""
        is_single = not messages or isinstance(messages, str) or not isinstance(messages[0], Sequence)
        conversations: list[Any] = [messages] if is_single else list(messages)
        given: dict[str, Any] = {**options}
        chat = ChatOptions(**{name: given.pop(name) for name in ChatOptions.__struct_fields__ if name in given})
        each = options_of_each(len(conversations), cast(BatchKeywords, given))
        return [partial(self.engine.render_chat, conversation, chat) for conversation in conversations], each

    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        beam_width: int = 4,
        *,
        n: int | None = None,
        max_tokens: int = 16,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        use_tqdm: bool | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Return the `n` (by default `beam_width`) likeliest continuations of each prompt that a beam search finds.

        Scores are `cumulative_logprob / len(token_ids) ** length_penalty`. A bias or a penalty changes them, but not
        the reported log-probabilities, which are the model's. `early_stopping`: True ends with `beam_width` finished
        beams, False when the running ones are unlikely to become better, "never" when they cannot. others: fields of
        `RequestOptions`, as in `generate`, and sampling parameters such as `logprobs` or `stop_token_ids`.
        """
        options: Any = {name: others.pop(name) for name in RequestOptions.__struct_fields__ if name in others}
        width = checked_number("beam_width", beam_width, int, documented_fields()["best_of"])
        if n is not None and n > width:
            raise InvalidRequest(
                f"n is {n}, must be at most beam_width, which is {width}: only beams can be returned", field="n"
            )
        params = SamplingParams(
            n=width if n is None else n,
            best_of=width,
            use_beam_search=True,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            **others,
        )
        make_prompts = [partial(Prompt.read, prompt) for prompt in listed(prompts)]
        each = options_of_each(len(make_prompts), options)
        return self._batches.run(make_prompts, params, each, use_tqdm, {"best_of": "beam_width"})

    def encode(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool | None = None,
        *,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        **options: Unpack[BatchKeywords],
    ) -> list[PoolingRequestOutput]:
        """Return the vector or the scores of each prompt as `outputs.data`, float32 [size]; [tokens, size] for the
        tasks "token_embed" and "token_classify".

        pooling_params: for all prompts, or a list with one for each; pooling_task and truncate_prompt_tokens take the
        place of their fields. prompt_name: as of `embed`; "query" or "document" of a late-interaction model. Other
        arguments and refused prompts are as in `generate`; `outputs` of those is None. Raises InvalidRequest for a
        model that does not do the task.
        """
        given, vectors = listed(prompts), self.engine.input.vectors
        read = Prompt.read if prompt_name is None else lambda each: vectors.prompted(Prompt.read(each), prompt_name)
        makers = [partial(read, prompt) for prompt in given]
        changes = {"task": pooling_task, "truncate_prompt_tokens": truncate_prompt_tokens}
        task, outputs = self._pool(makers, pooling_params, changes, options_of_each(len(given), options), use_tqdm)
        config = vectors.checked(None)
        return [PoolingRequestOutput.of(each, PoolingOutput(array_of(config, each, task))) for each in outputs]

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *arguments: Any,
        prompt_name: str | None = None,
        **keywords: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vector of each prompt, `outputs.embedding`. Arguments are those of `encode`.

        prompt_name: the text with this name in config_sentence_transformers.json is put before each prompt; None takes
        the default that the file names.
        """
        given = [self.engine.input.vectors.prompted(Prompt.read(prompt), prompt_name) for prompt in listed(prompts)]
        outputs = self.encode(given, *arguments, pooling_task="embed", **keywords)
        return [EmbeddingRequestOutput.of(each, each.made(EmbeddingOutput)) for each in outputs]

    def classify(
        self, prompts: PromptLike | Sequence[PromptLike], *arguments: Any, **keywords: Any
    ) -> list[ClassificationRequestOutput]:
        """Return the score of each label for each prompt, `outputs.probs`. Arguments are those of `encode`."""
        outputs = self.encode(prompts, *arguments, pooling_task="classify", **keywords)
        return [ClassificationRequestOutput.of(each, each.made(ClassificationOutput)) for each in outputs]

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], *arguments: Any, **keywords: Any
    ) -> list[ScoringRequestOutput]:
        """Return how well pairs of texts match, `outputs.score`: one text with each of many, or each with its own.

        A model for pairs gives its score, a late-interaction model MaxSim, and another the cosine of two vectors; one
        that ranks lists gets a text with all those of many in one prompt.
        Arguments are those of `encode`.
        """
        pairs = matched(*([each] if isinstance(each, str) else list(each) for each in (data_1, data_2)))
        vectors = self.engine.input.vectors
        if vectors.ranks_lists:
            lists = lists_of(*([each] if isinstance(each, str) else list(each) for each in (data_1, data_2)))
            ranked = self.encode([list_prompt(self.engine.input, *each) for each in lists], *arguments, **keywords)
            return [
                ScoringRequestOutput.of(output, ScoringOutput(score))
                for output, (_, documents) in zip(ranked, lists, strict=True)
                for score in (list_scores(output.outputs.data) if output.error is None else [0.0] * len(documents))
            ]
        if vectors.checked(None).task != "classify":
            each_once = list(dict.fromkeys(side for pair in pairs for side in enumerate(pair)))
            written = [vectors.writers()[side](text) for side, text in each_once]
            found = dict(zip(each_once, self.encode(written, *arguments, **keywords), strict=True))
            return [scored_pair(found[0, query], found[1, document], vectors.match) for query, document in pairs]
        prompts = [self.engine.input.pair_prompt(query, document) for query, document in pairs]
        outputs = self.encode(prompts, *arguments, pooling_task="score", **keywords)
        return [ScoringRequestOutput.of(each, each.made(lambda values: ScoringOutput(values[0]))) for each in outputs]

    def _pool(
        self,
        prompts: Sequence[Callable[[], Prompt]],
        params: Any,
        changes: Mapping[str, Any],
        options: Sequence[RequestOptions],
        use_tqdm: bool | None,
    ) -> tuple[str, list[RequestOutput]]:
        """Return the task of a batch and its outputs. changes: fields of all parameters, but for None."""
        given = {name: value for name, value in changes.items() if value is not None}
        listed = list(params) if isinstance(params, Sequence) else params or PoolingParams()
        each = [msgspec.structs.replace(one, **given) for one in one_for_each(len(prompts), "pooling_params", listed)]
        tasks = {one.task for one in each}
        if len(tasks) > 1:
            raise InvalidRequest("pooling_params have several tasks; make one call for each", field="pooling_params")
        task = tasks.pop() if tasks else None
        config = self.engine.input.vectors.checked(task)
        return task or config.task, self._batches.run(prompts, each, options, use_tqdm)

    reset_prefix_cache = of_engine(LLMEngine.reset_prefix_cache)
    pin_prefix = of_engine(LLMEngine.pin_prefix)
    unpin_prefix = of_engine(LLMEngine.unpin_prefix)
    is_sleeping = of_engine(LLMEngine.is_sleeping)
    sleep = of_engine(LLMEngine.sleep)
    wake_up = of_engine(LLMEngine.wake_up)
    update_weights_from_disk = of_engine(LLMEngine.update_weights_from_disk)
    update_weights_from_tensor = of_engine(LLMEngine.update_weights_from_tensor)
    get_weight_version = of_engine(LLMEngine.get_weight_version)
    update_weight_version = of_engine(LLMEngine.update_weight_version)
    finish_weight_update = of_engine(LLMEngine.finish_weight_update)
    start_profile = of_engine(LLMEngine.start_profile)
    stop_profile = of_engine(LLMEngine.stop_profile)
    get_metrics = of_engine(LLMEngine.get_metrics)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of ranks. include_dp: has no effect, as an `LLM` is one engine."""
        return self.config.device.num_ranks

    def reset_mm_cache(self) -> None:
        """Do nothing: no image or sound outlives its request, but in the prefix cache."""

    def close(self) -> None:
        """Release the model's memory. Idempotent."""
        self.engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
