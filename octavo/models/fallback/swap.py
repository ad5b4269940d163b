"""Layers of octavo in the place of transformers' modules: loading, quantisation and exact rows follow from them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import OPERATOR_OF, RoundedFactor, activation
from octavo.layers.embedding import Embedding, embedding_and_head
from octavo.layers.experts import StoredExperts
from octavo.layers.layer import WHOLE, Layer, PreparedLayer, TensorSlot
from octavo.layers.linear import ColumnLinear, GatedLinear
from octavo.layers.norm import LayerNorm, RMSNorm
from octavo.models.encoder import Held
from octavo.models.fallback.attention import CallAttention, Step, Unfit
from octavo.models.fallback.exact import make_exact
from octavo.models.fallback.mixtures import is_experts, octavo_experts
from octavo.models.fallback.recording import Recording
from octavo.quantization.method import UNQUANTIZED, FromPlain, Methods

_ONE: Final = Mesh.single()
_PROBE_ROWS: Final = 3


class RowsOf(nn.Module):
    """A layer of rows [tokens, …] for values [1, tokens, …]."""

    def __init__(self, layer: Layer, last: int = 1) -> None:
        """last: the number of dimensions of a row."""
        super().__init__()
        self.octavo = layer
        self._last = last

    @property
    def weight(self) -> Tensor:
        """A value with the dtype of the weight, which modules ask for."""
        if isinstance(self.octavo, PreparedLayer):  # which may have released its parameters
            return torch.empty(0, dtype=self.octavo.dtype)
        return next(self.octavo.parameters())

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] → [..., outputs]; x [...] → [..., outputs] for a table of rows."""
        shape = x.shape[: x.dim() - self._last]
        rows: Tensor = self.octavo(x.reshape(-1, *x.shape[x.dim() - self._last :]).contiguous())
        return rows.view(*shape, *rows.shape[1:])


class Scaled(nn.Module):
    """A table whose rows are multiplied by a number."""

    def __init__(self, table: Layer, scale: float) -> None:
        super().__init__()
        self.octavo = table
        self.factor = RoundedFactor(scale)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [1, tokens] → [1, tokens, dim]."""
        rows: Tensor = self.factor(self.octavo(ids.view(-1)))
        return rows.view(*ids.shape, -1)


class GatedRows(nn.Module):
    """`down(silu(gate(x)) * up(x))`, gate and up in one product."""

    def __init__(self, sizes: tuple[int, int, int], biases: tuple[bool, bool]) -> None:
        """sizes: of x, of the values between, of the result. biases: of gate and up, and of down."""
        super().__init__()
        inputs, width, outputs = sizes
        self.gate_up_proj = GatedLinear(inputs, width, _ONE, bias=biases[0])
        self.down_proj = ColumnLinear(width, outputs, _ONE, bias=biases[1])

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inputs] → [..., outputs]."""
        rows: Tensor = self.down_proj(self.gate_up_proj(x.reshape(-1, x.shape[-1])))
        return rows.view(*x.shape[:-1], -1)


def swap(recording: Recording, stored: StoredExperts) -> tuple[Step, dict[str, Layer]]:
    """Put octavo's layers into the recorded module. Return the step that they read, and all layers by their paths.

    stored: how the checkpoint holds experts. Raises Unfit for parameters that nothing multiplies in an exact way.
    """
    causal, step = recording.causal, Step()
    for path in recording.inexact:
        make_exact(causal.get_submodule(path))
    _swap_vocabulary(causal)
    for module in list(causal.modules()):
        for name, child in module.named_children():
            if isinstance(child, Layer):
                continue
            made = octavo_experts(child, stored) if is_experts(child) else _replacement(child)
            if made is not None:
                module._modules[name] = made
    for path, call in recording.calls.items():
        causal.get_submodule(path).octavo_attention = CallAttention(call, step)
    layers: dict[str, Layer] = {}
    for path, module in causal.named_modules():
        if isinstance(module, Layer):
            layers[path.removesuffix(".octavo")] = module
        elif held := _held(path, module):
            layers[path] = held
    return step, layers


class EncoderLinear(ColumnLinear):
    """A linear layer of an encoder, whose weight is only quantised where the checkpoint has it so."""

    stacked: tuple[str, tuple[EncoderLinear, ...], int] | None = None
    """The tensor beside it that holds the rows of several layers, these layers for the first of them, () for the
    others, and the heads of queries and keys whose rows turn in neighbouring pairs there; None where each has a tensor
    of its own."""

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        if self.stacked is None:
            yield from super().tensor_slots(path)
            return
        name, layers, num_heads = self.stacked
        beside = f"{path.rpartition('.')[0]}.{name}"
        for slots in zip(*(ColumnLinear.tensor_slots(each, beside) for each in layers), strict=True):
            rows = sum(slot.shape[0] for slot in slots)
            shape = (rows, *slots[0].shape[1:])
            yield replace(slots[0], shape=shape, parts=WHOLE, fill=partial(_fill_each, slots, num_heads))

    def use(self, methods: Methods, path: str) -> None:
        super().use(lambda name: UNQUANTIZED if isinstance(found := methods(name), FromPlain) else found, path)

    def finish(self) -> None:
        for each in (self,) if self.stacked is None else self.stacked[1]:
            super(EncoderLinear, each).finish()


def _fill_each(slots: Sequence[TensorSlot], num_heads: int, stored: Tensor) -> None:
    parts = torch.split(stored, [slot.shape[0] for slot in slots])
    for place, (slot, rows) in enumerate(zip(slots, parts, strict=True)):
        if num_heads and place < 2:
            # in queries and keys the elements of a head's two halves turn together here
            rows = rows.view(num_heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
        slot.fill(rows)


def stack(encoder: nn.Module, names: Sequence[str], stored: str, num_heads: int = 0) -> None:
    """Let layers of an encoder with these names beside each other be read from one tensor that holds all of them.

    num_heads: of queries and keys, the first two, where their rows turn in neighbouring pairs there.
    """
    for module in encoder.modules():
        parts = [getattr(module, name, None) for name in names]
        layers = tuple([part.octavo for part in parts if isinstance(part, EncoderRows)])
        for place, layer in enumerate(layers):
            layer.stacked = stored, () if place else layers, num_heads


class EncoderRows(RowsOf):
    """A linear layer of an encoder, for values of any shape, with the sizes that modules ask for."""

    octavo: EncoderLinear

    def __init__(self, linear: nn.Linear) -> None:
        self.in_features, self.out_features = linear.in_features, linear.out_features
        super().__init__(EncoderLinear(self.in_features, self.out_features, _ONE, bias=linear.bias is not None))


def swap_encoder(encoder: nn.Module) -> None:
    """Put octavo's layers in the place of an encoder's linear layers, norms and activations.

    Its bits then do not depend on how many threads compute it.
    """
    for module in list(encoder.modules()):
        for name, child in module.named_children():
            made: nn.Module | None = None
            if type(child) is nn.Linear:
                made = EncoderRows(child)
            elif not isinstance(child, nn.Embedding | Layer) and not list(child.children()):
                made = _replacement(child)
            if made is not None:
                module._modules[name] = made
    make_exact(encoder)


def _held(path: str, module: nn.Module) -> Held | None:
    for name, buffer in list(module._buffers.items()):
        if buffer is not None and name not in module._non_persistent_buffers_set:
            del module._buffers[name]
            module.register_parameter(name, nn.Parameter(buffer.to("meta"), requires_grad=False))
    kept = [each for each in module._parameters.values() if each is not None]
    for each in kept:
        if each.dim() > 2:
            raise Unfit(f"{path} ({type(module).__name__}) has weights of {each.dim()} dimensions")
    return Held(module) if kept else None


def _replacement(module: Any) -> nn.Module | None:
    kind = type(module)
    if set(module._modules) == {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return _gated(module)
    if kind is nn.Linear:
        has_bias = module.bias is not None
        return RowsOf(ColumnLinear(module.in_features, module.out_features, _ONE, bias=has_bias))
    if kind.__name__ == "Conv1D":
        inputs, outputs = module.weight.shape
        return RowsOf(ColumnLinear(inputs, outputs, _ONE, bias=True, transposed=True))
    if kind is nn.Embedding:
        return RowsOf(Embedding(module.num_embeddings, module.embedding_dim), last=0)
    if kind is nn.LayerNorm and len(module.normalized_shape) == 1 and module.bias is not None:
        return RowsOf(LayerNorm(module.normalized_shape[0], module.eps))
    if not list(module.children()) and not module._buffers:
        if [name for name, each in module._parameters.items() if each is not None] == ["weight"]:
            return _norm(module)
        if not module._parameters:
            return _activation(module)
    return None


def _gated(module: Any) -> nn.Module | None:
    """Return the gated layer that computes what the module does; None where there is none."""
    parts = [module.gate_proj, module.up_proj, module.down_proj]
    if any(type(each) is not nn.Linear for each in parts) or module._parameters or module._buffers:
        return None
    gate, up, down = parts
    biases = [each.bias is not None for each in parts]
    if biases[0] != biases[1] or gate.weight.shape != up.weight.shape:
        return None
    with torch.device("cpu"), torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        twin = copy.copy(module)
        small = [nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)]
        twin._modules = dict(zip(("gate_proj", "up_proj", "down_proj"), small, strict=True)) | {"act_fn": module.act_fn}
        x = torch.randn(_PROBE_ROWS, 8)
        if not _computes(twin, x, None, small[2](F.silu(small[0](x)) * small[1](x))):
            return None
    return GatedRows((gate.in_features, gate.out_features, down.out_features), (biases[0], biases[2]))


def _norm(module: Any) -> nn.Module | None:
    """Return the norm that computes what the module does; None where there is none."""
    eps = next((getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)), None)
    if not isinstance(eps, float) or module.weight.dim() != 1:
        return None
    dim = len(module.weight)
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"):
        weight = torch.rand(dim, generator=generator) + 0.5
        x = torch.randn(_PROBE_ROWS, dim, generator=generator)
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        for offset in (0.0, 1.0):
            if _computes(module, x, weight, normed * (weight + offset)):
                break
        else:
            return None
    return RowsOf(RMSNorm(dim, eps, offset=offset))


def _activation(module: Any) -> nn.Module | None:
    """Return the activation that computes what the module does; None where there is none."""
    with torch.device("cpu"):
        x = torch.linspace(-9.0, 9.0, 128).view(1, -1)
        for name, function in _FUNCTIONS.items():
            if name in OPERATOR_OF and _computes(module, x, None, function(x)):
                return RowsOf(activation(name))
    return None


_FUNCTIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def _computes(module: nn.Module, x: Tensor, weight: Tensor | None, expected: Tensor) -> bool:
    """Return whether the module, with this weight, makes `expected` of x."""
    twin = copy.copy(module)
    twin._parameters = {} if weight is None else {"weight": nn.Parameter(weight, requires_grad=False)}
    twin.__dict__.pop("forward", None)
    try:
        found = twin(x)
    except Exception:  # a module that takes something else is none of these
        return False
    return isinstance(found, Tensor) and found.shape == x.shape and torch.allclose(found, expected, 1e-6, 1e-6)


def _swap_vocabulary(causal: Any) -> None:
    """Replace the token embedding and a head without bias, which may share one table."""
    table, head = causal.get_input_embeddings(), causal.get_output_embeddings()
    if not isinstance(table, nn.Embedding) or not isinstance(head, nn.Linear) or head.bias is not None:
        return
    scale = getattr(table, "embed_scale", None)
    if type(table) is not nn.Embedding and scale is None:
        return
    rows, dim = table.weight.shape
    tied = bool(causal.config.tie_word_embeddings)
    embedding, made = embedding_and_head(rows, dim, _ONE, tied=tied)
    causal.set_input_embeddings(RowsOf(embedding, last=0) if scale is None else Scaled(embedding, float(scale)))
    causal.set_output_embeddings(RowsOf(made))
