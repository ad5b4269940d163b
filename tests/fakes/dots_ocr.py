"""dots.ocr in plain torch, with the names of its release: Qwen2 with an encoder of patches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM


class _Block(nn.Module):
    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.qkv, self.attn.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp.fc1, self.mlp.fc3 = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.mlp.fc2 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        """x [patches, width], angles [patches, head / 2] → [patches, width]."""
        parts: Any = self.attn.qkv(self.norm1(x)).view(len(x), 3, self.heads, -1).permute(1, 2, 0, 3)
        q, k, v = parts  # each [heads, patches, head]
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
        q, k = (each * cos + torch.cat([-each.chunk(2, -1)[1], each.chunk(2, -1)[0]], -1) * sin for each in (q, k))
        seen = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1) @ v
        x = x + self.attn.proj(seen.transpose(0, 1).flatten(1))
        gated = F.silu(self.mlp.fc1(self.norm2(x))) * self.mlp.fc3(self.norm2(x))
        return x + self.mlp.fc2(gated)


class _Tower(nn.Module):
    def __init__(self, width: int, inner: int, heads: int, layers: int, patch: int, outputs: int) -> None:
        super().__init__()
        self.head, self.patch = width // heads, patch
        self.patch_embed = nn.Module()
        self.patch_embed.patchifier = nn.Module()
        self.patch_embed.patchifier.proj = nn.Conv2d(3, width, patch, patch)
        self.patch_embed.patchifier.norm = nn.RMSNorm(width, 1e-5)
        self.blocks = nn.ModuleList([_Block(width, inner, heads) for _ in range(layers)])
        self.post_trunk_norm = nn.RMSNorm(width, 1e-5)
        self.merger = nn.Module()
        self.merger.ln_q = nn.LayerNorm(width, 1e-6)
        self.merger.mlp = nn.Sequential(nn.Linear(4 * width, 4 * width), nn.GELU(), nn.Linear(4 * width, outputs))

    def forward(self, pixels: Tensor, grids: Tensor) -> Tensor:
        made, first = [], 0
        for _, rows, columns in grids.tolist():
            made.append(self._image(pixels[first : first + rows * columns], rows, columns))
            first += rows * columns
        return torch.cat(made)

    def _image(self, pixels: Tensor, rows: int, columns: int) -> Tensor:
        patchifier = self.patch_embed.patchifier
        x = patchifier.norm(patchifier.proj(pixels.view(-1, 3, self.patch, self.patch)).flatten(1))
        # patches that are merged follow each other
        places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), -1)
        places = places.view(rows // 2, 2, columns // 2, 2, 2).transpose(1, 2).reshape(-1, 2)
        speeds = 10_000.0 ** -(torch.arange(0, self.head // 2, 2) / (self.head // 2))
        angles = (places[:, :, None] * speeds).flatten(1)
        for block in self.blocks:
            x = block(x, angles)
        merged: Tensor = self.merger.mlp(self.merger.ln_q(self.post_trunk_norm(x)).view(len(x) // 4, -1))
        return merged


class DotsOCRConfig(Qwen2Config):
    """Has the config of the encoder as it is stored."""

    model_type = "dots_ocr"


class DotsOCRForCausalLM(Qwen2ForCausalLM):
    """Reads images at the places of their tokens."""

    config_class = DotsOCRConfig

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__(config)
        v = config.vision_config
        sizes = (v["embed_dim"], v["intermediate_size"], v["num_attention_heads"], v["num_hidden_layers"])
        self.vision_tower = _Tower(*sizes, v["patch_size"], config.hidden_size)

    def forward(self, input_ids: Tensor, pixel_values: Tensor, image_grid_thw: Tensor, **others: Any) -> Any:
        """Return what Qwen2 does of vectors."""
        vectors = self.model.embed_tokens(input_ids)
        images = self.vision_tower(pixel_values, image_grid_thw)
        vectors[input_ids == self.config.image_token_id] = images
        return super().forward(inputs_embeds=vectors)
