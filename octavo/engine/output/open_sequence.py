"""One sequence of an open request: its tokens as text and log-probabilities by token, and what is new of it."""

from __future__ import annotations

from collections.abc import Collection

from octavo.core.logprob_list import LogprobList, entries_of
from octavo.core.messages import EngineCoreRequest, SequenceDelta
from octavo.core.outputs import FIRST_WEIGHT_VERSION, CompletionOutput, Logprob, WeightVersionSpan
from octavo.core.resume import ResumedSequence
from octavo.core.step import TokenLogprobs
from octavo.engine.text.detokenizer import SequenceText
from octavo.engine.text.tokenizer import Tokenizer
from octavo.errors import InvalidRequest


class OpenSequence:
    """The text, tokens and log-probabilities of a sequence, and how much of them its caller has read."""

    def __init__(self, index: int, request: EngineCoreRequest, tokenizer: Tokenizer) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self._stop_reason: int | str | None = None
        self._tokenizer = tokenizer
        self._text = SequenceText(tokenizer, request.prompt_token_ids, request.params)
        self._cumulative_logprob: float | None = None
        self._logprobs = LogprobList(tokenizer.token_text) if request.params.logprobs is not None else None
        self._num_dropped_logprobs = 0
        self._text_offsets: list[int] | None = None if self._logprobs is None else []
        self._first = (0, 0)  # tokens and characters that others have delivered: outputs begin behind them
        self._sent = (0, 0, False)  # tokens, characters, and whether it had ended
        self._versions: list[tuple[str, int]] = []  # labels of weights, and the first token that each drew

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def take(self, delta: SequenceDelta, weight_version: str | None = None) -> None:
        """Add tokens up to the one that ends the sequence; later ones are dropped."""
        if weight_version is not None and delta.token_ids and not self.finished:
            self._note_version(weight_version)
        last = len(delta.token_ids) - 1
        for number, token_id in enumerate(delta.token_ids):
            if self.finished:
                return
            self.token_ids.append(token_id)
            if number < len(delta.logprobs):
                self._take_logprobs(delta.logprobs[number])
            if self._text_offsets is not None:
                self._text_offsets.append(self._text.next_offset())
            if self._text.push(token_id, is_end=number == last and delta.finish_reason == "stop"):
                self._finish("stop", self._text.stop_string)
        if not self.finished and delta.finish_reason is not None:
            self.end(delta.finish_reason, delta.stop_reason)

    def resume(self, resumed: ResumedSequence, end_token_ids: Collection[int]) -> None:
        """Begin behind tokens that another front has delivered. Raises InvalidRequest where it would have ended."""
        last = len(resumed.token_ids) - 1
        for number, token_id in enumerate(resumed.token_ids):
            is_stopped = self._text.push(token_id, is_end=number == last and token_id in end_token_ids)
            if is_stopped and (resumed.finish_reason is None or number < last):
                raise InvalidRequest(
                    f"resumed[{self.index}] has the stop string {self._text.stop_string!r} and goes on; cut it there",
                    field="resumed",
                    code="cannot_be_resumed",
                )
        self.token_ids += resumed.token_ids
        self._cumulative_logprob = resumed.cumulative_logprob
        if self._logprobs is not None and self._text_offsets is not None:
            self._num_dropped_logprobs = last + 1
            self._text_offsets += [0] * (last + 1)
        if resumed.finish_reason is not None:
            self._finish(resumed.finish_reason, resumed.stop_reason)
        self._first = (last + 1, self._num_visible_chars())
        self._sent = (*self._first, self.finished)

    def resumed(self) -> ResumedSequence:
        """Return what has been produced."""
        return ResumedSequence(
            index=self.index,
            token_ids=list(self.token_ids),
            cumulative_logprob=self._cumulative_logprob,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )

    def end(self, finish_reason: str, stop_reason: int | None = None) -> None:
        """End the sequence unless it has ended; what its text held back may still complete a stop string."""
        if self.finished:
            return
        if self._text.finish():
            self._finish("stop", self._text.stop_string)
        else:
            self._finish(finish_reason, stop_reason)

    def whole(self) -> CompletionOutput:
        """Return everything so far."""
        return self._completion(*self._first, self._num_visible_chars())

    def delta(self) -> CompletionOutput | None:
        """Return what is new since the last call, None when nothing is."""
        first_token, first_char, _ = sent = self._sent
        self._sent = (len(self.token_ids), self._num_visible_chars(), self.finished)
        if self._sent == sent:
            return None
        completion = self._completion(first_token, first_char, self._sent[1])
        if self._logprobs is not None:
            # they are not read again, and take far more memory than their tokens
            completion.logprobs = [*(completion.logprobs or ())]
            self._logprobs, self._num_dropped_logprobs = LogprobList(self._tokenizer.token_text), len(self.token_ids)
        return completion

    def _completion(self, first_token: int, first_char: int, num_chars: int) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=self._text.text[first_char:num_chars],
            token_ids=self.token_ids[first_token:],
            cumulative_logprob=self._cumulative_logprob,
            logprobs=None if self._logprobs is None else self._logprobs[first_token - self._num_dropped_logprobs :],
            text_offsets=None if self._text_offsets is None else self._text_offsets[first_token:],
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            weight_versions=self._weight_versions() if self._versions and self.finished else None,
        )

    def _note_version(self, label: str) -> None:
        start = len(self.token_ids) - self._first[0]
        if not self._versions and start:  # tokens from before the first label
            self._versions.append((FIRST_WEIGHT_VERSION, 0))
        if not self._versions or self._versions[-1][0] != label:
            self._versions.append((label, start))

    def _weight_versions(self) -> list[WeightVersionSpan]:
        ends = [start for _, start in self._versions[1:]] + [len(self.token_ids) - self._first[0]]
        return [WeightVersionSpan(*began, end) for began, end in zip(self._versions, ends, strict=False)]

    def _num_visible_chars(self) -> int:
        return len(self._text.text) if self.finished else self._text.num_visible_chars()

    def _finish(self, finish_reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason, self._stop_reason = finish_reason, stop_reason

    def _take_logprobs(self, token: TokenLogprobs) -> None:
        if token.logprob is not None:
            self._cumulative_logprob = (self._cumulative_logprob or 0.0) + token.logprob
        if self._logprobs is not None:
            self._logprobs.append(token)


def logprobs_by_token(token: TokenLogprobs, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """Return the token at a position first, then the likeliest ones in falling order, or those that are asked for."""
    return {
        token_id: Logprob(logprob, rank, tokenizer.token_text(token_id))
        for token_id, logprob, rank in entries_of(token)
    }
