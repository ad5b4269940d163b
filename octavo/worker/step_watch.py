"""Measures the parts of a step on the device. Used only while step times are requested."""

from __future__ import annotations

import time

from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.core.step_times import BATCH_BUILDING, HEAD, MODEL_FORWARD, SAMPLING, KernelClock, PartTime
from octavo.devices.device import LanguageModel


class StepWatch:
    """Attributes each moment of a step to one part. Without a clock for kernels their time counts as 0."""

    def __init__(self, kernel_clock: KernelClock | None) -> None:
        self._clock = kernel_clock
        self._switch(is_on=True)
        self._parts: dict[str, PartTime] = {}
        self._part = BATCH_BUILDING
        self._began_ns = self._kernels_ns = 0

    def begin(self) -> None:
        """Begin a step with the building of its batch."""
        self._parts, self._part = {}, BATCH_BUILDING
        self._began_ns, self._kernels_ns = self._now()

    def enter(self, part: str) -> None:
        """Count the time from now on for `part`."""
        now_ns, kernels_ns = self._now()
        time_of_part = self._parts.setdefault(self._part, PartTime())
        time_of_part.total_ns += now_ns - self._began_ns
        time_of_part.kernels_ns += kernels_ns - self._kernels_ns
        self._part, self._began_ns, self._kernels_ns = part, now_ns, kernels_ns

    def end(self) -> dict[str, PartTime]:
        """Return the times of the step since `begin`."""
        self.enter("")
        return self._parts

    def close(self) -> None:
        """Switch the clock of the kernels off: while it is on, each kernel reads the time."""
        self._switch(is_on=False)

    def _switch(self, *, is_on: bool) -> None:
        if self._clock is not None:
            self._clock.is_clock_on = is_on

    def _now(self) -> tuple[int, int]:
        return time.perf_counter_ns(), 0 if self._clock is None else self._clock.kernel_nanoseconds


class TimedModel:
    """A model whose calls are timed as parts of their own. Time after them in a step counts as sampling."""

    def __init__(self, model: LanguageModel, watch: StepWatch) -> None:
        self.model = model
        self._watch = watch

    def __call__(self, batch: ModelInput) -> Tensor:
        self._watch.enter(MODEL_FORWARD)
        hidden = self.model(batch)
        self._watch.enter(SAMPLING)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits, float32 [rows, vocab]."""
        self._watch.enter(HEAD)
        logits = self.model.compute_logits(hidden)
        self._watch.enter(SAMPLING)
        return logits
