"""The engine in one process, a step at a time. `LLM` and the command line use it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from octavo.config.args import EngineArgs
from octavo.config.resolve import configure
from octavo.config.schema import EngineConfig, GenerationDefault
from octavo.core.absent import says_what_it_lacks
from octavo.core.adapter import LoRARequest
from octavo.core.messages import CoreReady, SchedulerStats, StepTimes
from octavo.core.outputs import PinnedPrefix, RequestOutput
from octavo.core.pooling import PoolingParams
from octavo.core.profiler_config import profile_name
from octavo.core.prompt import Prompt, PromptLike
from octavo.core.request_limits import checked_ttl_s
from octavo.core.request_options import RequestKeywords, RequestOptions
from octavo.core.sampling_params import SamplingParams
from octavo.core.step_times import TEXT, PartTime
from octavo.engine.input.input_processor import InputProcessor, InputSetup, PrefixLike, open_tokenizer
from octavo.engine.output.metric_reader import CountedMetric, read_metrics
from octavo.engine.output.open_request import OpenRequest
from octavo.engine.output.output_processor import OutputProcessor, Processed
from octavo.engine.output.request_counts import RequestCounts
from octavo.engine.pause import check_mode
from octavo.engine.sleep import check_level, check_tags, checked_version, checkpoint_path
from octavo.engine.text.chat_template import ChatOptions, ChatTemplate, Message
from octavo.engine.text.tokenizer import Tokenizer
from octavo.engine.thread_turns import ThreadTurns, Wakes, in_turn
from octavo.engine.weight_folder import WeightFolder
from octavo.errors import ConfigError, EngineDeadError, InvalidRequest
from octavo.structured_output.grammars import check_grammar

if TYPE_CHECKING:
    from octavo.engine.engine_core import EngineCore


@says_what_it_lacks
class LLMEngine:
    """Input processor, engine core and output processor in this process.

    Threads may share it: calls take turns, and `step` returns the outputs of all their requests.

    Every request that `add_request` accepts gets exactly one output with `finished` from `step`, aborted ones too.
    input: makes requests of prompts.
    """

    def __init__(
        self,
        config: EngineConfig,
        core: EngineCore,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None = None,
        wakes: Wakes | None = None,
    ) -> None:
        """wakes: counts when a core that waits for blocks is to step again."""
        self.wakes = wakes or Wakes()
        self._known_wakes = -1
        """The number of wakes when the last step began: what they announced is in it."""
        self.turns = ThreadTurns()
        self.config = config
        self.tokenizer = tokenizer
        self.stats = SchedulerStats()
        self.core = core
        self._error: EngineDeadError | None = None
        self._aborted: list[OpenRequest] = []
        self._step_times: list[StepTimes] = []
        self._weight_folder: WeightFolder | None = None
        self.input = InputProcessor(InputSetup.of(config, core.ready), tokenizer=tokenizer, chat_template=chat_template)
        self._counts = RequestCounts()
        self._output = OutputProcessor(tokenizer, counts=self._counts)

    @classmethod
    def from_args(cls, args: EngineArgs) -> LLMEngine:
        """Find and load the model. Raises ConfigError, CheckpointError or UnsupportedModel."""
        return cls.build(in_process_config(args))

    @classmethod
    def build(cls, config: EngineConfig) -> LLMEngine:
        """Load the model. Raises as `from_args` does."""
        from octavo.engine.engine_core import EngineCore

        tokenizer, chat_template = open_tokenizer(config.model)  # before the weights: it fails sooner
        wakes = Wakes()
        core = EngineCore.build(config, tokenizer, wakes.notify_death, wakes.notify)
        return cls(config, core, tokenizer, chat_template, wakes)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLMEngine:
        """Call `from_args`, under the name that vLLM has for it."""
        return cls.from_args(engine_args)

    @contextmanager
    def timed_steps(self) -> Iterator[list[StepTimes]]:
        """Yield a list to which the times of each step are appended inside the context."""
        self._step_times = []
        self.call("time_steps", True)
        try:
            yield self._step_times
        finally:
            self.call("time_steps", False)

    @property
    def ready(self) -> CoreReady:
        """Return what was measured at the start: the number of KV blocks, the memory plan."""
        return self.core.ready

    @property
    def generation_defaults(self) -> dict[str, GenerationDefault]:
        """Return the sampling values of the checkpoint's generation_config.json."""
        return self.config.model.generation_defaults

    def default_sampling_params(self, /, **explicit: Any) -> SamplingParams:
        """Return the checkpoint's sampling defaults, which requests without parameters get, with `explicit` values over
        them."""
        return self.input.default_sampling_params(**explicit)

    def render_chat(self, messages: Sequence[Message], options: ChatOptions | None = None) -> Prompt:
        """Return the prompt that a conversation becomes. Raises InvalidRequest."""
        return self.input.render_chat(messages, options)

    @in_turn
    def add_request(
        self,
        request_id: str,
        prompt: PromptLike,
        params: SamplingParams | PoolingParams | None = None,
        **options: Unpack[RequestKeywords],
    ) -> None:
        """Accept a request, with the model's sampling defaults when none are given.

        Raises InvalidRequest (ContextTooLong, RequestTooLarge) when it is refused, EngineDeadError after a failure.
        """
        self._check_alive()
        prompt = Prompt.read(prompt)
        params = self.default_sampling_params() if params is None else params
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            check_grammar(params.structured_outputs)
        request = self.input.process(request_id, prompt, params, RequestOptions.of_keywords(options))
        self._output.add(request, prompt.text)
        self.core.add_requests([request])

    @in_turn
    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End one request or several; the next step returns their final outputs (finish reason "abort").

        Unknown ids are ignored.
        """
        request_ids = [request_id] if isinstance(request_id, str) else list(request_id)
        aborted = [request for each in request_ids if (request := self._output.abort(each)) is not None]
        self._aborted += aborted
        if aborted and self._error is None:
            self.core.abort_requests([request.request_id for request in aborted])

    def step(self) -> list[RequestOutput]:
        """Run one step, and return what is new for callers. Raises EngineDeadError after a failure.

        While all requests wait for KV blocks or adapters it waits for those, once, and other threads have their turns
        meanwhile: nothing may be new then.
        """
        with self.turns:
            if self.core.is_waiting and self._error is None and self._awaits_wake and not self._has_nothing_to_do:
                self.turns.release_during(partial(self.wakes.wait_beyond, self._known_wakes))
            return self._step()

    @property
    def _awaits_wake(self) -> bool:
        """Return whether a core that waits has nothing new to look at."""
        return self.wakes.number == self._known_wakes

    @property
    def _has_nothing_to_do(self) -> bool:
        return not self.core.has_unfinished() or (self.core.is_still and not self.core.has_news)

    def _step(self) -> list[RequestOutput]:
        self._check_alive()
        outputs = Processed(self._aborted, []).read()
        self._aborted = []
        # the wait may be that of another step, which another thread has made meanwhile
        if self._has_nothing_to_do or (self.core.is_waiting and self._awaits_wake):
            self.stats = self.core.stats()
            return outputs
        self._known_wakes = self.wakes.number
        try:
            step = self.core.step()
            if self.core.is_waiting and self.wakes.death is not None:
                raise EngineDeadError(self.wakes.death)  # what it waits for does not come
        except Exception as error:
            self._error = EngineDeadError(f"the engine failed in an earlier step ({type(error).__name__}: {error})")
            # the failure's traceback keeps the core, so nothing else would end a rank that is stopped
            self.core.shutdown()
            raise
        self.stats = step.stats
        began = 0 if step.times is None else time.perf_counter_ns()
        processed = self._output.process(step.outputs)
        for stop in processed.stops:
            self.core.stop_sequence(stop.request_id, stop.index)
        outputs += processed.read()
        if step.times is not None:
            step.times.parts[TEXT] = PartTime(time.perf_counter_ns() - began)
            self._step_times.append(step.times)
        return outputs

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests whose final output `step` has yet to return; 0 after a failure."""
        return 0 if self._error is not None else len(self._aborted) + len(self._output)

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` has something to do."""
        return self._error is None and bool(self._aborted or len(self._output) or self.core.has_unfinished())

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Drop all cached prefixes and pins. Returns False, without effect, while requests have KV blocks.

        reset_running_requests: they lose them first, and are computed again, with the same tokens.
        """
        return bool(self.call("reset_prefix_cache", bool(reset_running_requests)))

    def pin_prefix(
        self, prompt: PrefixLike, ttl_s: float, cache_salt: str | None = None, lora_request: LoRARequest | None = None
    ) -> PinnedPrefix:
        """Keep a prefix (text, token ids, or the first messages of conversations) in the cache for `ttl_s` seconds.

        Tokens that are not cached yet are kept from when a request computes them. Pinning the same prefix again sets a
        new time. Pins hold at most half of the KV blocks, and end before their time when a request could not run
        otherwise, even alone. Raises InvalidRequest.
        """
        token_ids, *key = self.input.process_prefix(self.input.read_prefix(prompt), cache_salt, lora_request)
        return msgspec.convert(self.call("pin_prefix", token_ids, checked_ttl_s(ttl_s), *key), PinnedPrefix)

    def unpin_prefix(
        self, prompt: PrefixLike, cache_salt: str | None = None, lora_request: LoRARequest | None = None
    ) -> bool:
        """End the pin of exactly this prefix, which stays cached until it is evicted; False when there is none."""
        prefix = self.input.process_prefix(self.input.read_prefix(prompt), cache_salt, lora_request)
        return bool(self.call("unpin_prefix", *prefix))

    def check_awake(self, what: str) -> None:
        """Raise ConfigError while a sleep or a pause would let something wait for ever."""
        with self.turns:
            self.core.sleep.check_awake(what)
            if self.core.is_still:
                raise ConfigError(f"{what} would wait: the engine is paused (sleep at level 0); wake it up first")

    def is_sleeping(self) -> bool:
        """Return whether the engine has neither weights nor KV cache."""
        return self.core.sleep.is_on

    @in_turn
    def sleep(self, level: int = 1, mode: str = "keep") -> None:
        """Give back the memory of weights and KV cache until `wake_up`. Needs `enable_sleep_mode`. Raises ConfigError.

        level: 1 or 2, which do the same: weights are read again; 0 is a pause alone. mode: "keep" lets open requests go
        on then, "abort" ends them: the next step returns their last outputs.
        """
        check_level(level)
        check_mode(mode)
        if mode == "wait":
            raise InvalidRequest('mode is "wait": call step until nothing is open, then sleep', field="mode")
        pauses = level == 0 or (mode != "keep" and self.config.model.enable_sleep_mode)
        if pauses:
            self.call("pause", mode, False)
        try:
            self.call("sleep" if level else "is_sleeping")
        except ConfigError:
            if pauses:
                self.call("resume")
            raise

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Load the weights again. tags: those of vLLM, each of which brings everything. Raises ConfigError."""
        check_tags(tags)
        self.call("wake_up")

    def update_weights_from_disk(self, model_path: str | Path) -> None:
        """Compute with the weights of another checkpoint of the same model; a sleep ends, and nothing cached is used
        again. Needs `enable_sleep_mode`. Raises ConfigError where they do not fit, and nothing changes."""
        self._update_weights(model_path, None)

    def update_weights_from_tensor(self, named_tensors: Iterable[tuple[str, Any]] | Mapping[str, Any]) -> None:
        """Take all weights, by their names in the checkpoint, as `update_weights_from_disk` does. They are written to
        memory (/dev/shm), and stay there until the next update."""
        folder = WeightFolder(Path(self.config.model.path), named_tensors)
        self._update_weights(folder.path, folder)

    @in_turn
    def _update_weights(self, path: str | Path, folder: WeightFolder | None) -> None:
        try:
            self.call("update_weights", checkpoint_path(path))
            folder, self._weight_folder = self._weight_folder, folder
        finally:
            if folder is not None:  # the previous folder, or that of a failed update
                folder.close()

    def get_weight_version(self) -> str:
        """Return the label of the weights in use, "default" where none was given."""
        return str(self.call("get_weight_version"))

    def update_weight_version(self, new_version: str) -> None:
        """Label the weights in use, as `weight_versions` of outputs tell; updates leave it. Raises InvalidRequest."""
        self.call("set_weight_version", checked_version(new_version))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do what `update_weight_version` does, unless there is no label."""
        if weight_version is not None:
            self.update_weight_version(weight_version)

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record with torch's profiler what every rank computes until `stop_profile`: a file for each in the directory
        that `profiler_config` names, whose name begins with the prefix. Raises ConfigError."""
        self.call("profile", profile_name(profile_prefix))

    def stop_profile(self) -> None:
        """End the profile, and write it. Without one nothing happens. Raises ConfigError."""
        self.call("profile", None)

    @in_turn
    def call(self, method: str, *arguments: Any) -> Any:
        """Return the result of a control call, such as `reset_prefix_cache`. Raises ConfigError for an unknown name."""
        self._check_alive()
        return self.core.call(method, *arguments)

    def get_metrics(self) -> list[CountedMetric]:
        """Return what the engine has counted up to its last step, under vLLM's names; times of a request are in its
        output's `metrics`."""
        with self.turns:
            return read_metrics(self.config.model.served_model_names[0], self.stats, self._counts)

    @in_turn
    def shutdown(self) -> None:
        """Release the model. Open requests get no further output. Idempotent."""
        self._error = self._error or EngineDeadError("the engine has been shut down")
        if self._weight_folder is not None:
            self._weight_folder.close()
        self.core.shutdown()

    def _check_alive(self) -> None:
        if self._error is not None:
            raise self._error


def in_process_config(args: EngineArgs) -> EngineConfig:
    """Resolve the arguments of an engine in the caller's process. Raises ConfigError or CheckpointError.

    The queue has no limits here: a caller waits for all of its batch. The default seed is 0, so that each run of a
    program gives the same results.
    """
    for name, one in (("data_parallel_size", 1), ("prefill", 0), ("decode", 0), ("role", None)):
        if (value := getattr(args, name)) != one:
            raise ConfigError(
                f"{name} is {value}, and an engine in process (LLM) is one; leave it out, or use AsyncLLM or "
                "octavo serve"
            )
    return configure(dataclasses.replace(args, max_queued_requests=None, max_queued_tokens=None, seed=args.seed or 0))
