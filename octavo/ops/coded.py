"""Linear layers whose weights are stored codes: small integers with scales of groups, as quantised checkpoints have.

The operator makes of a `CodeSpec` a `CodedFormat`, which packs the tensors of a stored weight as they are: nothing is
quantised again. Activations are quantised token by token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor

from octavo.errors import CheckpointError, ConfigError
from octavo.ops.codes import TOLERANCE, NotFinite, QuantizedLinear, check_inputs, exact_product, quantize_rows
from octavo.ops.experts import PreparedStack
from octavo.ops.memory import zeroed
from octavo.ops.prepare_linear import LinearShape, PreparedLinear, TensorSpec, linear_stack, with_bias
from octavo.ops.registry import Operator

E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of 4-bit floats by the lower three bits of their code; the highest bit is the sign."""

HALF_BASE: Final = 254.0
"""A 16-bit code of an activation is this times one 8-bit code, plus another: both are from -127 to 127."""

_FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class CodeSpec:
    """What the codes of a weight mean: value = (code - zero point) · scale, or code · scale - minimum, of its group."""

    bits: Literal[4, 8]
    group: int
    """Inputs that share a scale: 16, 32 or a multiple of 64; 0 for one scale per output."""
    zero: Literal["none", "zeros", "minimums"] = "none"
    """Codes are signed with none, else they are unsigned."""
    scale_dtype: torch.dtype = torch.float32
    """Type of scales and minimums: a float, or int8 where `super_group` is not 0."""
    super_group: int = 0
    """Inputs that share a float16 factor of their scales, and one of their minimums; 0 where there are no factors."""
    has_order: bool = False
    """Column j of the codes is multiplied with input `order[j]`."""
    is_float: bool = False
    """Codes are floats instead of integers: of 4 bits of the type E2M1, of 8 bits E4M3."""
    activation_bits: int = 8
    """The bits that activations are rounded to, 8 or 16; not a part of the layout."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a combination without a kernel."""
        wanted = {
            f"{self.bits} bits, expected 4 or 8": self.bits in (4, 8),
            f"groups of {self.group}, expected 16, 32 or a multiple of 64": self.group in (0, 16, 32)
            or (self.group > 0 and self.group % 64 == 0),
            f"scales in {self.scale_dtype}": self.scale_dtype in ((torch.int8,) if self.super_group else _FLOATS),
            f"factors of {self.super_group} inputs beside groups of {self.group}": not self.super_group
            or (self.super_group == 256 and 0 < self.group < 256),
            "factors beside zero points or floats": not self.super_group or not (self.is_float or self.zero == "zeros"),
            "floats with zero points": not self.is_float or self.zero == "none",
            f"activations of {self.activation_bits} bits, expected 8 or 16": self.activation_bits in (8, 16),
        }
        for what, is_met in wanted.items():
            if not is_met:
                raise ConfigError(f"stored codes have {what}")

    @property
    def is_plain(self) -> bool:
        """Whether codes are multiplied as the plain weights that they stand for, and activations stay what they are."""
        return self.is_float and self.bits == 8

    @property
    def layout(self) -> str:
        """The name of everything that decides what stored bytes mean."""
        kind = "float" if self.is_float else "int"
        scales = str(self.scale_dtype).removeprefix("torch.")
        more = f"-of-{self.super_group}" * bool(self.super_group) + "-ordered" * self.has_order
        return f"{kind}{self.bits}-g{self.group}-{self.zero}-{scales}{more}"

    def num_groups(self, inputs: int) -> int:
        """Return how many scales an output has."""
        return -(-inputs // self.group) if self.group else 1

    def tensor_specs(self, outputs: int, inputs: int) -> dict[str, TensorSpec]:
        """Return what a stored weight [outputs, inputs] consists of; dimension 0 counts outputs, except in `order`."""
        groups = (outputs, self.num_groups(inputs))
        is_signed = self.zero == "none" and not self.is_float
        specs = {
            "codes": TensorSpec((outputs, inputs), torch.int8 if is_signed else torch.uint8),
            "scales": TensorSpec(groups, self.scale_dtype),
        }
        if self.zero == "zeros":
            specs["zeros"] = TensorSpec(groups, torch.int16)
        if self.zero == "minimums":
            specs["minimums"] = TensorSpec(groups, self.scale_dtype)
        if self.super_group:
            supers = TensorSpec((outputs, -(-inputs // self.super_group)), torch.float16)
            specs["super_scales"] = supers
            if self.zero == "minimums":
                specs["super_minimums"] = supers
        if self.has_order:
            specs["order"] = TensorSpec((inputs,), torch.int32)
        return specs

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse tensors that a kernel could not compute with.

        Raises CheckpointError for another shape, type or set of tensors and for an order that is no permutation, and
        NotFinite for scales with NaN or infinities.
        """
        specs = self.tensor_specs(*tensors["codes"].shape)
        found = {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}
        for name in sorted(specs.keys() | found.keys()):
            if specs.get(name) != found.get(name):
                raise CheckpointError(f"{name} of a stored weight is {found.get(name)}, expected {specs.get(name)}")
            if found[name].dtype.is_floating_point and not tensors[name].isfinite().all():
                raise NotFinite(int((~tensors[name].isfinite()).any(1).nonzero()[0]))
        if self.has_order:
            inputs, order = tensors["codes"].shape[1], tensors["order"]
            if not torch.equal(order.sort().values, torch.arange(inputs, dtype=torch.int32, device=order.device)):
                raise CheckpointError(f"order of a stored weight is no permutation of its {inputs} inputs")

    def code_values(self, codes: Tensor) -> Tensor:
        """Return the numbers that codes stand for, without zero point and scale: float32."""
        if not self.is_float:
            return codes.float()
        if self.bits == 8:
            return codes.view(torch.float8_e4m3fn).float()
        magnitudes = torch.tensor(E2M1, device=codes.device)[(codes & 7).long()]
        return torch.where(codes > 7, -magnitudes, magnitudes)

    def group_floats(self, tensors: Mapping[str, Tensor], name: Literal["scales", "minimums"]) -> Tensor:
        """Return scales or minimums float32 [outputs, groups]; the product of two levels is exact."""
        of_groups = tensors[name].float()
        if not self.super_group:
            return of_groups
        factors = tensors[f"super_{name}"].float().repeat_interleave(self.super_group // self.group, dim=1)
        return of_groups * factors[:, : of_groups.shape[1]]

    def dequantized(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the plain weight float32 [outputs, inputs], inputs in the order of x."""
        codes = self.code_values(tensors["codes"])
        inputs = codes.shape[1]

        def by_input(of_groups: Tensor) -> Tensor:
            return of_groups.repeat_interleave(self.group or inputs, dim=1)[:, :inputs]

        if self.zero == "zeros":
            codes = codes - by_input(tensors["zeros"].float())
        values = codes * by_input(self.group_floats(tensors, "scales"))
        if self.zero == "minimums":
            values = values - by_input(self.group_floats(tensors, "minimums"))
        if self.has_order:
            return torch.empty_like(values).index_copy_(1, tensors["order"].long(), values)
        return values


def quantize_activations(x: Tensor, bits: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """x [rows, inputs] → codes of 8 bits, and scales float32 [rows, 1]; `quantize_rows` says how.

    The codes, in float32, are [rows, inputs]; two of them for 16 bits: code = HALF_BASE · first + second.
    """
    if bits == 8:
        codes, scales = quantize_rows(x)
        return (codes,), scales
    codes, scales = quantize_rows(x, 127.0 * HALF_BASE + 126.0)
    high = torch.round(codes * (1.0 / HALF_BASE))
    return (high, codes - HALF_BASE * high), scales


class CodedLinear(QuantizedLinear):
    """A product with coded weights. Its state: the tensors of its spec, and `bias` where there is one."""

    def __init__(self, spec: CodeSpec, shape: LinearShape, state: Mapping[str, Tensor]) -> None:
        super().__init__(shape, state)
        self._spec = spec

    def values(self, x: Tensor) -> Tensor:
        if self._spec.has_order:
            x = x[:, self._state["order"].long()]
        codes, row_scales = quantize_activations(x, self._spec.activation_bits)
        sums = [self._sums(each) for each in codes]
        return (sums[0] if len(sums) == 1 else sums[0] * HALF_BASE + sums[1]) * row_scales

    def _sums(self, codes: Tensor) -> Tensor:
        """Return the product with codes of activations, without their scale: float32 [rows, outputs].

        It is Σ over groups, in order, of Σ codes · codes · scale, minus Σ codes · minimum for each group. Of scales of
        two levels, those groups that share factors are summed as integers first.
        """
        spec, state, inputs = self._spec, self._state, self.shape.inputs
        group = spec.group or inputs
        weights = spec.code_values(state["codes"])
        total = codes.new_zeros((codes.shape[0], self.shape.outputs))
        # what is above and below zero of the groups so far that share factors
        above = below = total.double()
        for g, start in enumerate(range(0, inputs, group)):
            own, of_group = codes[:, start : start + group], weights[:, start : start + group]
            if spec.zero == "zeros":
                of_group = of_group - state["zeros"][:, g, None]
            above = above + exact_product(own, of_group).double() * (state["scales"][:, g] if spec.super_group else 1)
            if spec.zero == "minimums":
                below = below + own.sum(1, keepdim=True) * (state["minimums"][:, g] if spec.super_group else 1)
            end = start + group
            if spec.super_group and end < inputs and end % spec.super_group:
                continue
            factors, f = ("super_", start // spec.super_group) if spec.super_group else ("", g)
            total = total + above.float() * state[f"{factors}scales"][:, f].float()
            if spec.zero == "minimums":
                total = total - below.float() * state[f"{factors}minimums"][:, f].float()
            above = below = torch.zeros_like(above)
        return total

    def rows(self, ids: Tensor) -> Tensor:
        own = {name: tensor if name == "order" else tensor[ids] for name, tensor in self._state.items()}
        return self._spec.dequantized(own).to(self.shape.dtype)


class CodedFormat:
    """How an implementation keeps codes; like `LinearFormat`, but weights are the tensors of a spec.

    This one, in plain torch, keeps the tensors as they are; a device derives its own.
    """

    order_of_bytes = "rows/1"

    def __init__(self, spec: CodeSpec) -> None:
        self.spec = spec
        self.layout = f"{spec.layout}-{self.order_of_bytes}"

    def __call__(
        self, weight: Mapping[str, Tensor], dtype: torch.dtype, bias: Tensor | None = None, *, gated: bool = False
    ) -> PreparedLinear:
        """Bring the tensors of a stored weight into this form; x and the product are of `dtype`. Raises as `check`."""
        codes = weight["codes"]
        shape = LinearShape(codes.shape[0], codes.shape[1], dtype, bias is not None, gated)
        state = {name: self.zeros(spec, codes.device) for name, spec in self.state_specs(shape).items()}
        self.pack_into(state, weight, bias, gated=gated)
        return self.restore(shape, state)

    def state_specs(self, shape: LinearShape) -> dict[str, TensorSpec]:
        """Return what `PreparedLinear.state` will hold. Raises ConfigError for a weight that is too wide."""
        check_inputs(shape.inputs)
        return with_bias(self.spec.tensor_specs(shape.outputs, shape.inputs), shape)

    def zeros(self, spec: TensorSpec, device: torch.device | str) -> Tensor:
        """Return long-lived memory for a tensor of a state."""
        return zeroed(spec.shape, spec.dtype, device)

    def pack_into(
        self, state: Mapping[str, Tensor], weight: Mapping[str, Tensor], bias: Tensor | None, *, gated: bool
    ) -> None:
        """Write what `state` of this weight would be to tensors of zeros that meet `state_specs`. Raises as `check`."""
        self.spec.check(weight)
        for name, tensor in ({**weight, "bias": bias} if bias is not None else weight).items():
            state[name].copy_(self.packed(tensor) if name == "codes" else tensor)

    def packed(self, codes: Tensor) -> Tensor:
        """Return codes [outputs, inputs] as the state has them."""
        return codes

    def restore(self, shape: LinearShape, state: Mapping[str, Tensor]) -> PreparedLinear:
        """Return the layer that `state` was taken from."""
        return CodedLinear(self.spec, shape, state)

    def restore_stack(self, shape: LinearShape, state: Mapping[str, Tensor], first: int = 0) -> PreparedStack:
        """Make a stack of weights of one shape; each tensor has a further dimension, of experts, in front."""
        return linear_stack(self.restore, shape, state, first)


def example_specs() -> Iterator[CodeSpec]:
    """Yield a spec of each kind that checkpoints have."""
    yield CodeSpec(4, 128, "none", torch.bfloat16)
    yield CodeSpec(4, 32, "zeros", torch.float16)
    yield CodeSpec(4, 64, "zeros", torch.float16, has_order=True)
    yield CodeSpec(4, 32, "minimums", torch.float16)
    yield CodeSpec(4, 32, "minimums", torch.int8, 256)
    yield CodeSpec(4, 16, "none", torch.float32, is_float=True)
    yield CodeSpec(4, 0, "zeros", torch.bfloat16)
    yield CodeSpec(8, 16, "none", torch.int8, 256)
    yield CodeSpec(8, 32, "none", torch.float16)
    yield CodeSpec(8, 32, "minimums", torch.int8, 256)
    yield CodeSpec(8, 128, "zeros", torch.float32, activation_bits=16)
    yield CodeSpec(8, 0, "none", torch.float32)
    yield CodeSpec(4, 32, "none", torch.float16, activation_bits=16)


def example_weight(spec: CodeSpec, outputs: int, inputs: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Return random tensors of a spec: every code occurs, values are about as large as those of trained weights."""
    made = {}
    for name, each in spec.tensor_specs(outputs, inputs).items():
        if name == "order":
            made[name] = torch.randperm(inputs, generator=generator).int()
        elif name in ("codes", "zeros"):
            least = -(2 ** (spec.bits - 1)) if each.dtype is torch.int8 else 0
            made[name] = torch.randint(least, least + 2**spec.bits, each.shape, generator=generator).to(each.dtype)
        elif each.dtype is torch.int8:
            made[name] = torch.randint(-127 if spec.zero == "none" else 0, 64, each.shape, generator=generator).char()
        else:
            size = inputs**-0.5 / 2**spec.bits * (1 / 64 if spec.super_group else 1)
            made[name] = (torch.rand(each.shape, generator=generator) * size + size).to(each.dtype)
    return made


def examples(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield (spec, x, ids, tensors, bias, gated, add): all specs, from one token to more than a tile."""
    generator = torch.Generator().manual_seed(0)
    for spec in example_specs():
        for tokens, inputs, outputs, gated in ((1, 256, 96, True), (3, 80, 18, False), (35, 384, 66, True)):
            x = torch.randn((tokens, inputs), generator=generator).to(dtype)
            weight = example_weight(spec, outputs, inputs, generator)
            bias = torch.randn(outputs, generator=generator).to(dtype)
            add = torch.randn((tokens, outputs), generator=generator)
            yield spec, x, torch.tensor([0, outputs - 1, 1]), weight, bias, gated, add if tokens > 1 else None


def trial(
    make: Any,
    spec: CodeSpec,
    x: Tensor,
    ids: Tensor,
    weight: Mapping[str, Tensor],
    bias: Tensor,
    gated: bool,
    add: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return (the product, rows of the weight) of one list of `examples`."""
    prepared = make(spec)(weight, x.dtype, bias, gated=gated)
    return prepared(x, add), prepared.rows(ids)


OPERATORS = (Operator("prepare_coded", CodedFormat, examples, TOLERANCE, trial),)
