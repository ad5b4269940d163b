"""Gemma 3n as transformers computes it, with the encoder of images in plain torch: transformers takes that of timm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.gemma3n import modeling_gemma3n


class _Norm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * self.weight.view(-1, 1, 1)


class _Conv(nn.Conv2d):
    """With as many zeros around as TensorFlow has."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1, bias: Any = False):
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        (kernel, _), (stride, _) = self.kernel_size, self.stride
        pads = [max((-(-side // stride) - 1) * stride + kernel - side, 0) for side in (x.shape[3], x.shape[2])]
        return super().forward(F.pad(x, [part for pad in pads for part in (pad // 2, pad - pad // 2)]))


def _normed(conv: nn.Module, channels: int, *, acts: bool = True) -> nn.Module:
    module = nn.Sequential()
    module.add_module("conv", conv)
    module.add_module("bn", _Norm(channels))
    if acts:
        module.add_module("act", nn.GELU(approximate="tanh"))
    return module


class _Residual(nn.Sequential):
    """Modules by name, one after the other, and x where it has the shape of what they make."""

    def __init__(self, *, adds: bool, gamma: int = 0, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.adds, self.scale = adds, None
        if gamma:
            self.layer_scale = nn.Module()
            self.layer_scale.gamma = nn.Parameter(torch.ones(gamma))
            self.scale = self.layer_scale.gamma.view(-1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        made = x
        for name, module in self.named_children():
            made = made * module.gamma.view(-1, 1, 1) if name == "layer_scale" else module(made)
        return made + x if self.adds else made


def _edge(inputs: int, outputs: int, stride: int) -> nn.Module:
    inner = 4 * inputs
    parts = {"conv_exp": _Conv(inputs, inner, 3, stride), "bn1": _Norm(inner), "act": nn.GELU(approximate="tanh")}
    parts |= {"conv_pwl": _Conv(inner, outputs), "bn2": _Norm(outputs)}
    return _Residual(adds=stride == 1 and inputs == outputs, **parts)


def _inverted(inputs: int, outputs: int, start: int, mid: int, stride: int, expansion: int, last: Any = False) -> Any:
    inner = inputs * expansion
    parts = {}
    if start:
        parts["dw_start"] = _normed(_Conv(inputs, inputs, start, 1, inputs), inputs, acts=False)
    parts["pw_exp"] = _normed(_Conv(inputs, inner), inner)
    if mid:
        parts["dw_mid"] = _normed(_Conv(inner, inner, mid, stride, inner), inner)
    parts["pw_proj"] = _normed(_Conv(inner, outputs), outputs, acts=False)
    adds = stride == 1 and inputs == outputs and not last
    return _Residual(adds=adds, gamma=0 if last else outputs, **parts)


class _Attention(nn.Module):
    def __init__(self, channels: int, heads: int, dim: int, stride: int) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.query, self.output = nn.Module(), nn.Module()
        self.query.proj, self.output.proj = _Conv(channels, heads * dim), _Conv(heads * dim, channels)
        self.key, self.value = nn.Sequential(), nn.Sequential()
        for part in (self.key, self.value):
            if stride > 1:
                part.add_module("down_conv", _Conv(channels, channels, 3, stride, channels))
                part.add_module("norm", _Norm(channels))
            part.add_module("proj", _Conv(channels, dim))

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        q = self.query.proj(x).view(batch, self.heads, self.dim, -1).transpose(2, 3)
        k, v = (part(x).flatten(2).transpose(1, 2)[:, None] for part in (self.key, self.value))
        seen = (q @ k.transpose(2, 3) * self.dim**-0.5).softmax(-1) @ v
        made: Tensor = self.output.proj(seen.transpose(2, 3).reshape(batch, -1, height, width))
        return made


def _attending(channels: int, heads: int, dim: int, stride: int) -> nn.Module:
    parts = {"norm": _Norm(channels), "attn": _Attention(channels, heads, dim, stride)}
    return _Residual(adds=True, gamma=channels, **parts)


class MobileNet(nn.Module):
    """MobileNetV5 with the names of timm."""

    def __init__(self, multiplier: float, resolution: int) -> None:
        super().__init__()
        self.resolution = resolution
        a, b, c, d = (int(each * multiplier) for each in (128, 256, 640, 1280))
        self.conv_stem = _normed(_Conv(3, 64, 3, 2, bias=True), 64)
        pairs = [(_attending(c, 12, 64, 2), _inverted(c, c, 0, 0, 1, 2)) for _ in range(14)]
        last = [(_attending(d, 16, 96, 1), _inverted(d, d, 0, 0, 1, 2)) for _ in range(19)]
        stages = [
            [_edge(64, a, 2), _edge(a, a, 1), _edge(a, a, 1)],
            [_inverted(a, b, 3, 5, 2, 6), *(_inverted(b, b, each, 0, 1, 4) for each in (5, 3, 5, 3))],
            [
                _inverted(b, c, 5, 5, 2, 6),
                *(_inverted(c, c, 5, 0, 1, 4) for _ in range(7)),
                _inverted(c, c, 0, 0, 1, 1),
            ],
            [_inverted(c, d, 5, 5, 2, 6), *(each for pair in last for each in pair)],
        ]
        stages[2] += [each for pair in pairs for each in pair]
        self.blocks = nn.Sequential(*(nn.Sequential(*each) for each in stages))
        self.msfa = nn.Module()
        self.msfa.ffn, self.msfa.norm = _inverted(c + d, 2048, 0, 0, 1, 2, last=True), _Norm(2048)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels [batch, 3, height, width] → [batch, 2048, resolution, resolution]."""
        found = [self.conv_stem(pixels)]
        for stage in self.blocks:
            found.append(stage(found[-1]))
        joined = torch.cat([found[-2], F.interpolate(found[-1], scale_factor=2)], 1)
        made: Tensor = self.msfa.norm(F.avg_pool2d(self.msfa.ffn(joined), joined.shape[-1] // self.resolution))
        return made


class _Tower(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.timm_model = MobileNet(
            config.model_args["channel_multiplier"], config.model_args["msfa_output_resolution"]
        )

    def forward(self, pixel_values: Tensor, **others: Any) -> Any:
        return SimpleNamespace(last_hidden_state=self.timm_model(pixel_values))


class _AutoModel:
    @staticmethod
    def from_config(config: Any) -> Any:
        is_vision = isinstance(config, transformers.Gemma3nVisionConfig)
        return _Tower(config) if is_vision else transformers.AutoModel.from_config(config)


class Gemma3nForConditionalGeneration(transformers.Gemma3nForConditionalGeneration):
    """Reads images and sounds at the places of their tokens."""

    def __init__(self, config: Any) -> None:
        with patch.object(modeling_gemma3n, "AutoModel", _AutoModel):
            super().__init__(config)
