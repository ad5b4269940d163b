"""Checkpoints of a training run: weights and optimizer state as safetensors, progress as JSON."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.octavo_tiny.network import Network


@dataclass
class Progress:
    """How far a run is: optimizer steps, tokens seen, seconds of training, the next document to generate."""

    steps: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    next_document: int = 0


def save_checkpoint(
    directory: Path, network: Network, optimizers: list[torch.optim.Optimizer], progress: Progress
) -> None:
    """Write a checkpoint; a run killed in the middle leaves the previous one whole."""
    directory.mkdir(parents=True, exist_ok=True)
    names: dict[Tensor, str] = {parameter: name for name, parameter in network.named_parameters()}
    state: dict[str, Tensor] = {}
    for optimizer in optimizers:
        for parameter, entries in optimizer.state.items():
            for key, value in entries.items():
                state[f"{names[parameter]}/{key}"] = value.clone() if isinstance(value, Tensor) else torch.tensor(value)
    weights = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    everything = {f"weights/{name}": tensor for name, tensor in weights.items()}
    everything |= {f"optimizer/{name}": tensor for name, tensor in state.items()}
    unfinished = directory / "unfinished.safetensors"
    # progress travels inside the same file, so that the two can never disagree
    save_file(everything, unfinished, metadata={"progress": json.dumps(asdict(progress))})
    unfinished.replace(directory / "checkpoint.safetensors")


def load_checkpoint(directory: Path, network: Network, optimizers: list[torch.optim.Optimizer]) -> Progress:
    """Load the checkpoint of `directory` into the network and its optimizers; return how far it was."""
    path = directory / "checkpoint.safetensors"
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        progress = Progress(**json.loads(file.metadata()["progress"]))
    parameters = dict(network.named_parameters())
    owners = {
        parameter: optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    with torch.no_grad():
        for key, tensor in tensors.items():
            section, _, rest = key.partition("/")
            if section == "weights":
                parameters[rest].copy_(tensor)
                continue
            name, _, entry = rest.partition("/")
            owners[parameters[name]].state[parameters[name]][entry] = tensor
    return progress
