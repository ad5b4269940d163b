"""The sampler on CUDA: kernels for rows with one sample, and the stages of the reference on the GPU for others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.sampling_params import SamplingParams
from octavo.core.step import TokenLogprobs
from octavo.devices.cuda.draws import Draws, Line, Lines, drawn, likeliest_tokens, line_of, lines_of, plan_of
from octavo.devices.cuda.logprobs import described, tokens_of
from octavo.devices.cuda.processing import LAUNCHED, apply
from octavo.devices.cuda.runtime import CudaRuntime, to_device
from octavo.devices.reference.sampler import Describer, ReferenceSampler
from octavo.sampling.chunks import chunks, sampled_apart
from octavo.sampling.filters import Filter, MinP, TopK, TopP
from octavo.sampling.metadata import RowSamples, SampledSequence, SamplingRow
from octavo.sampling.processors import LogitsProcessor, ProcessedRow
from octavo.sampling.refusals import refusal
from octavo.sampling.sampler import DrawnTokens, DrawPlan, LaunchedDraws

CHUNK_BYTES: Final = 40 << 20
"""Bytes of logits that are sampled at a time: 64 rows of a vocabulary of 150,000 tokens."""

_FILTERS_OF_KERNELS: Final = (MinP, TopK, TopP)


class _Batch(NamedTuple):
    """Rows of sequences. is_plain: they need no processors and no log-probabilities."""

    sequences: Sequence[SampledSequence]
    is_plain: bool
    lines: Lines


class CudaSampler(ReferenceSampler):
    """A `Sampler` that draws on the GPU; only tokens come to the host."""

    def __init__(
        self,
        runtime: CudaRuntime,
        device: torch.device,
        read_later: Callable[[Tensor], Callable[[], list[list[float]]]],
        processors: Sequence[LogitsProcessor],
        filters: Sequence[Filter],
    ) -> None:
        """read_later: begins to copy a matrix to the host, and returns a function that waits for it."""
        super().__init__(processors, filters, chunk_bytes=CHUNK_BYTES)
        self._runtime, self._device, self._read_later = runtime, device, read_later

        self._lines: WeakKeyDictionary[SampledSequence, Line] = WeakKeyDictionary()
        self._batch: _Batch | None = None
        """The batch of the last step, whose rows most steps have again."""

    def may_launch(self, params: SamplingParams) -> bool:
        is_alone = not any(each.needs(params) for each in self._processors if not isinstance(each, LAUNCHED))
        return is_alone and self._is_drawn_by_kernels(params)

    def _is_drawn_by_kernels(self, params: SamplingParams) -> bool:
        return params.is_greedy or not any(
            each.needs(params) for each in self._filters if not isinstance(each, _FILTERS_OF_KERNELS)
        )

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> list[RowSamples]:
        """Draw. The kernels that draw a row must not depend on whether another row makes the step wait for the host:
        those of `launch` draw here too, also rows that processors of the host have changed."""
        are_launched = [self._is_drawn_by_kernels(row.sequence.params) for row in rows]
        return sampled_apart(logits, rows, are_launched, lambda *some: self.launch(*some).wait(), super().sample)

    def launch(self, logits: Tensor, rows: Sequence[SamplingRow]) -> LaunchedDraws:
        owners = [place for place, row in enumerate(rows) for _ in range(row.num_samples)]
        wanting = [draw for draw, place in enumerate(owners) if rows[place].sequence.params.needs_logprobs]
        wanted = [rows[owners[draw]].sequence.params.logprobs for draw in wanting]
        of_model, by_model = logits, None
        is_changed = any(self._traits_of(row.sequence).processors for row in rows)
        if is_changed or len(owners) > len(rows):
            of_model = logits.clone() if is_changed and wanting else logits
            by_model = likeliest_tokens(logits, self._runtime.launch)
            self._change(logits, rows)
        draws = self._drawn(logits, rows, owners)
        values = [draws.told.flatten(), *([] if by_model is None else [by_model.told[:, 0]])]
        if wanting:
            largest, token_ids = (by_model or draws).largest, draws.token_ids[self._to_device(np.array(wanting))]
            at = [owners[draw] for draw in wanting]
            values.append(self._described(of_model, largest, at, token_ids, wanted).flatten())
        read = self._read_later((torch.cat(values) if len(values) > 1 else values[0]).unsqueeze(0))

        def wait() -> list[RowSamples]:
            (found,) = read()
            num_told = 2 * len(owners)
            first = num_told if by_model is None else num_told + len(rows)
            drawn = [int(each) for each in found[1:num_told:2]]
            tokens = [TokenLogprobs(token_id=token_id) for token_id in drawn]
            if wanting:
                width = (len(found) - first) // len(wanting)
                lines = [found[start : start + width] for start in range(first, len(found), width)]
                each = tokens_of(lines, [drawn[draw] for draw in wanting], wanted)
                for draw, token in zip(wanting, each, strict=True):
                    tokens[draw] = token
            largest = found[0:num_told:2]
            of_rows = largest if by_model is None else found[num_told:first]
            results, end = [], 0
            for row, of_row in zip(rows, of_rows, strict=True):
                start, end = end, end + row.num_samples
                error = refusal(row.position, row.sequence.params, of_row, largest[start])
                results.append(RowSamples([] if error else tokens[start:end], error))
            return results

        return LaunchedDraws(draws.token_ids, wait)

    def _apply(self, processor: LogitsProcessor, rows: Sequence[ProcessedRow], logits: Tensor) -> None:
        apply(processor, rows, logits, self._runtime.launch)

    def _describer(self, logits: Tensor) -> Describer:
        kept = logits.clone()
        largest = kept.amax(dim=-1)

        def describe(
            owners: Sequence[int], token_ids: Sequence[int], wanted: Sequence[int | None]
        ) -> list[TokenLogprobs]:
            lines = self._described(kept, largest, owners, self._to_device(np.array(token_ids)), wanted)
            return [*tokens_of(lines.tolist(), token_ids, wanted)]

        return describe

    def _described(
        self, logits: Tensor, largest: Tensor, owners: Sequence[int], token_ids: Tensor, wanted: Sequence[int | None]
    ) -> Tensor:
        """Return the result of `described` for tokens in rows `owners`."""
        num_top, made = min(max(each or 0 for each in wanted), logits.shape[1]), []
        # as many at a time as there are rows: so much is planned for
        for part in (slice(*each) for each in chunks(len(owners), len(logits))):
            at = self._to_device(np.array(owners[part]))
            made.append(described(logits, largest, at, token_ids[part], num_top, self._runtime.launch))
        return made[0] if len(made) == 1 else torch.cat(made)

    def plan(self, sequences: Sequence[SampledSequence], positions: Sequence[int]) -> DrawPlan | None:
        batch = self._batch_of(sequences)
        return plan_of(batch.lines, positions) if batch.is_plain else None

    def draw(self, logits: Tensor, kind: int, asked: Tensor) -> tuple[Tensor, Tensor]:
        draws = drawn(logits, kind, asked, self._runtime.launch)
        return draws.token_ids, draws.told

    def read(
        self, told: Tensor, sequences: Sequence[SampledSequence], positions: Sequence[int]
    ) -> Callable[[], DrawnTokens]:
        read = self._read_later(told)

        def wait() -> DrawnTokens:
            found = read()
            errors = {
                place: error
                for place, (largest, _) in enumerate(found)
                if (error := refusal(positions[place], sequences[place].params, largest, largest)) is not None
            }
            return DrawnTokens([int(token_id) for _, token_id in found], errors)

        return wait

    def _batch_of(self, sequences: Sequence[SampledSequence]) -> _Batch:
        if self._batch is None or self._batch.sequences != sequences:
            traits = [self._traits_of(each) for each in sequences]
            is_plain = not any(each.is_described or each.processors for each in traits)
            self._batch = _Batch(sequences, is_plain, lines_of([self._line_of(each) for each in sequences]))
        return self._batch

    def _line_of(self, sequence: SampledSequence) -> Line:
        return self._lines.get(sequence) or self._lines.setdefault(sequence, line_of(sequence))

    def _drawn(self, logits: Tensor, rows: Sequence[SamplingRow], owners: Sequence[int]) -> Draws:
        """Draw a token for each of `owners`, the rows of the draws, without waiting for the device."""
        if len(owners) == len(rows):
            plan = plan_of(self._batch_of([row.sequence for row in rows]).lines, [row.position for row in rows])
            return drawn(logits, plan.kind, self._to_device(plan.asked), self._runtime.launch)
        lines = [line for row in rows for line in self._lines_of(row)]
        made = []
        # as many draws at a time as there are rows: what memory holds for the rows, it holds for these
        for part in (slice(*each) for each in chunks(len(owners), len(rows))):
            plan = plan_of(lines_of(lines[part]), [rows[place].position for place in owners[part]])
            own = logits[self._to_device(np.array(owners[part]))]
            made.append(drawn(own, plan.kind, self._to_device(plan.asked), self._runtime.launch))
        return Draws(*map(torch.cat, zip(*made, strict=True)))

    def _lines_of(self, row: SamplingRow) -> Sequence[Line]:
        """Return the parameters of a row's draws."""
        line = self._line_of(row.sequence)
        if row.num_samples == 1 or line.draw is None:
            return [line] * row.num_samples
        return [line._replace(draw=(line.draw[0], child)) for child in range(row.num_samples)]

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return to_device(array, self._device)


def read_later(values: Tensor) -> Callable[[], list[list[float]]]:
    """Begin to copy a matrix of a GPU to the host, and return what waits for it."""
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def read() -> list[list[float]]:
        copied.synchronize()
        found: list[list[float]] = host.tolist()
        return found

    return read
