"""MobileNetV5, the encoder of images of Gemma 3n: convolutions by channel between products, and attention in which all
query heads share one key and one value.

Values are [1, height, width, channels], so that products of single pixels and norms are those of rows. Convolutions
that mix channels are products, too, of each pixel's neighbours. Names are those of timm. Sources:
https://arxiv.org/abs/2404.10518; the last two stages are joined at the size of the first of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.distributed.mesh import Mesh
from octavo.layers.elementwise import activation
from octavo.layers.layer import WHOLE, TensorSlot
from octavo.layers.norm import RMSNorm
from octavo.models.fallback.swap import EncoderLinear, RowsOf

OUTPUTS: Final = 2048
"""Channels of the encoder's output."""
_STEM: Final = 64
_EPS: Final = 1e-6


class _PixelLinear(EncoderLinear):
    """A product whose weight is stored as that of a convolution, with this kernel."""

    kernel: int

    def tensor_slots(self, path: str) -> Iterator[TensorSlot]:
        for slot in super().tensor_slots(path):
            if len(slot.shape) == 1:
                yield slot
                continue
            outputs, inputs = slot.shape
            shape = (outputs, inputs // self.kernel**2, self.kernel, self.kernel)

            def fill(stored: Tensor, fill: Any = slot.fill) -> None:
                # pixels first, as their neighbours lie beside each other
                fill(stored.permute(0, 2, 3, 1).flatten(1))

            yield replace(slot, shape=shape, parts=WHOLE, fill=fill)


class _Mixed(nn.Module):
    """A convolution over all channels; with a kernel of 1 a product of single pixels."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, *, bias: bool = False) -> None:
        super().__init__()
        self._kernel, self._stride = kernel, stride
        self.octavo = _PixelLinear(inputs * kernel**2, outputs, Mesh.single(), bias=bias)
        self.octavo.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        """x [1, height, width, inputs] → [1, height / stride, width / stride, outputs]."""
        if self._kernel > 1:
            x = _padded(x, self._kernel, self._stride)
            x = x.unfold(1, self._kernel, self._stride).unfold(2, self._kernel, self._stride).permute(0, 1, 2, 4, 5, 3)
        shape = x.shape[:3]
        rows: Tensor = self.octavo(x.reshape(shape.numel(), -1))
        return rows.view(*shape, -1)


class _ByChannel(nn.Module):
    """A convolution of each channel by itself."""

    def __init__(self, channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel, kernel))
        self._kernel, self._stride = kernel, stride

    def forward(self, x: Tensor) -> Tensor:
        """x [1, height, width, channels] → [1, height / stride, width / stride, channels]."""
        padded = _padded(x, self._kernel, self._stride).permute(0, 3, 1, 2)
        return F.conv2d(padded, self.weight, stride=self._stride, groups=padded.shape[1]).permute(0, 2, 3, 1)


def _padded(x: Tensor, kernel: int, stride: int) -> Tensor:
    """Return x with zeros around it, of an odd number more behind it, so that each stride makes one pixel."""
    missing = [max((-(-side // stride) - 1) * stride + kernel - side, 0) for side in (x.shape[2], x.shape[1])]
    return F.pad(x, (0, 0, *(part for each in missing for part in (each // 2, each - each // 2))))


def _norm(channels: int) -> nn.Module:
    return RowsOf(RMSNorm(channels, _EPS))


def _gelu() -> nn.Module:
    return RowsOf(activation("gelu_pytorch_tanh"))


class _Normed(nn.Module):
    """A convolution, a norm, and mostly an activation."""

    def __init__(self, conv: nn.Module, channels: int, *, is_active: bool = True) -> None:
        super().__init__()
        self.conv, self.bn = conv, _norm(channels)
        self.act = _gelu() if is_active else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class _Scale(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class _Edge(nn.Module):
    """A convolution that expands, and a product."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        inner = 4 * inputs
        self.conv_exp, self.bn1, self.act = _Mixed(inputs, inner, 3, stride), _norm(inner), _gelu()
        self.conv_pwl, self.bn2 = _Mixed(inner, outputs), _norm(outputs)
        self._is_added = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.bn2(self.conv_pwl(self.act(self.bn1(self.conv_exp(x)))))
        return made + x if self._is_added else made


class _Inverted(nn.Module):
    """An expansion and a projection, with convolutions by channel before and between them."""

    def __init__(
        self,
        sizes: tuple[int, int],
        expansion: int,
        start: int = 0,
        mid: int = 0,
        stride: int = 1,
        *,
        is_last: bool = False,
    ) -> None:
        """sizes: channels of x and of the result. start, mid: kernels, 0 for none. is_last: nothing is added to the
        result, and it is not scaled."""
        super().__init__()
        inputs, outputs = sizes
        inner = divisible(inputs * expansion)
        self.dw_start = _Normed(_ByChannel(inputs, start), inputs, is_active=False) if start else nn.Identity()
        self.pw_exp = _Normed(_Mixed(inputs, inner), inner)
        self.dw_mid = _Normed(_ByChannel(inner, mid, stride), inner) if mid else nn.Identity()
        self.pw_proj = _Normed(_Mixed(inner, outputs), outputs, is_active=False)
        self.layer_scale = nn.Identity() if is_last else _Scale(outputs)
        self._is_added = stride == 1 and inputs == outputs and not is_last

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer_scale(self.pw_proj(self.dw_mid(self.pw_exp(self.dw_start(x)))))
        return made + x if self._is_added else made


def _read(channels: int, dim: int, stride: int) -> nn.Module:
    """Return the module that makes the keys or the values of pixels."""
    parts = nn.Sequential()
    if stride > 1:
        parts.add_module("down_conv", _ByChannel(channels, 3, stride))
        parts.add_module("norm", _norm(channels))
    parts.add_module("proj", _Mixed(channels, dim))
    return parts


class _SharedAttention(nn.Module):
    """Attention of all pixels to all others, or to those of half the height and width."""

    def __init__(self, channels: int, heads: int, dim: int, stride: int) -> None:
        super().__init__()
        self._dim = dim
        self.query: Any = nn.Module()
        self.output: Any = nn.Module()
        self.query.proj, self.output.proj = _Mixed(channels, heads * dim), _Mixed(heads * dim, channels)
        self.key, self.value = (_read(channels, dim, stride) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """x [1, height, width, channels] → the same shape."""
        # heads are further queries of the one key
        queries, keys, values = (
            part.view(1, 1, -1, self._dim) for part in (self.query.proj(x), self.key(x), self.value(x))
        )
        seen = F.scaled_dot_product_attention(queries, keys, values)
        return self.output.proj(seen.view(*x.shape[:3], -1))


class _Attending(nn.Module):
    def __init__(self, channels: int, heads: int, dim: int, stride: int = 1) -> None:
        super().__init__()
        self.norm, self.attn = _norm(channels), _SharedAttention(channels, heads, dim, stride)
        self.layer_scale = _Scale(channels)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer_scale(self.attn(self.norm(x)))
        return made + x


class _Joined(nn.Module):
    """Joins two stages, of which the second has half the height and width."""

    def __init__(self, channels: int, resolution: int) -> None:
        super().__init__()
        self.ffn, self.norm = _Inverted((channels, OUTPUTS), 2, is_last=True), _norm(OUTPUTS)
        self._resolution = resolution

    def forward(self, large: Tensor, small: Tensor) -> Tensor:
        """Return [resolution · resolution, OUTPUTS]. Raises ValueError for an image that is no multiple of it."""
        wide = small.repeat_interleave(2, 1).repeat_interleave(2, 2)
        made = self.ffn(torch.cat([large, wide], -1))
        _, height, width, channels = made.shape
        side = self._resolution
        if height % side or width % side or wide.shape[:3] != large.shape[:3]:
            raise ValueError(f"height and width of an image must be multiples of {16 * side} pixels")
        means = made.view(side, height // side, side, width // side, channels).mean((1, 3))
        normed: Tensor = self.norm(means)
        return normed.flatten(0, 1)


class MobileNet(nn.Module):
    """MobileNetV5 with 300 million parameters."""

    def __init__(self, multiplier: float = 1.0, resolution: int = 16) -> None:
        """multiplier: of channels behind the stem. resolution: rows and columns of the result."""
        super().__init__()
        widths = [divisible(each * multiplier) for each in (128, 256, 640, 1280)]
        self.conv_stem = _Normed(_Mixed(3, _STEM, 3, 2, bias=True), _STEM)
        first, second, third, last = widths
        stages: list[list[nn.Module]] = [
            [_Edge(_STEM, first, 2), _Edge(first, first, 1), _Edge(first, first, 1)],
            [
                _Inverted((first, second), 6, 3, 5, 2),
                *(_Inverted((second, second), 4, start) for start in (5, 3, 5, 3)),
            ],
            [
                _Inverted((second, third), 6, 5, 5, 2),
                *(_Inverted((third, third), 4, 5) for _ in range(7)),
                _Inverted((third, third), 1),
                *_pairs(14, third, 12, 64, 2),
            ],
            [_Inverted((third, last), 6, 5, 5, 2), *_pairs(19, last, 16, 96)],
        ]
        self.blocks = nn.ModuleList(nn.Sequential(*each) for each in stages)
        self.msfa = _Joined(third + last, resolution)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels [1, 3, height, width] → [resolution · resolution, OUTPUTS]."""
        found = [self.conv_stem(pixels.permute(0, 2, 3, 1))]
        for stage in self.blocks:
            found.append(stage(found[-1]))
        return self.msfa(*found[-2:])


def _pairs(count: int, channels: int, heads: int, dim: int, stride: int = 1) -> Iterator[nn.Module]:
    for _ in range(count):
        yield _Attending(channels, heads, dim, stride)
        yield _Inverted((channels, channels), 2)


def divisible(size: float) -> int:
    """Return the multiple of 8 next to a number of channels, of which at least 0.9 is left."""
    near = max(8, int(size + 4) // 8 * 8)
    return near + 8 if near < 0.9 * size else near
