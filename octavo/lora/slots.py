"""The adapters of a worker: those in memory, the slots that steps use, and the model that adds them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.config.schema import LoRAConfig
from octavo.devices.device import DrawingModel, LanguageModel
from octavo.errors import CheckpointError
from octavo.lora.adapter import AdapterReader, Target, held_type, layers_of
from octavo.lora.experts import AdaptedStack, ExpertTarget, expert_targets, slots_of
from octavo.lora.step_slots import StepSlots
from octavo.models.decoder import DecoderStack
from octavo.models.loader import DTYPES
from octavo.ops.lora import PackedFactors, SlotLinear
from octavo.ops.prepare_linear import PreparedLinear
from octavo.ops.registry import Ops


class AdaptedLinear(PreparedLinear):
    """A product; the addend of a row's adapter is added to its result."""

    def __init__(self, base: PreparedLinear, slots: SlotLinear, step: StepSlots) -> None:
        super().__init__(base.shape, {})
        self.base, self._slots, self._step = base, slots, step

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        of_row = self._step.of_row
        if of_row is None:
            return self.base(x, add)
        assert add is None, "a product has one addend"
        return self.base(x, self._slots(x, of_row, self._step.room_for(len(of_row))))

    def rows(self, ids: Tensor) -> Tensor:
        return self.base.rows(ids)

    def state(self) -> dict[str, Tensor]:
        return self.base.state()


class AdaptedModel:
    """A `DrawingModel` whose steps with adapters are run and recorded apart, so that steps without adapters cost no
    more."""

    def __init__(self, model: LanguageModel, recorded: Callable[[], LanguageModel], step: StepSlots) -> None:
        """recorded: returns `model` with nothing recorded yet."""
        self._model, self._make, self._step = model, recorded, step
        self._plain, self._adapted = recorded(), recorded()
        self.compute_logits = model.compute_logits

    def __call__(self, batch: ModelInput) -> Any:
        """Return what the model returns."""
        if batch.adapter_of_token is not None and (batch.encoded or batch.seeing is not None):
            batch = replace(batch, with_adapters=self._step.with_adapters)
        with self._slots_of(batch):
            return self._model_of(batch)(batch)

    def padded(self, num_rows: int) -> int:
        return self._plain.padded(num_rows) if isinstance(self._plain, DrawingModel) else num_rows

    def draw(
        self, batch: ModelInput, asked: NDArray[np.float64], key: Hashable, draw: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor | None:
        model = self._model_of(batch)
        with self._slots_of(batch):
            return model.draw(batch, asked, key, draw) if isinstance(model, DrawingModel) else None

    def _model_of(self, batch: ModelInput) -> LanguageModel:
        return self._plain if batch.adapter_of_token is None else self._adapted

    @contextmanager
    def _slots_of(self, batch: ModelInput) -> Iterator[None]:
        if batch.adapter_of_token is not None:
            self._step.set(batch.adapter_of_token)
        try:
            yield
        finally:
            self._step.of_row = None

    def forget(self, *, records: bool) -> None:
        """Drop the recordings of steps with adapters: layers have others now. records: make new ones."""
        self._adapted = self._make() if records else self._model


class AdapterSlots:
    """Adapters by their digests, and slots from 1 on. Files are read by a thread; the rest is for the worker's."""

    def __init__(
        self, model: DecoderStack, ops: Ops, config: LoRAConfig, num_tokens: int, device: torch.device
    ) -> None:
        """num_tokens: most of a step. device: where the model is."""
        dtype = DTYPES[config.lora_dtype]
        targets = list(layers_of(model, config.max_loras, dtype))
        self._layers = {each.path: each.layer for each in targets}
        self._slots: dict[str, SlotLinear] = {each.path: ops.slot_linear(each.shape) for each in targets}
        self._experts = _experts(model, config)
        for each in self._experts:
            self._slots |= slots_of(each, ops)
        self._wrapped: set[str] = set()
        self._reader = AdapterReader(model, targets, self._experts, dtype, config.max_lora_rank)
        self._step = StepSlots(num_tokens, _widest(targets), device)
        self._adapters: dict[str, Future[dict[str, PackedFactors] | str]] = {}
        self._adapted: Callable[[], AdaptedModel | None] = lambda: None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="octavo-adapters")

    def around(self, model: LanguageModel, recorded: Callable[[], LanguageModel]) -> LanguageModel:
        """Return the model whose steps use the slots."""
        adapted = AdaptedModel(model, recorded, self._step)
        self._adapted = ref(adapted)  # its recordings end with the runner that has it
        return adapted

    def read_adapter(self, folder: str, digest: str) -> str | None:
        """Have an adapter in memory. Returns an empty string when it is there, None while its files are read, and else
        why it cannot be used, until it is dropped."""
        if digest not in self._adapters:
            self._adapters[digest] = self._thread.submit(self._read, Path(folder), digest)
        future = self._adapters[digest]
        if not future.done():
            return None
        found = future.result()
        return found if isinstance(found, str) else ""

    def _read(self, folder: Path, digest: str) -> dict[str, PackedFactors] | str:
        """Return an adapter, or why it cannot be used: an exception that is kept keeps all that has been read."""
        try:
            return self._reader.read(folder, digest, self._slots)
        except CheckpointError as error:
            return str(error)
        except OSError as error:
            return f"{folder}: cannot be read ({error}); mend that, and send the request again"

    def check_adapter(self, folder: Path) -> None:
        """Read an adapter, and forget it. Raises CheckpointError where it cannot be used."""
        try:
            self._reader.read(folder, None, self._slots)
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be read ({error})") from error

    def drop_adapter(self, digest: str) -> None:
        """Forget an adapter that is in no used slot."""
        self._adapters.pop(digest, None)

    def load_adapter(self, slot: int, digest: str) -> None:
        """Copy an adapter that is in memory into a slot."""
        packed = self._adapters[digest].result()
        assert not isinstance(packed, str), "only what can be used is loaded"
        for path, slots in self._slots.items():
            slots.set(slot, packed.get(path))
        bare = [each for each in packed if each in self._layers and each not in self._wrapped]
        for path in bare:
            self._layers[path].prepared = AdaptedLinear(self._layers[path].prepared, self._slots[path], self._step)
        for each in self._experts:
            if each.parameter not in self._wrapped and packed.keys() & set(each.keys):
                bare.append(each.parameter)
                self._wrap(each)
        self._wrapped.update(bare)
        has_moved = bool(bare) or not all(slots.stays for slots in self._slots.values())
        if has_moved and (adapted := self._adapted()) is not None:
            # which experts have rows with adapters differs from step to step
            adapted.forget(records=not any(each.parameter in self._wrapped for each in self._experts))

    def _wrap(self, target: ExpertTarget) -> None:
        slots, linears = [self._slots[key] for key in target.keys], target.layer.linears(target.number)
        target.layer.wrap(target.number, lambda base: AdaptedStack(base, linears, slots, self._step))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)


def planned_bytes(model: DecoderStack, config: LoRAConfig, num_tokens: int) -> int:
    """Return the bytes of as many adapters as are kept, of the largest rank, and of the addends of a step of
    `num_tokens`; before the model is loaded."""
    layers = list(layers_of(model, config.max_loras, DTYPES[config.lora_dtype]))
    targets: list[Target | ExpertTarget] = [*layers, *_experts(model, config)]
    each = sum(target.num_elements(config.max_lora_rank) * target.shape.dtype.itemsize for target in targets)
    return config.num_host_adapters * each + 4 * num_tokens * _widest(layers)


def _experts(model: DecoderStack, config: LoRAConfig) -> list[ExpertTarget]:
    if not config.enable_lora_experts:
        return []
    return list(expert_targets(model, config.max_loras, held_type(DTYPES[config.lora_dtype])))


def _widest(layers: Iterable[Target]) -> int:
    return max((each.shape.outputs for each in layers), default=0)
