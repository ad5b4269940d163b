"""The encoder of dots.ocr: that of transformers' Dots 3 Note, without norms of heads and without experts.

Source: https://arxiv.org/abs/2512.02498.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from octavo.config.checkpoint import Checkpoint
from octavo.models.encoder import library_config
from octavo.models.vision import ImageReader


class _Encoder(nn.Module):
    """Makes vectors of images, by the name that models of transformers have for that."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.dots3_note import modeling_dots3_note

        vision: Any = modeling_dots3_note.Dots3NoteVisionModel
        self.vision_tower: Any = vision._from_config(config, attn_implementation="sdpa")
        for block in self.vision_tower.blocks:
            block.attn.q_norm = block.attn.k_norm = nn.Identity()

    def get_image_features(self, pixel_values: Tensor, image_grid_thw: Tensor, return_dict: bool) -> Any:
        """Return the result of transformers' class, whose pooler_output is [vectors, hidden]."""
        return self.vision_tower(pixel_values, grid_thw=image_grid_thw, return_dict=return_dict)


class DotsOcrReader(ImageReader):
    """Placed as the base before Qwen2's class, it makes that class dots.ocr."""

    ENCODER = _Encoder

    @classmethod
    def read_library(cls, c: Checkpoint) -> Any:
        """Return transformers' config of the encoder. Raises CheckpointError or UnsupportedModel."""
        vision = c.stored.part("vision_config")
        vision.expect_all(post_norm=True, temporal_patch_size=1)
        width, layers = vision.positive("embed_dim", 1536), vision.positive("num_hidden_layers", 42)
        merged, bias = vision.positive("spatial_merge_size", 2), vision.bool("use_bias", False)
        values = {
            "hidden_size": width,
            "intermediate_size": vision.positive("intermediate_size", 4224),
            "num_hidden_layers": layers,
            "num_attention_heads": vision.positive("num_attention_heads", 12),
            "num_channels": vision.positive("num_channels", 3),
            "patch_size": vision.positive("patch_size", 14),
            "spatial_merge_size": merged,
            "rms_norm_eps": vision.positive_float("rms_norm_eps", 1e-5),
            "attention_bias": bias,
            "mlp_bias": bias,
            "mlp_layer_types": ["dense"] * layers,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 10_000.0},
            "adapter_in_dim": width,
            "adapter_out_dim": c.positive("hidden_size"),
            "adapter_merge_size": merged,
        }
        return library_config(Checkpoint(c.path, values), "Dots3NoteVisionConfig")
