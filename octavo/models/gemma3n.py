"""Gemma 3n: several streams of which each layer computes one and corrects the others, low-rank sums beside the residual
(LAuReL), sparse activations, and what Gemma 4 has, too: keys of earlier layers, and an embedding for each layer.

Sources: https://ai.google.dev/gemma/docs/gemma-3n; AltUp, https://arxiv.org/abs/2301.13310; LAuReL,
https://arxiv.org/abs/2411.07501. `gemma3n_encoders` reads images and sounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import NormalDist

import torch
from torch import Tensor, nn

from octavo.attention.metadata import ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.config.section import LARGEST_SIZE
from octavo.distributed.mesh import Mesh
from octavo.errors import ConfigError
from octavo.layers.elementwise import Elementwise, StoredFactor, activation, addition
from octavo.layers.layer import Layer
from octavo.layers.linear import ColumnLinear, joined_linear
from octavo.layers.norm import RMSNorm
from octavo.layers.routers import ExactLinear
from octavo.models.blocks import GatedMLP, SandwichLayer, stream_norm
from octavo.models.config import read_windows
from octavo.models.fields import read_cap
from octavo.models.gemma_inputs import Attention, LayerInput, SharingConfig, SharingDecoder, read_sharing
from octavo.models.gemma_parts import GELU


@dataclass(frozen=True, kw_only=True)
class Gemma3nConfig(SharingConfig):
    """`intermediate_size` is that of the widest MLP."""

    widths: tuple[int, ...]
    """The width of each layer's MLP."""
    sparsities: tuple[float, ...]
    """The share of each layer's gates that is set to 0, as if gates were normally distributed; 0 for none."""
    num_streams: int
    active: int
    """The stream that layers compute."""
    scales_output: bool
    """Whether the input of the gate of a layer's own embedding has a factor for each element."""
    low_rank: int
    """The rank of LAuReL's product."""


def _read_widths(c: Checkpoint, num_layers: int) -> tuple[int, ...]:
    stated = c.values.get("intermediate_size")
    widths = stated if isinstance(stated, list) else [c.positive("intermediate_size", 16_384)] * num_layers
    if len(widths) != num_layers or not all(type(each) is int and 0 < each <= LARGEST_SIZE for each in widths):
        raise c.error("intermediate_size", f"a width, or one for each of {num_layers} layers")
    return tuple(widths)


def _read_sparsities(c: Checkpoint, num_layers: int) -> tuple[float, ...]:
    stated = c.values.get("activation_sparsity_pattern")
    if stated is None:  # the first 10 layers of a model with more
        stated = [0.95 if layer < 10 < num_layers else 0.0 for layer in range(num_layers)]
    is_list = isinstance(stated, list) and len(stated) == num_layers
    if not is_list or not all(type(each) in (int, float) and 0.0 <= each < 1.0 for each in stated):
        raise c.error("activation_sparsity_pattern", f"a share from 0 to below 1 for each of {num_layers} layers")
    return tuple(map(float, stated))


class SparseGates(nn.Module):
    """`down(gelu(largest(gate(x))) * up(x))`. Ranks exchange their gates, from which the cut follows."""

    def __init__(self, c: Gemma3nConfig, mesh: Mesh, sparsity: float) -> None:
        super().__init__()
        width = c.intermediate_size
        self._mesh, (start, length) = mesh, mesh.share(width)
        self._own = slice(start, start + length)
        self.gate_up_proj = ColumnLinear(c.hidden_size, (width, width), mesh, reads=c.gate_up_reads)
        self.dense = Elementwise("scaled", 1.0)
        self.largest = Elementwise("largest_gates", NormalDist().inv_cdf(sparsity))
        self.act, self.multiply = activation(c.activation), Elementwise("multiplied")
        self.down_proj = joined_linear(width, c.hidden_size, mesh)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        largest = self.largest(self._mesh.gather(self.dense(gate)))[:, self._own]
        return self.down_proj(self.multiply(self.act(largest), up))


class LowRank(nn.Module):
    """x plus a norm of its product with a matrix of low rank (LAuReL)."""

    def __init__(self, c: Gemma3nConfig, mesh: Mesh) -> None:
        super().__init__()
        self.linear_left = ColumnLinear(c.hidden_size, c.low_rank, mesh)
        self.linear_right = joined_linear(c.low_rank, c.hidden_size, mesh)
        self.post_laurel_norm = stream_norm(c)
        self.add = addition()

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → [tokens, hidden]."""
        return self.add(x, self.post_laurel_norm(self.linear_right(self.linear_left(x))))


class Coefficients(Layer):
    """An operator over streams that multiplies the router's states with a small stored weight [outputs, streams]."""

    def __init__(self, operator: str, outputs: int, streams: int, *numbers: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, streams), requires_grad=False)
        self._operator, self._numbers = operator, numbers

    def forward(self, *tensors: Tensor) -> Tensor:
        """Return streams [tokens, n · hidden]."""
        return getattr(self.ops, self._operator)(*tensors, self.weight, *self._numbers)


class AltUp(nn.Module):
    """Predicts all streams before a layer, and corrects them behind it."""

    def __init__(self, c: Gemma3nConfig) -> None:
        super().__init__()
        count, hidden = c.num_streams, c.hidden_size
        self.router_norm = RMSNorm(hidden, c.norm_eps)
        self.input_factor = Elementwise("scaled", 1.0 / hidden)
        self.modality_router = ExactLinear(hidden, count)
        self.tanh = Elementwise("soft_capped", 1.0)
        self.prediction_coefs = Coefficients("predicted_streams", count * count, count)
        self.correction_coefs = Coefficients("corrected_streams", count, count, c.active)
        self.correct_output_scale = StoredFactor(hidden, numbers=hidden)

    def states(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] → float32 [tokens, streams]."""
        return self.tanh(self.modality_router(self.input_factor(self.router_norm(x))))


class StreamsLayer(SandwichLayer):
    """A layer that takes and returns all streams, and hands on the embeddings of all layers beside them."""

    def __init__(self, c: Gemma3nConfig, mesh: Mesh, index: int) -> None:
        own, sparsity = replace(c, intermediate_size=c.widths[index]), c.sparsities[index]
        super().__init__(
            c, Attention(c, mesh, index), SparseGates(own, mesh, sparsity) if sparsity else GatedMLP(own, mesh)
        )
        self.altup, self.laurel = AltUp(c), LowRank(c, mesh)
        self.add, self.sum_factor = addition(), Elementwise("scaled", 2.0**-0.5)
        self.layer_input = LayerInput(c, mesh, index)
        self.add_to_others = Elementwise("add_to_others")
        self._active = slice(c.active * c.hidden_size, (c.active + 1) * c.hidden_size)
        self._scales_output = c.scales_output

    def forward(self, x: Tensor, inputs: Tensor, batch: ModelInput) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """x [tokens, streams · hidden], inputs [tokens, layers · input_size] → (the streams, inputs)."""
        altup = self.altup
        predicted = altup.prediction_coefs(x, altup.states(x[:, self._active]))
        stream = predicted[:, self._active]
        normed = self.input_layernorm(stream)
        attended = self.add(stream, self.attention_output_norm(self.self_attn(normed, batch)))
        stream = self.sum_factor(self.add(attended, self.laurel(normed)))
        stream = self.add(stream, self.mlp_output_norm(self.mlp(self.post_attention_layernorm(stream))))
        corrected = altup.correction_coefs(predicted, stream, altup.states(stream))
        opening = corrected[:, self._active]
        if self._scales_output:
            opening = altup.correct_output_scale(opening)
        return self.add_to_others(corrected, self.layer_input(opening, inputs)), inputs


class Gemma3nForCausalLM(SharingDecoder):
    """The whole model."""

    @classmethod
    def read(cls, c: Checkpoint) -> Gemma3nConfig:
        c.expect("hidden_activation", GELU)
        num_layers = c.positive("num_hidden_layers")
        windows = read_windows(c, is_windowed=True) or (None,) * num_layers
        widths, streams, active = (
            _read_widths(c, num_layers),
            c.positive("altup_num_inputs", 4),
            c.int("altup_active_idx", 0),
        )
        if streams < 2:
            raise c.error("altup_num_inputs", "at least 2 streams")
        if not 0 <= active < streams:
            raise c.error("altup_active_idx", f"the number of a stream, below altup_num_inputs, which is {streams}")
        c.positive("hidden_size_per_layer_input")
        return Gemma3nConfig.gemma(
            c,
            norm=RMSNorm,
            windows=windows,
            attention_scale=1.0,
            logit_soft_cap=read_cap(c, "final_logit_softcapping", 30.0),
            intermediate_size=max(widths),
            widths=widths,
            sparsities=_read_sparsities(c, num_layers),
            num_streams=streams,
            active=active,
            scales_output=c.bool("altup_correct_scale", True),
            low_rank=c.positive("laurel_rank", 64),
            **read_sharing(c, windows, 15),
        )

    def __init__(self, c: Gemma3nConfig, mesh: Mesh) -> None:
        super().__init__(c, mesh, lambda index: StreamsLayer(c, mesh, index))
        self._mesh, hidden = mesh, c.hidden_size
        others = range(1, c.num_streams)
        self.altup_projections = nn.ModuleList(ColumnLinear(hidden, hidden, mesh) for _ in others)
        self.altup_unembed_projections = nn.ModuleList(ColumnLinear(hidden, hidden, mesh) for _ in others)
        self.spread, self.mean = Elementwise("spread_streams"), Elementwise("mean_stream")

    def note_layers(self, layers: Iterable[int]) -> None:
        raise ConfigError("speculative_config: a head reads one stream of its model, and Gemma 3n has several")

    def begin(self, batch: ModelInput) -> tuple[Tensor, Tensor | None]:
        """Return the streams [tokens, streams · hidden], and the embeddings of all layers."""
        x, inputs = super().begin(batch)
        others = [self._mesh.gather(project(x)) for project in self.altup_projections]
        return self.spread(x, *others), inputs

    def normalize(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Return the norm of the streams' mean [tokens, hidden]."""
        first, *others = torch.split(x, self.config.hidden_size, dim=1)
        projections = zip(self.altup_unembed_projections, others, strict=True)
        found = [self._mesh.gather(project(stream)) for project, stream in projections]
        return super().normalize(self.mean(first, *found), None)
