"""A model with adapters, stepped by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.config.schema import LoRAConfig
from octavo.devices.cpu.runtime import CpuRuntime
from octavo.devices.reference.attention import ReferenceBackend
from octavo.distributed.mesh import Mesh
from octavo.lora.slots import AdapterSlots
from octavo.models.loader import LoadedModel
from octavo.ops.registry import Ops
from octavo.quantization.registry import method_named
from tests.lora.adapter_folders import digest
from tests.models.paged_run import PagedRun, Stream

MOST_TOKENS = 256


class AdaptedRun:
    """The model of one rank with some adapters in slots 1, 2, …"""

    def __init__(
        self,
        base: Path,
        folders: Sequence[Path] = (),
        *,
        mesh: Mesh | None = None,
        ops: Ops | None = None,
        dtype: torch.dtype = torch.float32,
        method: str | None = None,
        experts: bool = False,
    ) -> None:
        self.mesh = mesh or Mesh.single()
        opened = LoadedModel.open(Checkpoint.open(base), self.mesh, dtype, method_named(method))
        ops = ops or CpuRuntime.open(1).bind()
        self._shape, self.dtype = opened.shape, dtype
        self.loaded = opened.load(ops, ReferenceBackend(dtype))
        self.config = self
        name = str(dtype).removeprefix("torch.")
        sizes = {"max_loras": 4, "max_cpu_loras": 4, "max_lora_rank": 16}
        lora = LoRAConfig(enable_lora=True, enable_lora_experts=experts, lora_dtype=name, **sizes)
        self.adapters = AdapterSlots(self.loaded, ops, lora, MOST_TOKENS, torch.device("cpu"))
        self.model: Any = self.adapters.around(self.loaded, lambda: self.loaded)
        self.slot_of_token: list[int] = []
        for slot, folder in enumerate(folders, start=1):
            assert not (why := self.read(folder)), why
            self.adapters.load_adapter(slot, digest(folder))

    def read(self, folder: Path) -> str:
        """Return why an adapter cannot be used."""
        while (state := self.adapters.read_adapter(str(folder), digest(folder))) is None:
            pass
        return state

    def shape(self) -> Any:
        return self._shape

    def __call__(self, batch: ModelInput) -> Tensor:
        if any(self.slot_of_token):
            batch = replace(batch, adapter_of_token=torch.tensor(self.slot_of_token, dtype=torch.int32))
        hidden: Tensor = self.model(batch)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.mesh.gather(self.model.compute_logits(hidden))[:, : self._shape.vocab_size]

    def logits(self, *steps: Sequence[tuple[str, Sequence[int], int]]) -> dict[str, Tensor]:
        """Return the logits [tokens, vocabulary] of each name. Steps have rows (name, further tokens, slot)."""
        run, streams = PagedRun(self, dtype=self.dtype), {name: Stream([]) for rows in steps for name, _, _ in rows}
        for rows in steps:
            for name, tokens, _ in rows:
                streams[name].token_ids.extend(tokens)
            self.slot_of_token = [slot for _, tokens, slot in rows for _ in tokens]
            run.step([(streams[name], len(tokens)) for name, tokens, _ in rows])
        return {name: torch.stack(stream.logits) for name, stream in streams.items()}
