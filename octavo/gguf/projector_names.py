"""Names of tensors in llama.cpp's vision encoders, and those that the layout of Hugging Face has for them."""

from __future__ import annotations

from typing import Final


def siglip(root: str) -> dict[str, str]:
    layer = f"{root}.encoder.layers.{{}}"
    return {
        "v.patch_embd": f"{root}.embeddings.patch_embedding",
        "v.position_embd": f"{root}.embeddings.position_embedding",
        "v.post_ln": f"{root}.post_layernorm",
        **{f"v.blk.{{}}.attn_{each}": f"{layer}.self_attn.{each}_proj" for each in ("q", "k", "v", "out")},
        "v.blk.{}.ln1": f"{layer}.layer_norm1",
        "v.blk.{}.ln2": f"{layer}.layer_norm2",
        "v.blk.{}.ffn_up": f"{layer}.mlp.fc1",
        "v.blk.{}.ffn_down": f"{layer}.mlp.fc2",
    }


GATED: Final = ("gate", "up", "down")
TWO: Final = ((1, "up"), (2, "down"))
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
    **{f"v.blk.{{}}.attn_{each}": f"visual.blocks.{{}}.attn.qkv/{place}" for place, each in enumerate("qkv")},
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
    **{f"v.blk.{{}}.ffn_{each}": f"visual.blocks.{{}}.mlp.linear_fc{place}" for place, each in TWO},
    "v.post_ln": "visual.merger.norm",
    "mm.0": "visual.merger.linear_fc1",
    "mm.2": "visual.merger.linear_fc2",
    "v.deepstack.{}.norm": "visual.deepstack_merger_list.{}.norm",
    **{f"v.deepstack.{{}}.fc{each}": f"visual.deepstack_merger_list.{{}}.linear_fc{each}" for each in (1, 2)},
}
PIXTRAL: Final = {
    "v.patch_embd": "vision_tower.patch_conv",
    "v.pre_ln": "vision_tower.ln_pre",
    **{
        f"v.blk.{{}}.attn_{each}": f"vision_tower.transformer.layers.{{}}.attention.{ours}_proj"
        for each, ours in (("q", "q"), ("k", "k"), ("v", "v"), ("out", "o"))
    },
    "v.blk.{}.ln1": "vision_tower.transformer.layers.{}.attention_norm",
    "v.blk.{}.ln2": "vision_tower.transformer.layers.{}.ffn_norm",
    **{f"v.blk.{{}}.ffn_{each}": f"vision_tower.transformer.layers.{{}}.feed_forward.{each}_proj" for each in GATED},
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
    **{
        f"v.blk.{{}}.{theirs}": f"vision_tower.encoder.layer.{{}}.{ours}"
        for theirs, ours in {
            **{f"attn_{each}": f"attention.{each}_proj" for each in "qkv"},
            **{f"attn_{each}_norm": f"attention.{each}_norm" for each in "qk"},
            "attn_out": "attention.projection_layer",
            "ln1": "layernorm_before",
            "ln2": "layernorm_after",
            "ls1": "lambda_1!",
            "ls2": "lambda_2!",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
        }.items()
    },
    "mm.model.mlp.0": "multi_modal_projector.layer_norm",
    "mm.model.mlp.1": "multi_modal_projector.linear_1",
    "mm.model.mlp.3": "multi_modal_projector.linear_2",
}
GEMMA4_LINEARS: Final = {
    **{f"attn_{each}": f"self_attn.{each}_proj" for each in "qkv"},
    "attn_out": "self_attn.o_proj",
    **{f"ffn_{each}": f"mlp.{each}_proj" for each in GATED},
}
GEMMA4: Final = {
    "mm.input_projection": "embed_vision.embedding_projection",
    "v.patch_embd": "vision_tower.patch_embedder.input_proj",
    "v.position_embd": "vision_tower.patch_embedder.position_embedding_table!",
    **{f"v.std_{each}": f"vision_tower.std_{each}!" for each in ("bias", "scale")},
    **{
        f"v.blk.{{}}.{theirs}": f"vision_tower.encoder.layers.{{}}.{ours}"
        for theirs, ours in {
            **{name: f"{own}.linear" for name, own in GEMMA4_LINEARS.items()},
            **{
                f"{name}.{end}": f"{own}.{end}!"
                for name, own in GEMMA4_LINEARS.items()
                for end in ("input_min", "input_max", "output_min", "output_max")
            },
            **{f"attn_{each}_norm": f"self_attn.{each}_norm" for each in "qk"},
            "ln1": "input_layernorm",
            "ln2": "pre_feedforward_layernorm",
            "attn_post_norm": "post_attention_layernorm",
            "ffn_post_norm": "post_feedforward_layernorm",
        }.items()
    },
}
LLAMA4: Final = {
    "v.class_embd": "vision_model.class_embedding!",
    "v.position_embd": "vision_model.positional_embedding_vlm!",
    "v.patch_embd": "vision_model.patch_embedding.linear",
    "v.pre_ln": "vision_model.layernorm_pre",
    "v.post_ln": "vision_model.layernorm_post",
    **{
        f"v.blk.{{}}.{theirs}": f"vision_model.model.layers.{{}}.{ours}"
        for theirs, ours in {
            **{f"attn_{each}": f"self_attn.{each}_proj" for each in "qkv"},
            "attn_out": "self_attn.o_proj",
            "ln1": "input_layernorm",
            "attn_post_norm": "post_attention_layernorm",
            "ln2": "post_attention_layernorm",
            **{f"ffn_{each}": f"mlp.fc{place}" for place, each in TWO},
        }.items()
    },
    **{f"mm.model.mlp.{place}": f"vision_model.vision_adapter.mlp.fc{place}" for place in (1, 2)},
    "mm.model.fc": "multi_modal_projector.linear_1",
}
