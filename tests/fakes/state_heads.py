"""Random heads that guess from one state of tiny models, and what they guess, in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import gelu, silu

from tests.fakes.draft_heads import HIDDEN

INNER, MOST = 48, 3


def write_medusa(path: Path, vocab_size: int, **config: Any) -> Path:
    """Write a Medusa head of two layers for each guess, as vLLM's checkpoints are."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(MOST):
        shapes |= {f"blocks.{i}.layers.{j}.weight": (HIDDEN, HIDDEN) for j in range(2)}
        shapes |= {f"blocks.{i}.layers.{j}.bias": (HIDDEN,) for j in range(2) if config.get("medusa_fc_bias")}
        if not config.get("original_lm_head"):
            shapes[f"lm_heads.{i}.weight"] = vocab_size, HIDDEN
    if config.get("original_lm_head"):
        shapes["lm_head.weight"] = vocab_size, HIDDEN
    sizes = {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": HIDDEN, "num_heads": MOST}
    return _write(
        path, shapes, sizes | {"num_hidden_layers": 2, "truncated_vocab_size": vocab_size}, vocab_size, config
    )


def write_speculator_head(path: Path, vocab_size: int, **config: Any) -> Path:
    """Write an MLP speculator, as IBM's checkpoints are."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(1 if config.get("tie_weights") else MOST):
        shapes |= {
            f"speculator.emb.{i}.weight": (vocab_size, INNER),
            f"speculator.head.{i}.weight": (vocab_size, INNER),
        }
        shapes |= {f"speculator.ln.{i}.weight": (INNER,), f"speculator.ln.{i}.bias": (INNER,)}
    for i in range(2 if config.get("tie_weights") else MOST):
        shapes[f"speculator.proj.{i}.weight"] = INNER, INNER if i else HIDDEN
    sizes = {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "emb_dim": HIDDEN}
    return _write(path, shapes, sizes | {"inner_dim": INNER, "n_predict": MOST}, vocab_size, config)


def _write(path: Path, shapes: dict[str, tuple[int, ...]], sizes: Any, vocab_size: int, config: Any) -> Path:
    generator = torch.Generator().manual_seed(7)
    tensors = {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(sizes | {"vocab_size": vocab_size} | config))
    save_file(tensors, str(path / "model.safetensors"))
    return path


def state_guesses(path: Path, state: Tensor, token: int, count: int) -> list[int]:
    """Return what a head guesses behind a token. state: the model's last one before it, [hidden]."""
    weights = {name.removeprefix("speculator."): each for name, each in load_file(path / "model.safetensors").items()}
    config, found = json.loads((path / "config.json").read_text()), list[int]()
    if config.get("scale_input"):
        state = state / (state.pow(2).mean() + 1e-6).sqrt() / 2**0.5
    for i in range(count):
        if config["model_type"] == "medusa":
            made = _block(weights, state, i)
            logits = weights.get("lm_head.weight", weights.get(f"lm_heads.{i}.weight")) @ made
        else:
            of, after = (0, min(i, 1)) if config.get("tie_weights") else (i, i)
            kept = 0.5 ** (0.5 / MOST)
            embedded = weights[f"emb.{of}.weight"][[token, *found][-1]]
            x = weights[f"proj.{after}.weight"] @ state + ((1 - kept**2) * INNER / 2) ** 0.5 / kept * embedded
            x = x / (x.pow(2).mean() + 1e-6).sqrt() * weights[f"ln.{of}.weight"] + weights[f"ln.{of}.bias"]
            state = gelu(x)
            logits = weights[f"head.{of}.weight"] @ state
        found.append(int(logits.argmax()))
    return found


def _block(weights: dict[str, Tensor], x: Tensor, number: int) -> Tensor:
    for layer in range(2):
        name = f"blocks.{number}.layers.{layer}"
        x = x + silu(weights[f"{name}.weight"] @ x + weights.get(f"{name}.bias", torch.zeros(HIDDEN)))
    return x
