"""Names of tensors of encoders in older checkpoints and in releases, as transformers' classes have them today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from torch import nn

from octavo.models.fallback.swap import stack
from octavo.models.mistral_names import MISTRAL_ENCODER, Renamed, own_name, renamed

_QKV: Final = ("q_proj", "k_proj", "v_proj")


class StoredNames(NamedTuple):
    """renamed: parts of names, and what stands there today. joined: layers of the encoder whose rows one tensor holds,
    by its name. turns: in it, rows of the heads of queries and keys turn in neighbouring pairs. within: the part of the
    encoder with these layers."""

    renamed: Renamed
    joined: Mapping[str, tuple[str, ...]] = {}
    turns: bool = False
    within: str = ""

    def todays(self, name: str) -> str:
        """Return the name of a stored tensor today, with what is before all names or without."""
        return own_name(name, self.renamed)

    def stack(self, encoder: nn.Module, vision: Any) -> None:
        """Let the layers of an encoder be read from the tensors that hold several. vision: transformers' config."""
        for stored, parts in self.joined.items():
            num_heads = vision.num_attention_heads if self.turns else 0
            stack(encoder.get_submodule(self.within), parts, stored, num_heads)


_DEEPSEEK_OCR: Final = renamed(
    r"^(?:model\.)?",
    (r"projector\.layers\.", "multi_modal_projector."),
    ("view_seperator$", "view_separator"),
    (r"qwen2_model\.query_(\d+)\.", r"vision_tower.query_\1_resolution."),
    (r"qwen2_model\.model\.model\.", "vision_tower.vision_encoder."),
    (r"vision_model\.transformer\.", "vision_model.encoder."),
    (r"vision_model\.", "vision_tower.vision_encoder."),
    (r"sam_model\.blocks\.(\d+)\.norm([12])\.", r"sam_model.layers.\1.layer_norm\2."),
    (r"sam_model\.blocks\.", "sam_model.layers."),
    (r"sam_model\.patch_embed\.proj\.", "sam_model.patch_embed.projection."),
    (r"sam_model\.neck\.0\.", "sam_model.neck.conv1."),
    (r"sam_model\.neck\.1\.", "sam_model.neck.layer_norm1."),
    (r"sam_model\.neck\.2\.", "sam_model.neck.conv2."),
    (r"sam_model\.neck\.3\.", "sam_model.neck.layer_norm2."),
    (r"sam_model\.net_2\.", "sam_model.proj.conv1."),
    (r"sam_model\.net_3\.", "sam_model.proj.conv2."),
    (r"sam_model\.", "vision_tower.sam_encoder."),
)
_INTERN: Final = renamed(
    "",
    (r"^mlp1\.0\.", "multi_modal_projector.layer_norm."),
    (r"^mlp1\.1\.", "multi_modal_projector.linear_1."),
    (r"^mlp1\.3\.", "multi_modal_projector.linear_2."),
    (r"^vision_model\.embeddings\.class_embedding$", "vision_tower.embeddings.cls_token"),
    (r"^vision_model\.embeddings\.position_embedding$", "vision_tower.embeddings.position_embeddings"),
    (
        r"^vision_model\.embeddings\.patch_embedding\.",
        "vision_tower.embeddings.patch_embeddings.projection.",
    ),
    (r"^vision_model\.encoder\.layers\.(\d+)\.", r"vision_tower.encoder.layer.\1."),
    (r"^(vision_tower\..*)\.attn\.proj\.", r"\1.attention.projection_layer."),
    (r"^(vision_tower\..*)\.attn\.", r"\1.attention."),
    (r"^(vision_tower\..*)\.norm1\.", r"\1.layernorm_before."),
    (r"^(vision_tower\..*)\.norm2\.", r"\1.layernorm_after."),
    (r"^(vision_tower\..*)\.ls([12])$", r"\1.lambda_\2"),
)
STORED: Final[Mapping[str, StoredNames]] = {
    "": StoredNames(
        renamed(
            "",
            # of models for retrieval
            (r"^vlm\.(?:model\.)?", "model."),
            (r"^(?:model\.)?vision_tower\.vision_model\.", "vision_tower."),
            (r"^mlp_AR\.", "projector."),
            # HyperCLOVA X
            (r"^model\.vision_projector\.", "projector."),
            (r"^model\.language_model\.model\.", ""),
        )
    ),
    "deepseek_ocr": StoredNames(_DEEPSEEK_OCR, {"qkv_proj": _QKV}, within="vision_tower.vision_encoder"),
    "deepseek_ocr2": StoredNames(_DEEPSEEK_OCR),
    "deepseek_vl2": StoredNames(
        renamed(
            "",
            (r"^language\.", "language_model."),
            (r"^vision\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
            (r"^vision\.norm\.", "vision.post_layernorm."),
            (r"^vision\.blocks\.", "vision.encoder.layers."),
            (r"^(vision\..*)\.norm([12])\.", r"\1.layer_norm\2."),
            (r"^(vision\..*)\.attn\.proj\.", r"\1.self_attn.out_proj."),
            (r"^(vision\..*)\.attn\.", r"\1.self_attn."),
        ),
        {"qkv": _QKV},
    ),
    "dots_ocr": StoredNames(
        renamed(
            r"^(vision_tower\.)",
            (r"patch_embed\.patchifier\.", "patch_embed."),
            (r"post_trunk_norm\.", "norm."),
            (r"blocks\.(\d+)\.mlp\.fc1\.", r"blocks.\2.mlp.gate_proj."),
            (r"blocks\.(\d+)\.mlp\.fc2\.", r"blocks.\2.mlp.down_proj."),
            (r"blocks\.(\d+)\.mlp\.fc3\.", r"blocks.\2.mlp.up_proj."),
        ),
    ),
    "ernie": StoredNames(
        renamed(
            r"^(?:model\.)?",
            (r"vision_model\.", "vision_tower."),
            (r"resampler_model\.(\w+_linear)\.0\.", r"resampler_model.\1.fc1."),
            (r"resampler_model\.(\w+_linear)\.2\.", r"resampler_model.\1.fc2."),
            (r"resampler_model\.(\w+_linear)\.3\.", r"resampler_model.\1.ln."),
        ),
    ),
    "gemma_unified": StoredNames(
        renamed(
            r"^(?:model\.)?",
            (r"vision_embedder\.", "embed_vision."),
            (r"embed_vision\.embedding_projection\.", "embed_vision.multimodal_embedder.embedding_projection."),
        )
    ),
    "hunyuan": StoredNames(
        renamed(
            r"",
            (r"^(?:model\.)?vit\.", "vision_tower."),
            (r"^(vision_tower\..*)\.mlp\.dense_h_to_4h\.", r"\1.mlp.fc1."),
            (r"^(vision_tower\..*)\.mlp\.dense_4h_to_h\.", r"\1.mlp.fc2."),
            (r"^(vision_tower\..*)\.input_layernorm\.", r"\1.layer_norm1."),
            (r"^(vision_tower\..*)\.post_attention_layernorm\.", r"\1.layer_norm2."),
            (r"^vision_tower\.perceive\.proj\.0\.", "vision_tower.patch_merger.proj_conv."),
            (r"^vision_tower\.perceive\.proj\.2\.", "vision_tower.patch_merger.proj_out."),
            (r"^vision_tower\.perceive\.", "vision_tower.patch_merger."),
            (r"^vision_tower\.patch_merger\.norm\.", "vision_tower.patch_merger.before_rms."),
        ),
    ),
    "intern": StoredNames(_INTERN, {"qkv": _QKV}),
    "kimi": StoredNames(
        renamed(
            r"",
            (r"^multi_modal_projector\.pre_norm\.", "mm_projector.pre_norm."),
            (r"^(?:mm_projector\.proj\.0|multi_modal_projector\.linear_1)\.", "mm_projector.in_proj."),
            (r"^(?:mm_projector\.proj\.2|multi_modal_projector\.linear_2)\.", "mm_projector.out_proj."),
            (r"^vision_tower\.patch_embed\.pos_emb\.weight$", "vision_tower.patch_embed.pos_emb.position_embeddings"),
            (r"^vision_tower\.encoder\.blocks\.(\d+)\.wqkv\.", r"vision_tower.layers.\1.attn.wqkv."),
            (r"^vision_tower\.encoder\.blocks\.(\d+)\.wo\.", r"vision_tower.layers.\1.attn.proj."),
            (r"^vision_tower\.encoder\.blocks\.(\d+)\.mlp\.fc1\.", r"vision_tower.layers.\1.mlp.fc2."),
            (r"^vision_tower\.encoder\.blocks\.(\d+)\.mlp\.fc0\.", r"vision_tower.layers.\1.mlp.fc1."),
            (r"^vision_tower\.encoder\.blocks\.(\d+)\.norm1\.", r"vision_tower.layers.\1.norm2."),
            (r"^vision_tower\.encoder\.blocks\.(\d+)\.norm0\.", r"vision_tower.layers.\1.norm1."),
            (r"^vision_tower\.encoder\.", "vision_tower."),
        ),
        {"wqkv": _QKV},
        turns=True,
    ),
    "lfm3": StoredNames(
        renamed(
            r"^((?:model\.)?vision_tower\..*)",
            (r"patchifier\.", "patch_embed."),
            (r"\bq_layernorm\.", "q_norm."),
            (r"\bk_layernorm\.", "k_norm."),
        ),
    ),
    "minimax": StoredNames(
        renamed(
            r"^",
            (r"patch_merge_mlp\.", "multi_modal_projector.merge_"),
            (r"vision_tower\.vision_model\.embeddings\.patch_embedding\.", "vision_tower.embeddings.proj."),
            (r"vision_tower\.vision_model\.encoder\.", "vision_tower."),
            (r"vision_tower\.vision_model\.", "vision_tower."),
        ),
    ),
    "mistral": StoredNames(MISTRAL_ENCODER, {"wq": _QKV[:1], "wk": _QKV[1:2]}, turns=True),
    "molmo2": StoredNames(
        renamed(
            r"^",
            (r"(?:model\.)?vision_backbone\.image_vit\.transformer\.resblocks\.", "vision_tower.layers."),
            (r"(?:model\.)?vision_backbone\.image_vit\.", "vision_tower."),
            (r"(?:model\.)?vision_backbone\.", "multi_modal_projector."),
        )
        + renamed(
            r"^((?:vision_tower|multi_modal_projector)\..*)\b",
            (r"attention\.w([qkv])\.", r"self_attn.\2_proj."),
            (r"attention\.wo\.", "self_attn.o_proj."),
            (r"feed_forward\.w([12])\.", r"mlp.fc\2."),
            (r"attention_norm\.", "layer_norm1."),
            (r"ffn_norm\.", "layer_norm2."),
            (r"image_pooling_2d\.w([qkvo])\.", r"image_pooling_2d.\2_proj."),
            (r"image_projector\.w1\.", "image_projector.gate_proj."),
            (r"image_projector\.w2\.", "image_projector.down_proj."),
            (r"image_projector\.w3\.", "image_projector.up_proj."),
        )
    ),
    "nemotron": StoredNames(
        renamed(
            r"^vision_model\.radio_model\.model\.patch_generator\.",
            (r"embedder\.", "vision_model.embeddings.patch_projection."),
            (r"pos_embed", "vision_model.embeddings.position_embedding"),
            (r"cls_token\.token", "vision_model.embeddings.cls_register_token"),
        )
        + renamed(
            r"^",
            (r"vision_model\.radio_model\.model\.blocks\.", "vision_model.encoder.layer."),
            (r"(vision_model\..*\.)attn\.proj\.", r"\1attention.o_proj."),
            (r"(vision_model\..*\.)attn\.qkv\.", r"\1attention.qkv."),
            (r"mlp1\.0\.", "multi_modal_projector.layer_norm."),
            (r"mlp1\.1\.", "multi_modal_projector.linear_1."),
            (r"mlp1\.3\.", "multi_modal_projector.linear_2."),
            (r"sound_encoder\.encoder\.", "audio_tower."),
            (r"sound_projection\.norm\.", "embed_audio.layer_norm."),
            (r"sound_projection\.linear([12])\.", r"embed_audio.linear_\1."),
            (r"vision_projector\.vision_final_layernorm\.", "vision_final_layernorm."),
        ),
    ),
    "opencua": StoredNames(renamed("", (r"^vision_tower\.", "visual."))),
    "phi4": StoredNames(
        renamed(
            r"^((?:model\.)?embed_tokens_extend\.image_embed\.)",
            (r"img_projection\.0\.", "img_projection_up."),
            (r"img_projection\.2\.", "img_projection_down."),
            (r"glb_GN$", "global_img_feature_extensor"),
            (r"sub_GN$", "sub_img_feature_extensor"),
        )
        + renamed(
            r"^((?:model\.)?embed_tokens_extend\.audio_embed\.(?:.*\.)?)",
            (r"(feed_forward_(?:in|out))\.net\.0\.linear\.", r"\2.gate_up_proj."),
            (r"(feed_forward_(?:in|out))\.net\.2\.", r"\2.down_proj."),
            (r"self_attn\.linear_([qkv])\.", r"self_attn.\2_proj."),
            (r"self_attn\.linear_out\.", "self_attn.o_proj."),
            (r"audio_projection\.speech\.0\.", "up_proj_for_speech."),
            (r"audio_projection\.speech\.2\.", "down_proj_for_speech."),
            (r"audio_projection\.vision\.0\.", "up_proj_for_vision_speech."),
            (r"audio_projection\.vision\.2\.", "down_proj_for_vision_speech."),
        )
    ),
    "qianfan": StoredNames(
        (*_INTERN, *renamed("", (r"^vision_tower\.encoder\.layer\.", "vision_tower.layers."))), {"qkv": _QKV}
    ),
    "step": StoredNames(
        renamed(
            r"",
            (r"^(?:model\.)?vit_large_projector\.", "multi_modal_projector."),
            (r"^(?:model\.)?vision_model\.", "vision_model."),
            (r"^vision_model\.conv1\.", "vision_model.embeddings.patch_embedding."),
            (r"^vision_model\.positional_embedding$", "vision_model.embeddings.position_embedding.weight"),
            (r"^vision_model\.transformer\.resblocks\.", "vision_model.layers."),
            (r"^vision_model\.ln_pre\.", "vision_model.pre_layernorm."),
            (r"^vision_model\.vit_", "vision_model."),
            (r"^(vision_model\..*)\.ls_([12])\.gamma$", r"\1.lambda_\2"),
            (r"^(vision_model\..*)\.c_fc\.", r"\1.fc1."),
            (r"^(vision_model\..*)\.c_proj\.", r"\1.fc2."),
            (r"^(vision_model\..*)\.attn\.", r"\1.self_attn."),
            (r"^(vision_model\..*)\.in_proj_", r"\1.in_proj."),
            (r"^(vision_model\..*)\.ln_1\.", r"\1.layernorm_before."),
            (r"^(vision_model\..*)\.ln_2\.", r"\1.layernorm_after."),
        ),
        {"in_proj": _QKV},
        turns=True,
    ),
}
"""The names by `names` of a `MediaFamily`; a family without `names` has those of models of several families."""
