"""Tiny random checkpoints of models that make vectors, with the files of sentence-transformers in either layout."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

IDENTITY = "torch.nn.modules.linear.Identity"
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(96))]


def write_tokenizer(path: Path, *, ends: bool = True, words: tuple[str, ...] = ()) -> None:
    """Write a tokenizer of words that has <s> A </s> B </s>, and token types 1 for B."""
    known = [*WORDS[: len(WORDS) - len(words)], *words]
    made = Tokenizer(models.WordLevel({word: place for place, word in enumerate(known)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(WORDS[:3])
    if ends:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    made.save(str(path / "tokenizer.json"))
    special = {"bos": "<s>", "cls": "<s>", "eos": "</s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>"}
    config: dict[str, Any] = {f"{name}_token": token for name, token in special.items()}
    names = ["input_ids", "token_type_ids", "attention_mask"]
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": names}
    (path / "tokenizer_config.json").write_text(json.dumps(config))


def _place(name: str, is_new: bool) -> str:
    """The module of sentence-transformers that has the class `name`."""
    if not is_new:
        return "sentence_transformers.models"
    owner = "sentence_transformer" if name == "Pooling" else "base"
    return f"sentence_transformers.{owner}.modules.{name.lower()}"


def write_modules(path: Path, pooling: dict[str, Any] | str, *after: str, dense: torch.nn.Linear | None = None) -> None:
    """Write modules.json and what it names. pooling: a mode in the new layout, or all of the config. after: last words
    of the class paths of modules behind pooling."""
    is_new = isinstance(pooling, str)
    names = ["Transformer", "Pooling", *after]
    modules = [
        {"idx": n, "name": str(n), "path": f"{n}_{name}" if n else "", "type": f"{_place(name, is_new)}.{name}"}
        for n, name in enumerate(names)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    config = {"embedding_dimension": 64, "pooling_mode": pooling, "include_prompt": True} if is_new else pooling
    (path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    if dense is not None:
        folder = path / "2_Dense"
        folder.mkdir(exist_ok=True)
        values = {
            "in_features": dense.in_features,
            "out_features": dense.out_features,
            "bias": dense.bias is not None,
            "activation_function": "torch.nn.modules.activation.Tanh",
        }
        (folder / "config.json").write_text(json.dumps(values))
        save_file({f"linear.{name}": value for name, value in dense.state_dict().items()}, folder / "model.safetensors")


def write_splade(path: Path, strategy: str = "max", function: str = "relu") -> None:
    """Write modules.json and what it names of a model whose vectors have a weight for each token."""
    place = "sentence_transformers.sparse_encoder.models"
    names = ["MLMTransformer", "SpladePooling"]
    modules = [{"type": f"{place}.{name}", "path": f"{n}_{name}" if n else ""} for n, name in enumerate(names)]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_SpladePooling").mkdir()
    config = {"pooling_strategy": strategy, "activation_function": function, "word_embedding_dimension": 100}
    (path / "1_SpladePooling" / "config.json").write_text(json.dumps(config))


SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "pad_token_id": 0,
}


def save(path: Path, name: str, **config: Any) -> Any:
    """Write a random model of a class of transformers, with a tokenizer, and return it."""
    import transformers

    config_class = getattr(transformers, re.sub(r"(For[A-Z]\w+|Model)$", "Config", name))
    made = getattr(transformers, name)._from_config(config_class(**SIZES | config), attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for parameter in made.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_vector = parameter.dim() == 1
            parameter.copy_(noise * 0.2 + 1.0 if is_vector else noise * 2.0 / parameter.shape[-1] ** 0.5)
        made.save_pretrained(path)
    write_tokenizer(path)
    return made


def write_late_interaction(path: Path, projection: torch.Tensor, **keys: Any) -> None:
    """Write the files of a late-interaction model as PyLate does. projection: [size, hidden]."""
    types = ["sentence_transformers.models.Transformer", "pylate.models.Dense.Dense"]
    folders = ["", "1_Dense"]
    modules = [{"idx": n, "name": str(n), "path": folders[n], "type": kind} for n, kind in enumerate(types)]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Dense").mkdir(exist_ok=True)
    size, hidden = projection.shape
    (path / "1_Dense" / "config.json").write_text(
        json.dumps({"in_features": hidden, "out_features": size, "bias": False, "activation_function": IDENTITY})
    )
    save_file({"linear.weight": projection}, path / "1_Dense" / "model.safetensors")
    given = {"model_type": "ColBERT", "query_prefix": "w90 ", "document_prefix": "w91 ", "query_length": 16} | keys
    (path / "config_sentence_transformers.json").write_text(json.dumps(given))
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mask_token": "w95"}))
