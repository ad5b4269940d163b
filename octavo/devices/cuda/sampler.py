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
from octavo.devices.cuda.filtering import BLOCK
from octavo.devices.cuda.logprobs import described, num_listed, tokens_of
from octavo.devices.cuda.processing import LAUNCHED, apply
from octavo.devices.cuda.runtime import CudaRuntime
from octavo.devices.reference.sampler import Describer, ReferenceSampler
from octavo.sampling.chunks import chunks
from octavo.sampling.filters import Filter, MinP, TopK, TopP
from octavo.sampling.metadata import RowSamples, SampledSequence, SamplingRow
from octavo.sampling.processors import LogitsProcessor, ProcessedRow
from octavo.sampling.refusals import refusal
from octavo.sampling.sampler import DrawnTokens, DrawPlan, LaunchedDraws
from octavo.sampling.top_tokens import TopTokens

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
        launched: list[int] = []
        waiting: list[int] = []
        for place, row in enumerate(rows):
            is_launched = row.num_samples == 1 and self._is_drawn_by_kernels(row.sequence.params)
            (launched if is_launched else waiting).append(place)
        if not launched:
            return super().sample(logits, rows)
        if not waiting:
            return self.launch(logits, rows).wait()
        draws = self.launch(logits[launched], [rows[place] for place in launched])
        results = dict(zip(waiting, super().sample(logits[waiting], [rows[place] for place in waiting]), strict=True))
        results |= zip(launched, draws.wait(), strict=True)
        return [results[place] for place in range(len(rows))]

    def launch(self, logits: Tensor, rows: Sequence[SamplingRow]) -> LaunchedDraws:
        places = [place for place, row in enumerate(rows) if row.sequence.params.needs_logprobs]
        wanted = [rows[place].sequence.params.logprobs for place in places]
        is_changed = any(self._traits_of(row.sequence).processors for row in rows)
        of_model, by_model = logits, None
        if is_changed:
            of_model = logits.clone() if places else logits
            by_model = likeliest_tokens(logits, self._runtime.launch)
            self._change(logits, rows)
        draws = self._drawn(logits, rows)
        values = [draws.told.flatten(), *([] if by_model is None else [by_model.told[:, 0]])]
        if places:
            at, num_top = self._sent(np.array(places)), num_listed(wanted, logits.shape[1])
            largest, token_ids = (by_model or draws).largest, draws.token_ids[at]
            values.append(described(of_model, largest, at, token_ids, num_top, self._runtime.launch).flatten())
        read = self._read_later((torch.cat(values) if len(values) > 1 else values[0]).unsqueeze(0))

        def wait() -> list[RowSamples]:
            (found,) = read()
            num_told, first = 2 * len(rows), (3 if is_changed else 2) * len(rows)
            drawn = [int(each) for each in found[1:num_told:2]]
            tokens = [TokenLogprobs(token_id=token_id) for token_id in drawn]
            if places:
                width = (len(found) - first) // len(places)
                lines = [found[start : start + width] for start in range(first, len(found), width)]
                for place, token in zip(places, tokens_of(lines, [drawn[at] for at in places], wanted), strict=True):
                    tokens[place] = token
            results = []
            tops = found[0:num_told:2]
            of_models = found[num_told:first] if is_changed else tops
            for row, token, *largest_two in zip(rows, tokens, of_models, tops, strict=True):
                error = refusal(row.position, row.sequence.params, *largest_two)
                results.append(RowSamples([] if error else [token], error))
            return results

        return LaunchedDraws(draws.token_ids, wait)

    def _apply(self, processor: LogitsProcessor, rows: Sequence[ProcessedRow], logits: Tensor) -> None:
        apply(processor, rows, logits, self._sent, self._runtime.launch)

    def _describer(self, logits: Tensor) -> Describer:
        kept = logits.clone()
        largest = kept.amax(dim=-1)

        def describe(
            owners: Sequence[int], token_ids: Sequence[int], wanted: Sequence[int | None]
        ) -> list[TokenLogprobs]:
            found: list[TokenLogprobs] = []
            # as many at a time as there are rows: so much is planned for
            for part in (slice(*each) for each in chunks(len(owners), len(kept))):
                at, chosen = self._sent(np.array(owners[part])), self._sent(np.array(token_ids[part]))
                num_top = num_listed(wanted[part], kept.shape[1])
                lines = described(kept, largest, at, chosen, num_top, self._runtime.launch).tolist()
                found += tokens_of(lines, token_ids[part], wanted[part])
            return found

        return describe

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
            self._batch = _Batch(sequences, is_plain, lines_of(sequences, [self._line_of(each) for each in sequences]))
        return self._batch

    def _line_of(self, sequence: SampledSequence) -> Line:
        line = self._lines.get(sequence)
        if line is None:
            line = self._lines[sequence] = line_of(sequence.params)
        return line

    def _drawn(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Draws:
        """Draw a token for each row without waiting for the device."""
        plan = plan_of(self._batch_of([row.sequence for row in rows]).lines, [row.position for row in rows])
        return drawn(logits, plan.kind, self._sent(plan.asked), self._runtime.launch)

    def _sent(self, array: NDArray[Any]) -> Tensor:
        """Return an array on the device, without waiting for what runs there. The array may be changed afterwards."""
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def _race(
        self, probabilities: Tensor, owners: NDArray[np.int64], keys: NDArray[np.uint32], *, sparse: bool
    ) -> NDArray[np.int64]:
        return self._winners(probabilities, None, owners, keys).cpu().numpy()

    def _race_among(self, top: TopTokens, owners: NDArray[np.int64], keys: NDArray[np.uint32]) -> NDArray[np.int64]:
        token_ids = top.token_ids.contiguous()
        columns = self._winners(top.weights.contiguous(), token_ids, owners, keys)
        rows = torch.from_numpy(owners).to(columns.device)
        return token_ids[rows, columns].cpu().numpy()

    def _winners(
        self, weights: Tensor, ids: Tensor | None, owners: NDArray[np.int64], keys: NDArray[np.uint32]
    ) -> Tensor:
        """Return the column that wins each draw, int64 [draws]."""
        device, num_columns = self._device, weights.shape[1]
        num_blocks = -(-num_columns // BLOCK)
        scores = torch.empty((len(keys), num_blocks), dtype=torch.float64, device=device)
        places = torch.empty((len(keys), num_blocks), dtype=torch.int32, device=device)
        self._runtime.launch(
            "sampling.race",
            (len(keys), num_blocks),
            weights,
            weights if ids is None else ids,
            self._sent(keys.view(np.int32)),
            self._sent(owners.astype(np.int32)),
            *(scores, places, num_columns, weights.stride(0)),
            BLOCK=BLOCK,
            HAS_IDS=ids is not None,
        )
        best = scores.amax(dim=1, keepdim=True)
        # NaN is no best score, and the row gets an error: until then its token must be one of the vocabulary
        return places.where(scores == best, num_columns).amin(dim=1).clamp_(max=num_columns - 1).long()


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
