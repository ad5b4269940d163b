"""Batches of requests of an engine in this process: whole ones, and some that are added now and waited for later."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from octavo.core.outputs import RequestOutput
from octavo.core.pooling import PoolingParams
from octavo.core.prompt import Prompt
from octavo.core.request_options import RequestOptions, one_for_each
from octavo.core.sampling_params import OutputKind, SamplingParams
from octavo.engine.interrupt import Interrupt, deferred_interrupt
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.output.progress import ProgressBar
from octavo.errors import ConfigError, InvalidRequest, RequestFailed, named_by_the_caller

ParamsLike = SamplingParams | Sequence[SamplingParams] | None

_STILL_S: Final = 0.01
"""How often a call looks whether a pause has ended."""

_log = logging.getLogger(__name__)


class Batches:
    """The requests of one `LLM`; what its threads share is read and changed in turns.

    Prompts are made by calls that may raise InvalidRequest; then the output of the request has an `error`. Ctrl-C ends
    the requests of the call that it interrupts, and the engine stays usable."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._outputs: dict[str, RequestOutput | None] = {}
        """By the ids of requests whose outputs are not returned yet: the last output, None before there is one."""
        self._added: list[str] = []
        """The requests whose outputs the next `wait` returns."""
        self._waits: list[set[str]] = []
        """For each call that waits, of any thread: the requests that have not ended."""

    def run(
        self,
        prompts: Sequence[Callable[[], Prompt]],
        sampling_params: Any,
        options: Sequence[RequestOptions],
        use_tqdm: bool | None,
        field_names: Mapping[str, str] = MappingProxyType({}),
    ) -> list[RequestOutput]:
        """Return the outputs of requests in the order of their prompts.

        field_names: the caller's names for parameters, for the messages of errors.
        """
        with deferred_interrupt() as interrupt, ProgressBar(len(prompts), shown=use_tqdm) as progress:
            request_ids = self._add_all(prompts, sampling_params, options, field_names, interrupt)
            return self._wait(request_ids, progress, interrupt)

    def add(
        self, prompts: Sequence[Callable[[], Prompt]], sampling_params: Any, options: Sequence[RequestOptions]
    ) -> list[str]:
        """Add requests, whose outputs `wait` returns, and return their ids."""
        with deferred_interrupt() as interrupt:
            request_ids = self._add_all(prompts, sampling_params, options, {}, interrupt)
            with self._engine.turns:
                self._added += request_ids
            return request_ids

    def wait(self, use_tqdm: bool | None) -> list[RequestOutput]:
        """Return the outputs of all requests that `add` has added since the last call, in their order.

        Raises ConfigError while a sleep or a pause holds them back; they are kept. Raises RequestFailed where others
        have stepped the engine and have got outputs.
        """
        with self._engine.turns:
            try:
                self._engine.check_awake("a request that was added")
            except ConfigError:
                self._step()  # it returns what a sleep has aborted
                if any(self._outputs[each] is None for each in self._added):
                    raise
            request_ids, self._added = self._added, []
        with deferred_interrupt() as interrupt, ProgressBar(len(request_ids), shown=use_tqdm) as progress:
            return self._wait(request_ids, progress, interrupt)

    def _add_all(
        self,
        prompts: Sequence[Callable[[], Prompt]],
        sampling_params: Any,
        options: Sequence[RequestOptions],
        field_names: Mapping[str, str],
        interrupt: Interrupt,
    ) -> list[str]:
        self._engine.check_awake("a request")
        params = self._params_of_each(sampling_params, len(prompts))
        request_ids = [str(next(self._numbers)) for _ in prompts]
        with self._engine.turns:
            self._outputs.update(dict.fromkeys(request_ids))
        try:
            for request_id, make_prompt, one, each in zip(request_ids, prompts, params, options, strict=True):
                with self._engine.turns:
                    self._outputs[request_id] = self._add(request_id, make_prompt, one, each, field_names)
                interrupt.check()
        except BaseException:
            self._abort(request_ids)
            raise
        return request_ids

    def _wait(self, request_ids: Sequence[str], progress: ProgressBar, interrupt: Interrupt) -> list[RequestOutput]:
        before = msgspec.structs.replace(self._engine.stats)
        missing: set[str] = set()
        try:
            with self._engine.turns:
                missing.update(each for each in request_ids if self._outputs[each] is None)
                self._waits.append(missing)
            while missing:
                self._step_for(missing)
                interrupt.check()
                stats = self._engine.stats
                progress.update(
                    len(request_ids) - len(missing),
                    stats.num_prompt_tokens - before.num_prompt_tokens,
                    stats.num_generated_tokens - before.num_generated_tokens,
                )
        except BaseException:
            self._abort(request_ids)
            raise
        finally:
            with self._engine.turns:
                self._waits = [each for each in self._waits if each is not missing]
        with self._engine.turns:
            found = [self._outputs.pop(request_id) for request_id in request_ids]
        return [output for output in found if output is not None]

    def _step_for(self, missing: set[str]) -> None:
        """Run a step, unless another thread has run the last one that these requests needed."""
        with self._engine.turns:
            if not missing:
                return
            self._step()
            if missing and not self._engine.has_unfinished_requests():
                raise RequestFailed(
                    f"{len(missing)} requests finished in steps that other callers ran, to whom their outputs were "
                    "returned; call no step of the engine while wait_for_completion or a like call runs"
                )
            is_still = self._engine.core.is_still
        if is_still:  # another thread has begun a pause or a sleep, and ends it
            time.sleep(_STILL_S)

    def _step(self) -> None:
        """Run a step in this thread's turn, and keep the last outputs of all requests that end in it, also those of
        other threads."""
        ended = [output for output in self._engine.step() if output.finished and output.request_id in self._outputs]
        self._outputs.update((output.request_id, output) for output in ended)
        for missing in self._waits:
            missing.difference_update(output.request_id for output in ended)

    def _params_of_each(self, params: Any, num_prompts: int) -> list[Any]:
        if params is None:
            params = self._engine.default_sampling_params()
        is_list = isinstance(params, Iterable) and not isinstance(params, str | Mapping)
        each = one_for_each(num_prompts, "sampling_params", list(params) if is_list else params)
        for one in each:
            if isinstance(one, PoolingParams):
                return list(each)
            if not isinstance(one, SamplingParams):
                raise InvalidRequest(
                    f"sampling_params is {one!r}, expected SamplingParams or a list of them", field="sampling_params"
                )
        # no caller reads what comes before the end
        return [msgspec.structs.replace(one, output_kind=OutputKind.FINAL_ONLY) for one in each]

    def _add(
        self,
        request_id: str,
        make_prompt: Callable[[], Prompt],
        params: SamplingParams | PoolingParams,
        options: RequestOptions,
        field_names: Mapping[str, str],
    ) -> RequestOutput | None:
        """Add a request; return its final output when it is refused."""
        prompt: Prompt | None = None
        try:
            with named_by_the_caller(field_names):
                prompt = make_prompt()
                self._engine.add_request(request_id, prompt, params, **msgspec.structs.asdict(options))
        except InvalidRequest as error:
            _log.warning("request %s is refused: %s", request_id, error)
            num_outputs = params.n if isinstance(params, SamplingParams) else 0
            return RequestOutput.refused(request_id, prompt.text if prompt else None, num_outputs, error)
        return None

    def _abort(self, request_ids: Sequence[str]) -> None:
        """End requests, and forget them."""
        with self._engine.turns:
            self._engine.abort_request(request_ids)
            mine = frozenset(request_ids)
            try:
                while self._engine.has_unfinished_requests():
                    self._step()
                    if any(output is None and each not in mine for each, output in self._outputs.items()):
                        break  # the step has returned the outputs of those that are aborted
            finally:
                for request_id in request_ids:
                    del self._outputs[request_id]
