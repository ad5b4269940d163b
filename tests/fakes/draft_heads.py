"""Random heads for tiny models, and what they guess, in plain torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

HEADS, KV_HEADS, DIM, EPS = 4, 2, 16, 1e-6
HIDDEN, WIDTH = HEADS * DIM, 128


class Head(NamedTuple):
    """A head's weights, and how it computes. forward: (embedded, states), each [tokens, width] → stream."""

    weights: dict[str, Tensor]
    forward: Callable[[Tensor, Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]
    ids: Sequence[int] | None = None


def write_head(
    path: Path, vocab_size: int, *, is_third: bool, draft_vocab: int | None = None, hidden: int = HIDDEN, **config: Any
) -> Path:
    """Write the checkpoint of an EAGLE head, or of an EAGLE-3 head."""
    generator = torch.Generator().manual_seed(5)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * (1.5 / columns**0.5)

    layer, inputs = ("midlayer", 2 * hidden) if is_third else ("layers.0", hidden)
    tensors = {
        f"{layer}.self_attn.q_proj.weight": matrix(HEADS * DIM, inputs),
        f"{layer}.self_attn.k_proj.weight": matrix(KV_HEADS * DIM, inputs),
        f"{layer}.self_attn.v_proj.weight": matrix(KV_HEADS * DIM, inputs),
        f"{layer}.self_attn.o_proj.weight": matrix(hidden, HEADS * DIM),
        f"{layer}.mlp.gate_proj.weight": matrix(WIDTH, hidden),
        f"{layer}.mlp.up_proj.weight": matrix(WIDTH, hidden),
        f"{layer}.mlp.down_proj.weight": matrix(hidden, WIDTH),
        f"{layer}.post_attention_layernorm.weight": torch.rand(hidden, generator=generator) + 0.5,
        "fc.weight": matrix(hidden, (3 if is_third else 2) * hidden),
    }
    if is_third:
        assert draft_vocab is not None
        chosen = torch.randperm(vocab_size, generator=generator)[:draft_vocab].sort().values
        tensors |= {
            f"{layer}.input_layernorm.weight": torch.rand(hidden, generator=generator) + 0.5,
            f"{layer}.hidden_norm.weight": torch.rand(hidden, generator=generator) + 0.5,
            "norm.weight": torch.rand(hidden, generator=generator) + 0.5,
            "lm_head.weight": matrix(draft_vocab, hidden),
            "d2t": chosen - torch.arange(draft_vocab),
            "t2d": torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, chosen, True),
        }
        config["draft_vocab_size"] = draft_vocab
    else:
        tensors |= {
            "fc.bias": torch.randn(hidden, generator=generator),
            "embed_tokens.weight": matrix(vocab_size, hidden),
        }
    sizes = {
        "architectures": ["LlamaForCausalLMEagle3" if is_third else "LlamaForCausalLM"], "model_type": "llama",
        "vocab_size": vocab_size, "hidden_size": hidden, "intermediate_size": WIDTH, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM, "rms_norm_eps": EPS,
        "max_position_embeddings": 512, "rope_theta": 10000.0, "hidden_act": "silu",
    }  # fmt: skip
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(sizes | config))
    save_file(tensors, str(path / "model.safetensors"))
    return path


def read_head(path: Path, head_of_model: Tensor, *, is_third: bool) -> Head:
    """Read a head. head_of_model: the weight that makes the model's logits, [tokens, hidden]."""
    weights = load_file(str(path / "model.safetensors"))
    layer = "midlayer" if is_third else "layers.0"

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, (HIDDEN,), weights[name], EPS)

    def mlp(x: Tensor) -> Tensor:
        gate, up, down = (weights[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return silu(x @ gate.T) * (x @ up.T) @ down.T

    def forward(embedded: Tensor, states: Tensor) -> Tensor:
        if not is_third:
            x = torch.cat((embedded, states), 1) @ weights["fc.weight"].T + weights["fc.bias"]
            read = x
        else:
            x = states @ weights["fc.weight"].T if states.shape[1] == 3 * HIDDEN else states
            read = torch.cat(
                (norm(embedded, f"{layer}.input_layernorm.weight"), norm(x, f"{layer}.hidden_norm.weight")), 1
            )
        x = x + attention(read, {name: weights[f"{layer}.self_attn.{name}_proj.weight"] for name in "qkvo"})
        return x + mlp(norm(x, f"{layer}.post_attention_layernorm.weight"))

    if not is_third:
        return Head(weights, forward, lambda x: x @ head_of_model.T)
    ids = (weights["d2t"] + torch.arange(len(weights["d2t"]))).tolist()
    return Head(weights, forward, lambda x: norm(x, "norm.weight") @ weights["lm_head.weight"].T, ids)


def attention(x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    """Causal attention of rotated heads, x [tokens, inputs] → [tokens, hidden]."""
    angles = torch.outer(torch.arange(len(x)).float(), 10000.0 ** (-torch.arange(0, DIM, 2).float() / DIM))
    cos, sin = torch.cat([angles.cos()] * 2, 1), torch.cat([angles.sin()] * 2, 1)

    def heads(name: str, *, turns: bool) -> Tensor:
        y = (x @ weights[name].T).view(len(x), -1, DIM).transpose(0, 1)
        half = torch.cat((-y[..., DIM // 2 :], y[..., : DIM // 2]), -1)
        return y * cos + half * sin if turns else y

    k, v = (heads(name, turns=name == "k").repeat_interleave(HEADS // KV_HEADS, 0) for name in "kv")
    attended = scaled_dot_product_attention(heads("q", turns=True)[None], k[None], v[None], is_causal=True)[0]
    return attended.transpose(0, 1).flatten(1) @ weights["o"].T


def guesses(head: Head, embed: Tensor, states: Tensor, known: Sequence[int], count: int) -> list[int]:
    """Return what the head guesses behind `known`. states: of all known tokens but the last, [known - 1, width]."""
    tokens, found = list(known), []
    own: list[Tensor] = []
    for _ in range(count):
        embedded = head.weights.get("embed_tokens.weight", embed)[torch.tensor(tokens[1:])]
        stream = _streams(head, embedded, states, own)[-1]
        own.append(stream)
        token = int(head.logits(stream).argmax())
        found.append(token if head.ids is None else head.ids[token])
        tokens.append(found[-1])
    return found


def _streams(head: Head, embedded: Tensor, states: Tensor, own: list[Tensor]) -> Tensor:
    """Return the streams over the model's states, and then over the head's own ones."""
    if own and states.shape[1] != HIDDEN:
        states = states @ head.weights["fc.weight"].T
    return head.forward(embedded, torch.cat([states, *(each[None] for each in own)]))
