"""Names of tensors in llama.cpp's vision encoders, and those that the layout of Hugging Face has for them."""

from __future__ import annotations

from typing import Final

from octavo.gguf.names import named


def siglip(root: str) -> dict[str, str]:
    return {
        "v.patch_embd": f"{root}.embeddings.patch_embedding",
        "v.position_embd": f"{root}.embeddings.position_embedding",
        "v.post_ln": f"{root}.post_layernorm",
        **named("v.blk.{}.attn_*", f"{root}.encoder.layers.{{}}.self_attn.*_proj", ("q", "k", "v", "out")),
        **named("v.blk.{}.ln*", f"{root}.encoder.layers.{{}}.layer_norm*", "12"),
        **named("v.blk.{}.ffn_*", f"{root}.encoder.layers.{{}}.mlp.*", TWO),
    }


TWO: Final = {"up": "fc1", "down": "fc2"}
LLAMAS: Final = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
LLAVA_TEXTS: Final = {"llama": "llama", "qwen2": "qwen2", "phi3": "phi3"}
LLAVA: Final = {
    **siglip("vision_tower"),
    "v.class_embd": "vision_tower.embeddings.class_embedding!",
    "v.pre_ln": "vision_tower.pre_layrnorm",
    "mm.0": "multi_modal_projector.linear_1",
    "mm.2": "multi_modal_projector.linear_2",
    **dict.fromkeys(("v.image_newline", "model.image_newline"), "image_newline!"),
}
QWEN_LAYER: Final = {
    "v.patch_embd": "visual.patch_embed.proj",
    "v.blk.{}.attn_out": "visual.blocks.{}.attn.proj",
    "v.blk.{}.ln1": "visual.blocks.{}.norm1",
    "v.blk.{}.ln2": "visual.blocks.{}.norm2",
}
QWEN2: Final = {
    **QWEN_LAYER,
    **named("v.blk.{}.attn_*", "visual.blocks.{}.attn.qkv/*", {"q": "0", "k": "1", "v": "2"}),
    "v.post_ln": "visual.merger.ln_q",
    "mm.0": "visual.merger.mlp.0",
    "mm.2": "visual.merger.mlp.2",
}
QWEN3_TYPES: Final = {
    "qwen3vl": "qwen3_vl",
    "qwen3vlmoe": "qwen3_vl_moe",
    "qwen35": "qwen3_5",
    "qwen35moe": "qwen3_5_moe",
}
QWEN3: Final = {
    **QWEN_LAYER,
    "v.position_embd": "visual.pos_embed",
    "v.blk.{}.attn_qkv": "visual.blocks.{}.attn.qkv",
    **named("v.blk.{}.ffn_*", "visual.blocks.{}.mlp.linear_*", TWO),
    "v.post_ln": "visual.merger.norm",
    "mm.0": "visual.merger.linear_fc1",
    "mm.2": "visual.merger.linear_fc2",
    "v.deepstack.{}.norm": "visual.deepstack_merger_list.{}.norm",
    **named("v.deepstack.{}.fc*", "visual.deepstack_merger_list.{}.linear_fc*", "12"),
}
PIXTRAL: Final = {
    "v.patch_embd": "vision_tower.patch_conv",
    "v.pre_ln": "vision_tower.ln_pre",
    **named("v.blk.{}.attn_*", "vision_tower.transformer.layers.{}.attention.*_proj", "qkv"),
    "v.blk.{}.attn_out": "vision_tower.transformer.layers.{}.attention.o_proj",
    "v.blk.{}.ln1": "vision_tower.transformer.layers.{}.attention_norm",
    "v.blk.{}.ln2": "vision_tower.transformer.layers.{}.ffn_norm",
    **named("v.blk.{}.ffn_*", "vision_tower.transformer.layers.{}.feed_forward.*_proj"),
    "mm.1": "multi_modal_projector.linear_1",
    "mm.2": "multi_modal_projector.linear_2",
    "mm.input_norm": "multi_modal_projector.norm",
    "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
}
TURNED: Final = ("v.blk.{}.attn_q", "v.blk.{}.attn_k")
INTERNVL: Final = {
    "v.class_embd": "vision_tower.embeddings.cls_token!",
    "v.position_embd": "vision_tower.embeddings.position_embeddings!",
    "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
    **named(
        "v.blk.{}.*",
        "vision_tower.encoder.layer.{}.*",
        {
            **named("attn_*", "attention.*_proj", "qkv"),
            **named("attn_*_norm", "attention.*_norm", "qk"),
            "attn_out": "attention.projection_layer",
            "ln1": "layernorm_before",
            "ln2": "layernorm_after",
            "ls1": "lambda_1!",
            "ls2": "lambda_2!",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        },
    ),
    "mm.model.mlp.0": "multi_modal_projector.layer_norm",
    "mm.model.mlp.1": "multi_modal_projector.linear_1",
    "mm.model.mlp.3": "multi_modal_projector.linear_2",
}
GEMMA4_LINEARS: Final = {
    **named("attn_*", "self_attn.*_proj", "qkv"),
    "attn_out": "self_attn.o_proj",
    **named("ffn_*", "mlp.*_proj"),
}
GEMMA4: Final = {
    "mm.input_projection": "embed_vision.embedding_projection",
    "v.patch_embd": "vision_tower.patch_embedder.input_proj",
    "v.position_embd": "vision_tower.patch_embedder.position_embedding_table!",
    **named("v.std_*", "vision_tower.std_*!", ("bias", "scale")),
    **named(
        "v.blk.{}.*",
        "vision_tower.encoder.layers.{}.*",
        {
            **named("*", "*.linear", GEMMA4_LINEARS),
            **{
                f"{name}.{end}": f"{own}.{end}!"
                for name, own in GEMMA4_LINEARS.items()
                for end in ("input_min", "input_max", "output_min", "output_max")
            },
            **named("attn_*_norm", "self_attn.*_norm", "qk"),
            "ln1": "input_layernorm",
            "ln2": "pre_feedforward_layernorm",
            "attn_post_norm": "post_attention_layernorm",
            "ffn_post_norm": "post_feedforward_layernorm",
        },
    ),
}
LLAMA4: Final = {
    "v.class_embd": "vision_model.class_embedding!",
    "v.position_embd": "vision_model.positional_embedding_vlm!",
    "v.patch_embd": "vision_model.patch_embedding.linear",
    "v.pre_ln": "vision_model.layernorm_pre",
    "v.post_ln": "vision_model.layernorm_post",
    **named(
        "v.blk.{}.*",
        "vision_model.model.layers.{}.*",
        {
            **named("attn_*", "self_attn.*_proj", "qkv"),
            "attn_out": "self_attn.o_proj",
            "ln1": "input_layernorm",
            "attn_post_norm": "post_attention_layernorm",
            "ln2": "post_attention_layernorm",
            **named("ffn_*", "mlp.*", TWO),
        },
    ),
    **named("mm.model.mlp.*", "vision_model.vision_adapter.mlp.fc*", "12"),
    "mm.model.fc": "multi_modal_projector.linear_1",
}
