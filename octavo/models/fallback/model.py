"""A model of transformers as octavo runs one: its own Python between octavo's layers, one packed row of tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from octavo.attention.backend import AttentionBackend
from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.core.model_shape import KeysAndValues, LayerCache
from octavo.distributed.mesh import Mesh
from octavo.errors import ConfigError, UnsupportedModel
from octavo.layers.experts import StoredExperts
from octavo.layers.heads import Heads
from octavo.layers.layer import Layer
from octavo.models.config import DecoderConfig
from octavo.models.decoder import DecoderStack
from octavo.models.fallback.attention import Call, Unfit
from octavo.models.fallback.library import Library, open_library, renamings
from octavo.models.fallback.mixtures import stored_like
from octavo.models.fallback.recording import Recording, inputs, record, without_data
from octavo.models.fallback.swap import swap
from octavo.models.sparse import read_stored
from octavo.ops.registry import Ops


@dataclass(frozen=True, kw_only=True)
class FallbackConfig(DecoderConfig):
    """The findings of a recorded forward pass of transformers' class."""

    library: Library
    where: str = field(compare=False)
    stored: StoredExperts
    """How the checkpoint holds experts, where there are any."""
    calls: tuple[Call, ...]
    """The recorded call of each layer's attention."""

    @classmethod
    def of(cls, c: Checkpoint) -> Self:
        """Read the config of `c`. Raises CheckpointError or UnsupportedModel."""
        library = open_library(c)
        config, recording = library.config, record(library, c.origin())
        calls = list(recording.calls.values())
        first = calls[0]
        return cls(
            num_layers=len(calls),
            hidden_size=config.hidden_size,
            intermediate_size=0,
            heads=Heads(first.heads, first.kv_heads, first.cache_dim),
            vocab_size=config.vocab_size,
            max_positions=c.max_model_len(),
            norm_eps=0.0,
            tied=False,
            stored=read_stored(c, stored_like(recording.causal)),
            calls=tuple(calls),
            library=library,
            where=c.origin(),
        )

    def caches_of(self, layer: int, mesh: Mesh) -> Sequence[LayerCache]:
        call = self.calls[layer]
        return (LayerCache(KeysAndValues(call.kv_heads, call.cache_dim), call.window),)


class FallbackModel(DecoderStack):
    """One rank has all of it."""

    PREFIXES = ()
    config: FallbackConfig

    @classmethod
    def read(cls, c: Checkpoint) -> FallbackConfig:
        return FallbackConfig.of(c)

    def __init__(self, c: FallbackConfig, mesh: Mesh) -> None:
        """Raises ConfigError for several ranks, and UnsupportedModel."""
        nn.Module.__init__(self)
        if mesh.size > 1:
            option = "tensor_parallel_size" if mesh.tensor.size > 1 else "pipeline_parallel_size"
            raise ConfigError(
                f"{option} is {max(mesh.tensor.size, mesh.pipeline.size)}, expected 1: {c.library.model.__name__} runs "
                "by transformers' code, which is not shared by ranks"
            )
        recording = record(c.library, c.where)
        try:
            self._step, layers = swap(recording, c.stored)
        except Unfit as error:
            raise UnsupportedModel(f"{c.where}: {c.library.model.__name__}: {error}") from error
        self.config = c
        self.layer_range, self.is_first, self.is_last = range(c.num_layers), True, True
        self.causal: Any = recording.causal
        prefix = f"{self.causal.base_model_prefix}."
        self._prefix, self._rename = prefix, renamings(recording.causal)
        self._unread = re.compile("|".join(self.causal._keys_to_ignore_on_load_unexpected or ["$^"]))
        self._by_path = {path.removeprefix(prefix): layer for path, layer in layers.items()}
        self.layers = nn.ModuleDict(_decoder_layers(recording))
        self._assign_caches(c, mesh)
        self._base = self.causal.base_model
        self._tail = _Tail()
        self.causal._modules[self.causal.base_model_prefix] = self._tail

    def forward(self, batch: ModelInput) -> Tensor:
        """Return the normalised last hidden state of every token, [tokens, hidden]."""
        self._step.batch = batch
        arguments = inputs(batch.token_ids.unsqueeze(0), batch.positions.unsqueeze(0))
        if batch.embeddings is not None:
            rows = self._base.get_input_embeddings()(arguments.pop("input_ids"))
            values = batch.embeddings.values.unsqueeze(0)
            arguments["inputs_embeds"] = rows.index_copy(1, batch.embeddings.token_indices, values)
        if batch.token_ids.is_meta:
            with without_data(self._base):
                hidden: Tensor = self._base(**arguments)[0]
        else:
            hidden = self._base(**arguments)[0]
        return hidden[0]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Multiply rows of the hidden states: [rows, hidden] → float32 logits [rows, tokens]."""
        self._tail.hidden = hidden.unsqueeze(0)
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: Tensor = self.causal(input_ids=ids, use_cache=False).logits[0]
        return logits.float()

    def own_name(self, name: str) -> str:
        return self._rename(name).removeprefix(self._prefix)

    def proof(self, ops: Ops, attention: Callable[[int], AttentionBackend], folder: Path | None) -> str | None:
        from octavo.models.fallback.proof import proved

        return proved(self.config.library, self.config.where, ops, attention, folder)

    def owns(self, name: str) -> bool:
        return not self._unread.search(name)

    def layers_by_path(self) -> Iterator[tuple[str, Layer]]:
        yield from self._by_path.items()

    def to(self, dtype: torch.dtype) -> Self:  # type: ignore[override]
        """Set the type of the parameters, except for those that transformers keeps in float32. Buffers stay as they
        are: their values are not weights."""
        kept = [*(self._base._keep_in_fp32_modules or ()), *(self._base._keep_in_fp32_modules_strict or ())]
        pattern = re.compile("|".join(map(re.escape, kept)) or "$^")
        for path, layer in self._by_path.items():
            for name, parameter in layer.named_parameters(recurse=False):
                if parameter.is_floating_point() and not pattern.search(f"{path}.{name}"):
                    parameter.data = parameter.data.to(dtype)
        return self


class _Tail(nn.Module):
    """Takes the decoder's place where only the modules behind it are computed."""

    hidden: Tensor

    def forward(self, *_: Any, **__: Any) -> _Outputs:
        return _Outputs(self.hidden)


class _Outputs:
    """The decoder's outputs, of which there are the hidden states alone."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None


def _decoder_layers(recording: Recording) -> dict[str, nn.Module]:
    """Return the modules of the layers by their indices: those in the list that contains all attention modules."""
    found = {}
    for path, call in recording.calls.items():
        parts = path.split(".")
        index = parts.index(str(call.layer))
        found[str(call.layer)] = recording.causal.get_submodule(".".join(parts[: index + 1]))
    return found
