"""An open request as its caller sees it: outputs of what the core produced, read at the caller's own pace."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from octavo.core.messages import EngineCoreOutput, EngineCoreRequest, StopSequence
from octavo.core.outputs import CompletionOutput, Logprob, RequestError, RequestMetrics, RequestOutput
from octavo.core.sampling_params import OutputKind
from octavo.core.step import PromptLogprobs
from octavo.engine.output.open_sequence import OpenSequence, logprobs_by_token
from octavo.engine.text.tokenizer import Tokenizer


class OpenRequest:
    """What one request has produced, and how much of it its caller has read. `on_change` is called after changes.

    finished: whether it produces nothing more.
    """

    def __init__(
        self, request: EngineCoreRequest, prompt: str | None, tokenizer: Tokenizer, stream_interval: int = 1
    ) -> None:
        params = request.params
        self._tokens_between_outputs = stream_interval * params.width if stream_interval > 1 else 0
        self._num_sent_tokens = 0
        self.request_id = request.request_id
        self.prompt_token_ids = request.prompt_token_ids
        self.metrics = request.metrics or RequestMetrics.begin(request.arrival_time)
        self._request = request
        self.on_change: Callable[[], object] | None = None
        self._error: RequestError | None = None
        self._last_token_time: float | None = None
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._kind = params.output_kind
        self._num_cached_tokens = request.num_cached_tokens
        self._num_fetched_tokens = 0
        self._cache_miss_reason: str | None = None
        self._pooled: bytes | None = None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None and not request.resumed:
            self._prompt_logprobs = [None] * len(request.prompt_token_ids)
        # the core sends n beams when the search has ended; of best_of sequences the front chooses n then
        self._num_returned = params.n
        self._is_search = params.use_beam_search
        num_sequences = params.n if params.use_beam_search else params.width
        self._sequences = [OpenSequence(index, request, tokenizer) for index in range(num_sequences)]
        for each in request.resumed:
            self._sequences[each.index].resume(each, {*request.end_token_ids, *params.stop_token_ids})
        self.finished = all(sequence.finished for sequence in self._sequences)
        self._is_changed = False

    @property
    def num_generated_tokens(self) -> list[int]:
        """Return the number of generated tokens of each sequence."""
        return [len(sequence.token_ids) for sequence in self._sequences]

    @property
    def finish_reasons(self) -> list[str]:
        """Return the reason of each sequence; "error" for one that the engine's death ended."""
        return [sequence.finish_reason or "error" for sequence in self._sequences]

    @property
    def refused(self) -> RequestError | None:
        """Return why the core refused the request; None when it accepted it, or died before it could."""
        error = self._error
        if error is None or self.metrics.first_scheduled_time is not None:
            return None
        return error if error.is_client_error or error.retry_after_s is not None else None

    @property
    def how_ended(self) -> str:
        """Return the last event of the timeline."""
        if self._error is not None or not self.finished:
            return "failed" if self.refused is None else "refused"
        return "aborted" if "abort" in self.finish_reasons else "finished"

    def take(self, output: EngineCoreOutput) -> list[StopSequence]:
        """Add what a step brought; return the sequences that met a stop string before the core had ended them."""
        if output.metrics is not None:
            self.metrics = output.metrics.copy()  # in one process it is the scheduler's own
        num_found = output.num_cached_tokens + output.num_fetched_tokens
        if num_found > self._num_cached_tokens + self._num_fetched_tokens:  # both are of one core
            self._num_cached_tokens = output.num_cached_tokens
            self._num_fetched_tokens = output.num_fetched_tokens
        self._cache_miss_reason = output.cache_miss_reason or self._cache_miss_reason
        if output.prompt_logprobs is not None:
            self._take_prompt_logprobs(output.prompt_logprobs)
        self._pooled = output.pooled
        stops: list[StopSequence] = []
        for delta in output.deltas:
            sequence = self._sequences[delta.index]
            was_finished = sequence.finished
            sequence.take(delta, output.weight_version)
            if sequence.finished and not was_finished and delta.finish_reason is None and not output.finished:
                stops.append(StopSequence(self.request_id, delta.index))
        if output.error is not None:
            self._error = output.error
            self.end("error")
        elif output.finished:
            if self._is_search and output.deltas:
                # all beams come at once, and may be fewer than n
                self._sequences = [sequence for sequence in self._sequences if sequence.finished]
            self.end("abort")
        else:
            self._mark()
        return stops

    def to_resume(self, now: float) -> EngineCoreRequest:
        """Return the request with what it has produced, for another core. A beam search starts again: nothing of it
        comes before its end."""
        sequences = (sequence.resumed() for sequence in self._sequences)
        return self._request.continued(sequences, self.metrics, self._num_cached_tokens, now)

    def note_tokens(self, now: float) -> float | None:
        """Note when tokens came; return when those before them did. The core's own times replace these at the end."""
        last, self._last_token_time = self._last_token_time, now
        if self.metrics.finished_time is None:
            first = self.metrics.first_token_time
            self.metrics.first_token_time = now if first is None else first
            self.metrics.last_token_time = now
        return last

    def end(self, finish_reason: str) -> None:
        """End the sequences that have not ended."""
        for sequence in self._sequences:
            sequence.end(finish_reason)
        self._mark()

    def _mark(self) -> None:
        self._is_changed = True
        # a list, which is quicker than a generator: this is done for every token
        self.finished = self._error is not None or None not in [each.finish_reason for each in self._sequences]

    def notify(self) -> None:
        """Call `on_change` where its reader is to look, after `take` or `end`."""
        if self.on_change is not None and (self.finished or (self._is_streamed and not self._is_held_back())):
            self.on_change()

    def _is_held_back(self) -> bool:
        """Return whether the next output of the stream is to have more tokens; the first one is not held back."""
        if not self._tokens_between_outputs:
            return False
        num_tokens = sum(self.num_generated_tokens)
        if self._num_sent_tokens and num_tokens - self._num_sent_tokens < self._tokens_between_outputs:
            return True
        self._num_sent_tokens = num_tokens
        return False

    @property
    def _is_streamed(self) -> bool:
        return self._kind is not OutputKind.FINAL_ONLY and self._num_returned >= len(self._sequences)

    def output(self) -> RequestOutput | None:
        """Return what is new for the caller since the last call, None when nothing is."""
        finished = self.finished
        if not self._is_changed or not (finished or self._is_streamed):
            return None
        self._is_changed = False
        if self._num_returned < len(self._sequences):
            return self._output(self._best(), finished=True)
        if self._kind is OutputKind.DELTA:
            deltas = [delta for sequence in self._sequences if (delta := sequence.delta()) is not None]
            return self._output(deltas, finished=finished) if deltas or finished else None
        if not finished and not any(sequence.token_ids for sequence in self._sequences):
            return None
        return self._output([sequence.whole() for sequence in self._sequences], finished=finished)

    def _best(self) -> list[CompletionOutput]:
        """Return the likeliest sequences, best first; of equal ones the earlier first."""
        ranked = sorted(
            (sequence.whole() for sequence in self._sequences),
            key=lambda each: -math.inf if each.cumulative_logprob is None else each.cumulative_logprob,
            reverse=True,
        )
        return [msgspec.structs.replace(each, index=index) for index, each in enumerate(ranked[: self._num_returned])]

    def _output(self, outputs: list[CompletionOutput], *, finished: bool) -> RequestOutput:
        prompt_logprobs = self._prompt_logprobs
        if self._kind is OutputKind.DELTA:
            self._prompt_logprobs = None  # returned once, when they are complete
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
            num_fetched_tokens=self._num_fetched_tokens,
            cache_miss_reason=self._cache_miss_reason,
            num_generated_tokens=sum(self.num_generated_tokens),
            metrics=self.metrics,
            error=self._error,
            pooled=self._pooled,
        )

    def _take_prompt_logprobs(self, logprobs: PromptLogprobs) -> None:
        if self._prompt_logprobs is None:
            return
        for position, token in enumerate(logprobs.tokens, start=logprobs.first_position):
            self._prompt_logprobs[position] = logprobs_by_token(token, self._tokenizer)
