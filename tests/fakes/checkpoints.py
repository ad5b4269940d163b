"""Tiny random checkpoints of every family, written by transformers as the hub's are, and transformers as the oracle."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.fakes.families import ENCODERS, FAMILIES, OTHER_ARCHITECTURES, WITH_ENCODERS

_COMMON: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2_WORDS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_OWN_WORDS = {
    "dbrx": {
        "hidden_size": "d_model",
        "intermediate_size": None,
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "max_position_embeddings": "max_seq_len",
    },
    "gpt_neo": {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
    "bloom": {"intermediate_size": None},
    "mpt": {"intermediate_size": None, "max_position_embeddings": None},
    "gpt2": _GPT2_WORDS,
    "gpt_bigcode": _GPT2_WORDS,
    "codegen": _GPT2_WORDS,
    "gptj": _GPT2_WORDS,
    "longcat_flash": {"intermediate_size": "ffn_hidden_size", "num_hidden_layers": None},
    **{each: {"intermediate_size": None} for each in ("deepseek_v4", "kolibri1")},
    "moonshine": {
        "num_hidden_layers": "decoder_num_hidden_layers",
        "num_attention_heads": "decoder_num_attention_heads",
    },
    "opt": {"intermediate_size": None},
    "whisper": {
        "hidden_size": "d_model",
        "intermediate_size": "decoder_ffn_dim",
        "num_hidden_layers": "decoder_layers",
        "num_attention_heads": None,
        "max_position_embeddings": "max_target_positions",
    },
}


def family_config(family: str, **overrides: Any) -> Any:
    """transformers' config of a small model of `family`; `overrides` are keys of it."""
    import transformers

    config_name, model_name, own = (FAMILIES | WITH_ENCODERS | ENCODERS)[family]
    words = _OWN_WORDS.get(family, {})
    sizes = {words.get(key, key): value for key, value in {**_COMMON, **own, **overrides}.items()}
    sizes.pop(None, None)
    architecture = OTHER_ARCHITECTURES.get(family, model_name)
    made = getattr(transformers, config_name)
    if family in ("bailing_moe_v2_5", "nemotron-nas"):  # of which transformers has no config
        made = type(config_name, (made,), {"model_type": family})
    return made(**sizes, architectures=[architecture])


_MADE: dict[str, dict[str, bytes]] = {}
"""The files of checkpoints that were made in this process: many tests make the same ones."""


def make_checkpoint(
    family: str, path: Path, *, seed: int = 0, dtype: str = "float32", max_shard_size: str = "50GB", **overrides: Any
) -> Path:
    """Write a random model of `family` to `path` and answer `path`; `overrides` are keys of its config.

    Weights are spread wider than those of a fresh model, so that logits differ clearly and no vector is all ones or
    zeros. Dimensions: vocabulary 130, hidden 32, two layers, four heads, 256 positions.
    """
    key = repr((family, seed, dtype, max_shard_size, sorted(overrides.items())))
    if key not in _MADE:
        with TemporaryDirectory() as folder:
            _save_checkpoint(Path(folder), family, seed, dtype, max_shard_size, overrides)
            _MADE[key] = {file.name: file.read_bytes() for file in Path(folder).iterdir()}
    path.mkdir(parents=True, exist_ok=True)
    for name, content in _MADE[key].items():
        (path / name).write_bytes(content)
    return path


def _save_checkpoint(
    path: Path, family: str, seed: int, dtype: str, max_shard_size: str, overrides: Mapping[str, Any]
) -> None:
    import torch
    import transformers

    config = family_config(family, **overrides)
    if family == "step3p5":  # whose text model has no class of its own with a head
        vision = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 28}
        config = transformers.Step3p7Config(text_config=config.to_dict(), vision_config=vision)
    if family == "minimax_m3_vl":
        vision = {"hidden_size": 24, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        text = config.to_dict()
        config = transformers.MiniMaxM3VLConfig(text_config=text, vision_config=vision, projector_hidden_size=8)
    if family == "inkling":
        vision = {"patch_size": 4, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1}
        audio = {"n_mel_bins": 2, "mel_vocab_size": 2}
        config = transformers.InklingConfig(text_config=config.to_dict(), vision_config=vision, audio_config=audio)
    if family == "glm5_next":
        vision = {"hidden_size": 8, "intermediate_size": 8, "depth": 1, "num_heads": 1, "out_hidden_size": 32}
        config = transformers.Glm5NextConfig(text_config=config.to_dict(), vision_config=vision)
    if family == "mistral_large4":
        vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        vision |= {"model_type": "pixtral", "patch_size": 4, "image_size": 32}
        config = transformers.MistralLarge4Config(text_config=config.to_dict(), vision_config=vision)
    if family == "muse_glimmer":
        vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        sizes = {"out_hidden_size": 32, "projector_hidden_size": 8}
        config = transformers.MuseGlimmerConfig(text_config=config.to_dict(), vision_config=vision, **sizes)
    if family == "ernie4_5_vl_moe":
        vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1}
        config = transformers.Ernie4_5_VLMoeConfig(
            text_config=config.to_dict(), vision_config=vision, tie_word_embeddings=config.tie_word_embeddings
        )
    make = getattr(transformers, (FAMILIES | WITH_ENCODERS | ENCODERS)[family][1])
    if family == "nemotron-nas":
        from tests.fakes.nemotron_nas import llama_of_blocks as make
    model = make(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        corrections = [each for each in model.named_buffers() if each[0].endswith("correction_bias")]
        for name, parameter in (*model.named_parameters(), *corrections):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(noise * 0.2 + (0.0 if name.endswith("bias") else 1.0))
            else:
                parameter.copy_(noise * 2.0 / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.8)
            if name.endswith("tid2eid"):  # experts of tokens
                scores = torch.randn((len(buffer), config.n_routed_experts), generator=generator)
                buffer.copy_(scores.argsort(1)[:, : buffer.shape[1]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=max_shard_size)
    if family in OTHER_ARCHITECTURES:
        edit_config(path, architectures=[OTHER_ARCHITECTURES[family]])
    if family == "bailing_moe_v2_5":
        _to_ling(path, generator)


def _to_ling(path: Path, generator: Any) -> None:
    """Rewrite DeepSeek V3's tensors as Ling 2.5 has them, with linear attention in the first layer of each pair."""
    import torch
    from safetensors.torch import load_file

    stored, made = load_file(path / "model.safetensors"), {}
    for name, tensor in stored.items():
        if "layers.0.self_attn." not in name:
            name = name.replace("embed_tokens", "word_embeddings").replace(".self_attn.o_proj.", ".attention.dense.")
            name = name.replace(".self_attn.", ".attention.").replace("e_score_correction_bias", "expert_bias")
            made[name] = tensor
    config, dtype = json.loads((path / "config.json").read_text()), stored["lm_head.weight"].dtype
    hidden, dim = config["hidden_size"], config["head_dim"]
    width = config["num_attention_heads"] * dim
    shapes = {"query_key_value": (3 * width, hidden), "dense": (hidden, width), "g_proj": (width, hidden)}
    for name, shape in (shapes | {"query_layernorm": (dim,), "key_layernorm": (dim,), "g_norm": (width,)}).items():
        noise = torch.randn(shape, generator=generator)
        weight = 1.0 + 0.2 * noise if len(shape) == 1 else 2.0 * noise / shape[1] ** 0.5
        made[f"model.layers.0.attention.{name}.weight"] = weight.to(dtype)
    edit_tensors(path, remove=tuple(stored), **made)


def load_oracle(path: Path) -> Any:
    """The checkpoint as transformers reads it, in float32 with its plainest attention."""
    import torch
    import transformers

    # this class is not among those that AutoModelForCausalLM chooses from
    config = json.loads((path / "config.json").read_text())
    is_mistral4 = config["architectures"] == ["Mistral4ForCausalLM"]
    attention = "sdpa" if config.get("alibi") else "eager"  # which adds Falcon's slopes twice
    loader = transformers.Mistral4ForCausalLM if is_mistral4 else transformers.AutoModelForCausalLM
    in_another = ("ernie4_5_vl_moe", "glm5_next", "minimax_m3_vl", "mistral_large4", "muse_glimmer", "step3p7")
    in_another += ("inkling_mm_model",)
    if config["model_type"] in in_another:
        loader = transformers.AutoModelForImageTextToText
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = loader.from_pretrained(path, dtype=torch.float32, attn_implementation=attention)
    module = sys.modules[type(model).__module__]
    if hasattr(module, "torch_recurrent_gated_delta_rule"):  # in pieces of 64 tokens it is further from the formula
        module.torch_chunk_gated_delta_rule = module.torch_recurrent_gated_delta_rule  # type: ignore[attr-defined]
    if hasattr(module, "recurrent_kimi_delta_attention"):
        module.chunk_kimi_delta_attention = module.recurrent_kimi_delta_attention  # type: ignore[attr-defined]
    return model.eval()


def edit_config(path: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Change keys of the checkpoint's config.json."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    for name in remove:
        config.pop(name, None)
    file.write_text(json.dumps({**config, **changes}))


def to_old_layout(path: Path) -> None:
    """Rewrite config.json as older releases did: `rope_theta` beside `rope_scaling`, and `torch_dtype`."""
    config = json.loads((path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    (path / "config.json").write_text(json.dumps(config))


def edit_tensors(path: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Rewrite model.safetensors without the tensors `remove` and with `changes` (`name=tensor`)."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    for name in remove:
        del tensors[name]
    save_file({**tensors, **changes}, path / "model.safetensors", metadata={"format": "pt"})


def rename_tensors(path: Path, old_prefix: str, new_prefix: str) -> None:
    """Replace what stands before the names in model.safetensors."""
    from safetensors.torch import load_file, save_file

    tensors = {
        (new_prefix + name.removeprefix(old_prefix) if name.startswith(old_prefix) else name): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def to_layout_with_images(path: Path, architecture: str, prefix: str = "model.language_model.", **text: Any) -> None:
    """Rewrite a checkpoint as the text model of one that reads images too.

    `prefix` stands before the names of the text model; `text` replaces keys of its config, None removes one.
    """
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((path / "config.json").read_text())
    outer = {"architectures": [architecture], "model_type": "outer", "dtype": config.pop("dtype"), "eos_token_id": 2}
    del config["architectures"]
    nested = {name: value for name, value in {**config, **text}.items() if value is not None}
    outer.update(vision_config={"hidden_size": 8, "num_hidden_layers": 1}, text_config=nested)
    (path / "config.json").write_text(json.dumps(outer))
    head = prefix.removesuffix("model.") if prefix.startswith("language_model.") else ""
    renamed = {
        prefix + name.removeprefix("model.") if name.startswith("model.") else head + name: tensor
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    beside = "model." if prefix.startswith("model.") else ""
    for part in ("vision_tower.encoder.layers.0.fc1.weight", "vision_tower.norm.bias", "multi_modal_projector.weight"):
        renamed[beside + part] = torch.ones(8)
    save_file(renamed, path / "model.safetensors", metadata={"format": "pt"})


def to_pytorch_archive(path: Path) -> None:
    """Replace model.safetensors by pytorch_model.bin."""
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
