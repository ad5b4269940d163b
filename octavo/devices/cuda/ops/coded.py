"""Products with codes as weights: stored ones (of integers, or of floats of 8 bits in FP8, E4M3), and those of plain
weights that are quantised while loading."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import lcm
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.devices.cuda.ops.linear import GroupedStack, InvariantLinear, grouped_arguments, num_tiles, room_for_rows
from octavo.devices.cuda.runtime import CudaRuntime, dense
from octavo.ops.coded import CodedFormat, CodedLinear, CodeSpec
from octavo.ops.codes import NotFinite
from octavo.ops.experts import PreparedStack, Routing
from octavo.ops.prepare_linear import LinearShape, PreparedLinear, TensorSpec
from octavo.ops.prepare_quantized import QuantizedFormat
from octavo.ops.registry import Implementation

STEP: Final = 64
"""Inputs of a step. Of 4 bits, a byte has input j of a step in its lower half, and input j + 32 in the upper one."""
INPUTS: Final = 256
"""Inputs that a program may read at once: weights have zeros up to whole ones."""
SKINNY: Final = {"BM": 8, "BN": 16, "STEPS": 4, "num_warps": 1, "num_stages": 4}
"""The tile of few rows: it is small, so that enough programs read the weight, and each requests much of it early. BM of
these tiles counts rows of codes: a token has one for each plane."""
MIDDLE: Final = {"BM": 32, "BN": 32, "STEPS": 4, "num_warps": 2, "num_stages": 4}
LARGE: Final = {"BM": 64, "BN": 64, "STEPS": 2, "num_warps": 4, "num_stages": 3}
OF_FACTORS: Final = {**LARGE, "BM": 32, "STEPS": 4}
"""The tile of many rows where two levels of sums are kept in registers."""
WIDE: Final = {"BM": 128, "BN": 128, "STEPS": 2, "num_warps": 8, "num_stages": 3}
"""The tile of prompts where the sums over all inputs are integers: meanwhile registers hold nothing else."""
OF_FLOATS: Final = {**WIDE, "STEPS": 1}
"""The tile of prompts with activations of 16 bits and weights in MXFP4, where unpacking takes most instructions: twice
as many rows share it. With 8 bits registers would spill."""
UNFUSED: Final = {"enable_fp_fusion": False}
"""Products and sums are rounded one by one, as the reference does it."""
QUANTIZED: Final = {"BLOCK": 4096, "num_warps": 8}
"""Inputs that a program reads at once: those of most rows are two reads."""
ZEROS: Final = {"none": 0, "zeros": 1, "minimums": 2}


def tile_of(spec: CodeSpec, tokens: int) -> dict[str, int]:
    """Return the tile of a product, whose BM counts tokens, and the options of its launch."""
    planes = spec.activation_bits // 8
    rows, is_large = tokens * planes, tokens * planes > LARGE["BM"]
    tile = OF_FACTORS if spec.super_group else LARGE
    if rows <= MIDDLE["BM"]:
        tile = SKINNY if rows <= SKINNY["BM"] else MIDDLE
    elif is_large and not spec.group:
        tile = WIDE
    elif is_large and spec.is_float and spec.group == 32 and planes == 2:
        tile = OF_FLOATS
    return {**tile, "BM": tile["BM"] // planes}


def padded_inputs(spec: CodeSpec, inputs: int) -> int:
    """Return the inputs with zeros up to whole `INPUTS`, groups and groups of groups."""
    whole = lcm(INPUTS, spec.group or 1, spec.super_group or 1)
    return -(-inputs // whole) * whole


def pack(spec: CodeSpec, codes: Tensor) -> Tensor:
    """Return codes [outputs, inputs] as kernels read them: uint8 [outputs, inputs / 2] of 4 bits, else int8.

    The lower half of a byte has no sign: of signed codes it has 8 more. The upper half of integers has one: of codes
    without a sign it has 8 less.
    """
    padded = padded_inputs(spec, codes.shape[1])
    is_signed = codes.dtype is torch.int8
    if spec.bits == 8:
        signed = codes if is_signed else (codes.short() - 128).char()
        return F.pad(signed, (0, padded - codes.shape[1]))
    nibbles = F.pad((codes + 8).view(torch.uint8) if is_signed else codes, (0, padded - codes.shape[1]))
    low, high = nibbles.view(len(codes), -1, 2, STEP // 2).unbind(2)
    packed = (low | high << 4).flatten(1)
    return packed if spec.is_float else packed ^ 128


def unpack(spec: CodeSpec, packed: Tensor, inputs: int) -> Tensor:
    """Return the codes [outputs, inputs] of what `pack` returned."""
    is_signed = spec.zero == "none" and not spec.is_float
    if spec.bits == 8:
        codes = packed[:, :inputs]
        return codes if is_signed else (codes.short() + 128).to(torch.uint8)
    halves = (packed if spec.is_float else packed ^ 128).view(len(packed), -1, STEP // 2)
    codes = torch.stack((halves & 15, halves >> 4), dim=2).flatten(1)[:, :inputs]
    return codes.char() - 8 if is_signed else codes


class TritonCodes(CodedLinear):
    """State: the tensors of the spec with packed codes, perhaps `bias`; of a stack, each has a further dimension in
    front."""

    def __init__(self, runtime: CudaRuntime, spec: CodeSpec, shape: LinearShape, state: Mapping[str, Tensor]) -> None:
        super().__init__(spec, shape, state)
        self.spec, self._launch = spec, runtime.launch

    def __call__(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return self._product(x, self.shape.dtype, add)

    def in_float32(self, x: Tensor) -> Tensor:
        return self._product(x, torch.float32)

    def rows(self, ids: Tensor) -> Tensor:
        own = {name: tensor if name == "order" else tensor[ids] for name, tensor in self._state.items()}
        own["codes"] = unpack(self.spec, own["codes"], self.shape.inputs)
        return self.spec.dequantized(own).to(self.shape.dtype)

    def _product(self, x: Tensor, dtype: torch.dtype, add: Tensor | None = None) -> Tensor:
        codes, tile = self.quantized(x), tile_of(self.spec, len(x))
        out = torch.empty((len(x), self.shape.columns), dtype=dtype, device=x.device)
        unused = codes[-1]  # in the place of what is read of stacks
        self.multiply(codes, out, -(-len(x) // tile["BM"]), tile, add, ((unused, unused), (0, 0), {"E": 0}))
        return out

    def multiply(
        self,
        quantized: tuple[Tensor, Tensor],
        out: Tensor,
        num_tiles: int,
        tile: dict[str, int],
        add: Tensor | None,
        grouped: tuple[tuple[Tensor, Tensor], tuple[int, int], dict[str, Any]],
    ) -> None:
        """Write products to `out`. quantized: the rows of x. grouped: which of them an expert has."""
        spec, shape, state, (codes, scales) = self.spec, self.shape, self._state, quantized
        groups, (tensors, numbers, constants) = state["scales"], grouped
        zeros = state.get("zeros", state.get("minimums", groups))
        supers = (state.get("super_scales", groups), state.get("super_minimums", groups))
        self._launch(
            "coded.coded_linear",
            (num_tiles, -(-out.shape[1] // tile["BN"])),
            *(codes, scales, state["codes"], groups, zeros, *supers, state.get("bias", groups)),
            *(scales if add is None else add.contiguous(), *tensors, out, out.stride(0)),
            *(*numbers, codes.shape[1], shape.outputs, codes.shape[-1], groups.shape[-1]),
            BITS=spec.bits,
            GROUP=spec.group,
            SUPER=spec.super_group,
            ZERO=ZEROS[spec.zero],
            IS_FLOAT=spec.is_float,
            PLANES=len(codes),
            HAS_BIAS="bias" in state,
            HAS_ADDEND=add is not None,
            IS_GATED=shape.is_gated,
            **{"OF_TOKENS": False, **constants, **UNFUSED, **tile},
        )

    def quantized(self, x: Tensor, owners: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return codes int8 [planes, tokens, padded inputs], and scales of tokens. owners: the weight of each token
        whose order of inputs is taken."""
        spec, (tokens, inputs), planes = self.spec, x.shape, self.spec.activation_bits // 8
        x, padded = dense(x), padded_inputs(spec, inputs)
        codes = torch.empty((planes, tokens, padded), dtype=torch.int8, device=x.device)
        scales = torch.empty(tokens, dtype=torch.float32, device=x.device)
        order, whose = self._state.get("order", codes), codes if owners is None else owners
        self._launch(
            "coded.quantize",
            (tokens,),
            *(x, order, whose, codes, scales, x.stride(0), tokens, inputs, padded),
            HAS_ORDER=spec.has_order,
            HAS_OWNERS=owners is not None,
            PLANES=planes,
            **UNFUSED,
            **QUANTIZED,
        )
        return codes, scales


class TritonStack(PreparedStack):
    """Weights of experts with the state of `TritonCodes`, multiplied by the same kernel."""

    def __init__(self, codes: TritonCodes, first: int) -> None:
        super().__init__(codes.state(), first)
        self._codes = codes

    def __call__(self, x: Tensor, routing: Routing, *, of_tokens: bool, in_float32: bool = False) -> Tensor:
        codes = self._codes
        out = room_for_rows(self, routing, codes.shape, x, torch.float32 if in_float32 else x.dtype)
        owners = None
        if codes.spec.has_order:  # each expert has its own: so each pair has codes of its own
            x = x[routing.order.long() // routing.weights.shape[1]] if of_tokens else x
            places = torch.arange(len(x), dtype=torch.int32, device=x.device)
            owners = torch.searchsorted(routing.starts[1:], places, right=True, out_int32=True) - self.first
            owners, of_tokens = owners.clamp(0, self.experts - 1), False
        tile = tile_of(codes.spec, len(out) // self.experts)
        grouped = grouped_arguments(self, routing, of_tokens=of_tokens)
        codes.multiply(codes.quantized(x, owners), out, num_tiles(self, routing, tile["BM"]), tile, None, grouped)
        return out


class PackedFormat(CodedFormat):
    """Packs stored codes, two of 4 bits in a byte."""

    order_of_bytes = "steps/2"

    def __init__(self, runtime: CudaRuntime, spec: CodeSpec) -> None:
        super().__init__(spec)
        self._runtime = runtime

    def state_specs(self, shape: LinearShape) -> dict[str, TensorSpec]:
        specs, padded = super().state_specs(shape), padded_inputs(self.spec, shape.inputs)
        width, kind = (padded // 2, torch.uint8) if self.spec.bits == 4 else (padded, torch.int8)
        return {**specs, "codes": TensorSpec((shape.outputs, width), kind)}

    def packed(self, codes: Tensor) -> Tensor:
        return pack(self.spec, codes)

    def restore(self, shape: LinearShape, state: Mapping[str, Tensor]) -> PreparedLinear:
        return TritonCodes(self._runtime, self.spec, shape, state)

    def restore_stack(self, shape: LinearShape, state: Mapping[str, Tensor], first: int = 0) -> PreparedStack:
        return TritonStack(TritonCodes(self._runtime, self.spec, shape, state), first)


class Float8Linear(InvariantLinear):
    """State: `codes` and `scales` of the spec, perhaps `bias`. Results have the bits of the plain weight: the kernel
    rounds each weight to the type of the model."""

    def __init__(self, spec: CodeSpec, shape: LinearShape, state: Mapping[str, Tensor], runtime: CudaRuntime) -> None:
        super().__init__(shape, state, runtime, spec.group or 1)
        self._spec = spec

    def by_head(self, x: Tensor, outputs: int) -> Tensor:
        return PreparedLinear.by_head(self, x, outputs)

    def rows(self, ids: Tensor) -> Tensor:
        return self._spec.dequantized({name: self._state[name][ids] for name in ("codes", "scales")}).to(
            self.shape.dtype
        )


class Float8Format(CodedFormat):
    """Keeps codes as they are, and refuses NaN, which not all kernels would decode."""

    def __init__(self, runtime: CudaRuntime, spec: CodeSpec) -> None:
        super().__init__(spec)
        self._runtime = runtime

    def pack_into(
        self, state: Mapping[str, Tensor], weight: Mapping[str, Tensor], bias: Tensor | None, *, gated: bool
    ) -> None:
        super().pack_into(state, weight, bias, gated=gated)
        if (spoilt := (state["codes"] & 127 == 127).any(1)).any():
            raise NotFinite(int(spoilt.nonzero()[0]))

    def restore_stack(self, shape: LinearShape, state: Mapping[str, Tensor], first: int = 0) -> PreparedStack:
        return GroupedStack(shape, state, first, self._runtime, self.spec.group or 1)

    def restore(self, shape: LinearShape, state: Mapping[str, Tensor]) -> PreparedLinear:
        return Float8Linear(self.spec, shape, state, self._runtime)


def _format_of(runtime: CudaRuntime, spec: CodeSpec) -> CodedFormat:
    return (Float8Format if spec.is_plain else PackedFormat)(runtime, spec)


IMPLEMENTATIONS = (
    Implementation("prepare_coded", "triton", lambda runtime: partial(_format_of, runtime)),
    Implementation(
        "prepare_quantized",
        "triton",
        lambda runtime: partial(QuantizedFormat, make_coded=partial(PackedFormat, runtime)),
    ),
)
