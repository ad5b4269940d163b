"""Blocks of llama.cpp's quantised types. Codes stay codes where a `CodeSpec` says what they mean, otherwise the weight
is dequantised when it is read.

A block holds a row's next 32 or 256 elements. Layouts are those of ggml; values equal those of gguf-py bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from octavo.config.section import Section
from octavo.errors import CheckpointError
from octavo.ops.coded import CodeSpec
from octavo.quantization.stored import (
    ALL,
    Part,
    Parts,
    Read,
    StoredFormat,
    StoredWeight,
    digest,
    expect_shape,
    finite,
    needed,
    rows_of,
)

SUFFIX: Final = ".gguf"
"""Stands behind the name of a weight in this format, before the part of it that a tensor is."""
PARTS: Final = (("",), ("/even", "/odd"), ("/first", "/second"), ("/keys", "/values"))
"""How a tensor is the whole weight or a part of it (`gguf.layout`)."""
_ORDER: Final = f"{SUFFIX}/order"
"""Stands behind the name of the order of a weight's columns."""
FLOATS: Final = ("F32", "F16", "BF16", "F64")
_GRIDS: Final = Path(__file__).with_name("gguf_grids.txt")
_NONLINEAR: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

Tensors = dict[str, Tensor]


def _cut(b: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return a tensor whose last dimension has become several."""
    return b.reshape(*b.shape[:-1], *sizes)


def _half(b: Tensor, at: int) -> Tensor:
    """Return the float16 at a place of blocks [..., bytes]: [..., 1]."""
    return b[..., at : at + 2].contiguous().view(torch.float16)


def _word(b: Tensor, at: int, num_bytes: int, count: int = 1) -> Tensor:
    """Return unsigned little-endian numbers of blocks: int64 [..., count]."""
    own = _cut(b[..., at : at + num_bytes * count], (count, num_bytes)).long()
    return (own << (8 * torch.arange(num_bytes))).sum(-1)


def _planes(b: Tensor, shifts: range, run: int) -> Tensor:
    """Return bytes shifted by each of `shifts`, each run of bytes by all of them before the next run: [..., n]."""
    runs = _cut(b, (-1, 1, run))
    return (runs >> torch.tensor([*shifts], dtype=torch.uint8)[:, None]).flatten(-3)


def _nibbles(b: Tensor, run: int) -> Tensor:
    return _planes(b, range(0, 8, 4), run) & 15


def _bits(b: Tensor) -> Tensor:
    """Return the bits of bytes, lowest first: [..., 8 · bytes]."""
    return (b[..., None] >> torch.arange(8, dtype=torch.uint8)).flatten(-2) & 1


def _signed(codes: Tensor, offset: int) -> Tensor:
    return (codes - offset).view(torch.int8)


def _q4_0(b: Tensor) -> Tensors:
    return {"codes": _signed(_nibbles(b[..., 2:], 16), 8), "scales": _half(b, 0)}


def _q4_1(b: Tensor) -> Tensors:
    return {"codes": _nibbles(b[..., 4:], 16), "scales": _half(b, 0), "minimums": -_half(b, 2)}


def _q5_0(b: Tensor) -> Tensors:
    codes = _nibbles(b[..., 6:], 16) | _bits(b[..., 2:6]) << 4
    return {"codes": _signed(codes, 16), "scales": _half(b, 0)}


def _q5_1(b: Tensor) -> Tensors:
    codes = _nibbles(b[..., 8:], 16) | _bits(b[..., 4:8]) << 4
    return {"codes": codes, "scales": _half(b, 0), "minimums": -_half(b, 2)}


def _q8_0(b: Tensor) -> Tensors:
    return {"codes": b[..., 2:].view(torch.int8), "scales": _half(b, 0)}


def _q8_k(b: Tensor) -> Tensors:
    return {"codes": b[..., 4:260].view(torch.int8), "scales": b[..., :4].contiguous().view(torch.float32)}


def _q2_k(b: Tensor) -> Tensors:
    scales = {"scales": (b[..., :16] & 15).view(torch.int8), "minimums": (b[..., :16] >> 4).view(torch.int8)}
    codes = _planes(b[..., 16:80], range(0, 8, 2), 32) & 3
    return {"codes": codes, **scales, "super_scales": _half(b, 80), "super_minimums": _half(b, 82)}


def _q3_k(b: Tensor) -> Tensors:
    low, high = _planes(b[..., 32:96], range(0, 8, 2), 32) & 3, _planes(b[..., :32], range(8), 32) & 1
    scales = _nibbles(b[..., 96:104], 8) | (_planes(b[..., 104:108], range(0, 8, 2), 4) & 3) << 4
    return {
        "codes": _signed(low | high << 2, 4),
        "scales": _signed(scales, 32),
        "super_scales": _half(b, 108),
    }


def _k_scales(b: Tensor) -> Tensors:
    """Return the scales and minimums of Q4_K and Q5_K, 6 bits each."""
    first, second, rest = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scales = torch.cat((first & 63, rest & 15 | first >> 2 & 48), -1)
    minimums = torch.cat((second & 63, rest >> 4 | second >> 2 & 48), -1)
    own = {"scales": scales.view(torch.int8), "minimums": minimums.view(torch.int8)}
    return {**own, "super_scales": _half(b, 0), "super_minimums": _half(b, 2)}


def _q4_k(b: Tensor) -> Tensors:
    return {"codes": _nibbles(b[..., 16:], 32), **_k_scales(b)}


def _q5_k(b: Tensor) -> Tensors:
    high = _planes(b[..., 16:48], range(8), 32) & 1
    return {"codes": _nibbles(b[..., 48:], 32) | high << 4, **_k_scales(b)}


def _q6_k(b: Tensor) -> Tensors:
    codes = _nibbles(b[..., :128], 64) | (_planes(b[..., 128:192], range(0, 8, 2), 32) & 3) << 4
    scales = b[..., 192:208].contiguous().view(torch.int8)
    return {"codes": _signed(codes, 32), "scales": scales, "super_scales": _half(b, 208)}


def _mxfp4(b: Tensor) -> Tensors:
    exponents = b[..., :1].to(torch.int16)
    # 2 to the power of (exponent - 127); the lowest is no normal number
    scales = torch.where(exponents > 0, exponents << 7, 64).to(torch.int16).view(torch.bfloat16)
    return {"codes": _nibbles(b[..., 1:], 16), "scales": scales}


def _tq1_0(b: Tensor) -> Tensors:
    def trits(own: Tensor, run: int, powers: tuple[int, ...]) -> Tensor:
        shifted = _cut(own, (-1, 1, run)) * torch.tensor(powers, dtype=torch.uint8)[:, None]
        return ((shifted.to(torch.int16) * 3) >> 8).to(torch.uint8).flatten(-3)

    powers = (1, 3, 9, 27, 81)
    parts = trits(b[..., :32], 32, powers), trits(b[..., 32:48], 16, powers), trits(b[..., 48:52], 4, powers[:4])
    return {"codes": _signed(torch.cat(parts, -1), 1), "scales": _half(b, 52)}


def _tq2_0(b: Tensor) -> Tensors:
    return {"codes": _signed(_planes(b[..., :64], range(0, 8, 2), 32) & 3, 1), "scales": _half(b, 64)}


def _iq4_nl(b: Tensor) -> Tensors:
    values = torch.tensor(_NONLINEAR, dtype=torch.int8)
    return {"codes": values[_nibbles(b[..., 2:], 16).long()], "scales": _half(b, 0)}


def _iq4_xs(b: Tensor) -> Tensors:
    high = _word(b, 2, 2) >> torch.arange(0, 16, 2) & 3
    low = _planes(b[..., 4:8], range(0, 8, 4), 1) & 15
    codes = torch.tensor(_NONLINEAR, dtype=torch.int8)[_nibbles(b[..., 8:], 16).long()]
    scales = _signed(low | high.to(torch.uint8) << 4, 32)
    return {"codes": codes, "scales": scales, "super_scales": _half(b, 0)}


@cache
def _grids() -> Mapping[str, Tensor]:
    """Return the values of each grid: float32 [places, 8 or 4]."""
    found = {}
    for text in _GRIDS.read_text(encoding="ascii").split("\ngrid ")[1:]:
        head, _, digits = text.partition("\n")
        name, bits, *values = head.split()
        packed = torch.frombuffer(bytearray.fromhex(digits), dtype=torch.uint8)
        places = (packed[:, None] >> torch.arange(0, 8, int(bits), dtype=torch.uint8)).flatten() & 2 ** int(bits) - 1
        grid = torch.tensor([float(each) for each in values])[places.long()]
        found[name] = grid.view(-1, 4 if name.startswith("IQ3") else 8)
    return found


def _flips(bits: Tensor) -> Tensor:
    return 1.0 - 2.0 * bits.float()


def _indexed_flips(words: Tensor) -> Tensor:
    """Return the signs of runs of 32 whose words hold four indices of 7 bits; the eighth sign makes them even."""
    seven = (words[..., None] >> torch.arange(0, 28, 7) & 127).to(torch.uint8)
    bits = _bits(seven[..., None])[..., :7]
    return _flips(torch.cat((bits, bits.sum(-1, keepdim=True).to(torch.uint8) & 1), -1)).flatten(-3)


def _scaled(scales: Tensor, values: Tensor) -> Tensor:
    """Return values [..., n] times the scales of their groups [..., groups]."""
    return scales.repeat_interleave(values.shape[-1] // scales.shape[-1], -1) * values


def _iq2_xxs(b: Tensor) -> Tensor:
    words = _cut(_word(b, 2, 4, 16), (8, 2))
    places = _cut(b[..., 2:66], (8, 8))[..., :4].flatten(-2).long()
    scales = _half(b, 0).float() * (0.5 + (words[..., 1] >> 28).float()) * 0.25
    return _scaled(scales, _grids()["IQ2_XXS"][places].flatten(-2)) * _indexed_flips(words[..., 1])


def _iq2_xs(b: Tensor) -> Tensor:
    words = _word(b, 2, 2, 32)
    scales = _half(b, 0).float() * (0.5 + (_planes(b[..., 66:74], range(0, 8, 4), 1) & 15).float()) * 0.25
    signs = (words >> 9).to(torch.uint8)
    bits = _bits(signs[..., None])[..., :7]
    flips = _flips(torch.cat((bits, bits.sum(-1, keepdim=True).to(torch.uint8) & 1), -1)).flatten(-2)
    return _scaled(scales, _grids()["IQ2_XS"][words & 511].flatten(-2)) * flips


def _iq2_s(b: Tensor) -> Tensor:
    high = _planes(b[..., 66:74], range(0, 8, 2), 1).long() & 3
    places = b[..., 2:34].long() | high << 8
    scales = _half(b, 0).float() * (0.5 + (_planes(b[..., 74:82], range(0, 8, 4), 1) & 15).float()) * 0.25
    return _scaled(scales, _grids()["IQ2_S"][places].flatten(-2)) * _flips(_bits(b[..., 34:66]))


def _iq3_xxs(b: Tensor) -> Tensor:
    words = _word(b, 66, 4, 8)
    scales = _half(b, 0).float() * (0.5 + (words >> 28).float()) * 0.5
    return _scaled(scales, _grids()["IQ3_XXS"][b[..., 2:66].long()].flatten(-2)) * _indexed_flips(words)


def _iq3_s(b: Tensor) -> Tensor:
    places = b[..., 2:66].long() | _bits(b[..., 66:74]).long() << 8
    scales = _half(b, 0).float() * (1 + 2 * (_planes(b[..., 106:110], range(0, 8, 4), 1) & 15)).float()
    return _scaled(scales, _grids()["IQ3_S"][places].flatten(-2)) * _flips(_bits(b[..., 74:106]))


def _iq1_s(b: Tensor) -> Tensor:
    words = _word(b, 34, 2, 8)
    places = b[..., 2:34].long() | (words[..., None] >> torch.arange(0, 12, 3) & 7).flatten(-2) << 8
    delta = (0.125 - 0.25 * (words >> 15).float()).repeat_interleave(32, -1)
    scales = _half(b, 0).float() * (2 * (words >> 12 & 7) + 1).float()
    return _scaled(scales, _grids()["IQ1_S"][places].flatten(-2) + delta)


def _iq1_m(b: Tensor) -> Tensor:
    words, high = _word(b, 48, 2, 4), _planes(b[..., 32:48], range(0, 8, 4), 1)
    scale = ((words >> 12 & 15) << torch.arange(0, 16, 4)).sum(-1, keepdim=True).to(torch.int16).view(torch.float16)
    scales = scale.float() * (2 * (words[..., None] >> torch.arange(0, 12, 3) & 7).flatten(-2) + 1).float()
    places = b[..., :32].long() | (high & 7).long() << 8
    delta = (0.125 - 0.25 * (high >> 3 & 1).float()).repeat_interleave(8, -1)
    return _scaled(scales, _grids()["IQ1_S"][places].flatten(-2) + delta)


@dataclass(frozen=True, slots=True)
class BlockType:
    """How the blocks of a type are decoded: blocks uint8 [..., bytes] → the tensors of `spec`, each [..., of a block].

    Without a spec: → float32 [..., 256].
    """

    num_bytes: int
    spec: CodeSpec | None
    decode: Callable[[Tensor], Tensors] | Callable[[Tensor], Tensor]


_F16: Final = torch.float16
BLOCK_TYPES: Final[Mapping[str, BlockType]] = {
    "Q4_0": BlockType(18, CodeSpec(4, 32, "none", _F16), _q4_0),
    "Q4_1": BlockType(20, CodeSpec(4, 32, "minimums", _F16), _q4_1),
    "Q5_0": BlockType(22, CodeSpec(8, 32, "none", _F16), _q5_0),
    "Q5_1": BlockType(24, CodeSpec(8, 32, "minimums", _F16), _q5_1),
    "Q8_0": BlockType(34, CodeSpec(8, 32, "none", _F16), _q8_0),
    "Q2_K": BlockType(84, CodeSpec(4, 16, "minimums", torch.int8, 256), _q2_k),
    "Q3_K": BlockType(110, CodeSpec(4, 16, "none", torch.int8, 256), _q3_k),
    "Q4_K": BlockType(144, CodeSpec(4, 32, "minimums", torch.int8, 256), _q4_k),
    "Q5_K": BlockType(176, CodeSpec(8, 32, "minimums", torch.int8, 256), _q5_k),
    "Q6_K": BlockType(210, CodeSpec(8, 16, "none", torch.int8, 256), _q6_k),
    "Q8_K": BlockType(292, CodeSpec(8, 256, "none", torch.float32), _q8_k),
    "IQ4_NL": BlockType(18, CodeSpec(8, 32, "none", _F16), _iq4_nl),
    "IQ4_XS": BlockType(136, CodeSpec(8, 32, "none", torch.int8, 256), _iq4_xs),
    "MXFP4": BlockType(17, CodeSpec(4, 32, "none", torch.bfloat16, is_float=True), _mxfp4),
    "TQ1_0": BlockType(54, CodeSpec(4, 256, "none", _F16), _tq1_0),
    "TQ2_0": BlockType(66, CodeSpec(4, 256, "none", _F16), _tq2_0),
    "IQ1_S": BlockType(50, None, _iq1_s),
    "IQ1_M": BlockType(56, None, _iq1_m),
    "IQ2_XXS": BlockType(66, None, _iq2_xxs),
    "IQ2_XS": BlockType(74, None, _iq2_xs),
    "IQ2_S": BlockType(82, None, _iq2_s),
    "IQ3_XXS": BlockType(98, None, _iq3_xxs),
    "IQ3_S": BlockType(110, None, _iq3_s),
}


def decoded(kind: BlockType, rows: Tensor) -> Tensors:
    """Return what rows of whole blocks, uint8 [..., bytes], hold: the tensors of the spec, or `weight` without one."""
    found = kind.decode(_cut(rows, (-1, kind.num_bytes)))
    return {name: each.flatten(-2) for name, each in (found if isinstance(found, dict) else {"weight": found}).items()}


def dequantized(kind: BlockType, rows: Tensor) -> Tensor:
    """Return the values of rows of whole blocks, uint8 [..., bytes] → float32 [..., inputs]."""
    found = decoded(kind, rows.reshape(-1, rows.shape[-1]))
    values = found["weight"] if kind.spec is None else kind.spec.dequantized(found)
    return values.view(*rows.shape[:-1], -1)


class GGUF(StoredFormat):
    """Reads blocks: of a weight there is one tensor of them, or two that are its parts."""

    name = "gguf"
    suffixes = (*(SUFFIX + each for pair in PARTS for each in pair), _ORDER)

    def __init__(self, section: Section) -> None:
        """The config says nothing of types: every tensor has one."""

    def spec_of(self, name: str) -> CodeSpec | None:
        return None

    def open(self, name: str, parts: Parts) -> StoredWeight:
        pair = next((pair for pair in PARTS if SUFFIX + pair[0] in parts or SUFFIX + pair[-1] in parts), ("",))
        own = [needed(parts, name, SUFFIX + each) for each in pair]
        label, shape = " and ".join(dict.fromkeys(each.dtype for each in own)), _joined_shape(own, pair)
        kind = BLOCK_TYPES.get(own[0].dtype)
        order = rows_of(parts[_ORDER]) if _ORDER in parts else None
        is_matrix = len(shape) > 1 and pair[0] != "/keys"
        if kind is None or kind.spec is None or len({each.dtype for each in own}) > 1 or not is_matrix:
            return StoredWeight(
                shape, label, {"weight": lambda rows: _in_order(_joined(own, pair, rows, _plain), order)}
            )

        def reader(tensor: str) -> Callable[[slice], Tensor]:
            return lambda rows: _joined(own, pair, rows, lambda part, of: decoded(kind, rows_of(part, of))[tensor])

        read: dict[str, Read] = {tensor: reader(tensor) for tensor in kind.spec.tensor_specs(1, kind.spec.group)}
        if order is None:
            return StoredWeight(shape, label, read, kind.spec)
        read["order"] = lambda _: order
        return StoredWeight(shape, label, read, replace(kind.spec, has_order=True), digest(order))


def _in_order(values: Tensor, order: Tensor | None) -> Tensor:
    return values if order is None else torch.empty_like(values).index_copy_(-1, order.long(), values)


def _plain(part: Part, rows: slice) -> Tensor:
    values = rows_of(part, rows)
    return values.float() if part.dtype in FLOATS else finite(part, dequantized(BLOCK_TYPES[part.dtype], values))


def _joined_shape(own: list[Part], pair: tuple[str, ...]) -> tuple[int, ...]:
    """Return the shape of the weight that the parts make. Raises CheckpointError where they do not fit."""
    if len(own) == 1:
        return own[0].shape
    (first, *_), second = shapes = own[0].shape, own[1].shape
    if pair[0] == "/keys":
        if len(shapes[0]) != 3 or len(second) != 3 or (first, shapes[0][1]) != (second[0], second[2]):
            raise CheckpointError(f"{own[0].name} has shape {list(shapes[0])}, beside {list(second)} of {own[1].name}")
        return first * (shapes[0][2] + second[1]), second[2]
    expect_shape(own[1], shapes[0], own[0].name)
    return (2 * first, *second[1:]) if _joins_rows(own) else (first, 2 * second[1], *second[2:])


def _joins_rows(own: list[Part]) -> bool:
    """Return whether dimension 0 counts outputs, not experts."""
    return len(own[0].shape) == 2 and ".experts." not in own[0].name


def _joined(own: list[Part], pair: tuple[str, ...], rows: slice, read: Callable[[Part, slice], Tensor]) -> Tensor:
    """Return rows of a weight from what `read` returns of its parts."""
    if len(own) == 1:
        return read(own[0], rows)
    if pair[0] == "/keys":
        keys, values = (read(each, ALL) for each in own)
        return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)[rows]
    if _joins_rows(own):
        return torch.cat([read(each, ALL) for each in own])[rows]
    both = [read(each, rows) for each in own]
    return torch.stack(both, 2).flatten(1, 2) if pair[0] == "/even" else torch.cat(both, 1)
