"""Writes a trained network as a Hugging Face directory that any engine can load, and reads such a directory back."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from training.octavo_tiny.corpus import END_OF_TEXT, MESSAGE_END
from training.octavo_tiny.network import Network, NetworkShape
from training.octavo_tiny.tokenizer import token_id, write_tokenizer


def export_model(network: Network, tokenizer: Tokenizer, directory: Path) -> None:
    """Write config, weights in bfloat16, generation defaults and tokenizer into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    end_of_text, message_end = token_id(tokenizer, END_OF_TEXT), token_id(tokenizer, MESSAGE_END)
    # tied: the embedding is stored once, and the output layer has no tensor of its own
    tensors = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in network.state_dict().items()}
    weights = directory / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    # the library writes through a private temporary file; a model is meant to be read by everybody
    weights.chmod(0o644)
    generation = {
        "eos_token_id": [end_of_text, message_end],
        "pad_token_id": end_of_text,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
    }
    config = network.shape.hugging_face_config(bos=None, eos=end_of_text, pad=end_of_text)
    for name, content in (("config.json", config), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(tokenizer, directory, network.shape.max_positions)


def load_exported(directory: Path) -> tuple[Network, Tokenizer]:
    """Return the network, in float32, and the tokenizer of a directory that `export_model` wrote."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    shape = NetworkShape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_size=config["head_dim"],
        intermediate_size=config["intermediate_size"],
        max_positions=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        norm_epsilon=config["rms_norm_eps"],
    )
    network = Network(shape)
    network.load_state_dict(load_file(directory / "model.safetensors"))
    return network, Tokenizer.from_file(str(directory / "tokenizer.json"))
