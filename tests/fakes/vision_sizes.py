"""Small sizes of models that read images, and the tokens of their tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SIZELESS_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "patch_size": 14,
}
TOWER: dict[str, Any] = {**SIZELESS_TOWER, "image_size": 56}
SIDE = {"height": 56, "width": 56}
PIXELS = {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 32}
PINNED = [[56, 112], [112, 56], [112, 112]]
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
DEEP = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
NO_HEAD_DIM = {name: value for name, value in TEXT.items() if name != "head_dim"}
DEEPSTACK = {**DEEP, "depth": 3, "patch_size": 16, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 64}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 32,
}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}
SPECIALS = [
    *("<pad>", "<s>", "</s>", "<unk>", "<image>", "<end>", "<start>", "<video>", "[IMG_BREAK]", "[IMG_END]"),
    *("<img>", "</img>", "<fake_token_around_image>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
]
IMAGE, VIDEO, START, END = (SPECIALS.index(each) for each in ("<image>", "<video>", "<start>", "<end>"))


class _Transformers:
    def __getattr__(self, name: str) -> Any:
        import transformers  # takes a second

        return getattr(transformers, name)


tf = _Transformers()


class Settings:
    """Those of an image processor that transformers has with torchvision alone."""

    def __init__(self, name: str, **values: Any) -> None:
        self.values = {"image_processor_type": name, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, **values}

    def save_pretrained(self, path: Path) -> None:
        (path / "preprocessor_config.json").write_text(json.dumps(self.values))
