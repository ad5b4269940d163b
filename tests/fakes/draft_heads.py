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
    joined: Callable[[Tensor], Tensor] = lambda states: states
    """Makes one vector of the states that the head reads."""


def write_speculator(path: Path, verifier: Path, vocab_size: int, *, is_parallel: bool = False) -> Path:
    """Write an EAGLE-3 head for a model as the library speculators does, with norms of heads as Qwen3 has; or one that
    guesses all tokens at once (P-EAGLE)."""
    write_head(path, vocab_size, is_third=True, draft_vocab=100)
    tensors = {
        name.replace("midlayer.", "layers.0."): each for name, each in load_file(path / "model.safetensors").items()
    }
    for name in "qk":
        tensors[f"layers.0.self_attn.{name}_norm.weight"] = torch.linspace(0.5, 1.5, DIM)
    if is_parallel:
        tensors["mask_hidden"] = torch.linspace(-1, 1, 3 * HIDDEN).view(1, 1, -1)
    save_file(tensors, str(path / "model.safetensors"))
    layers = json.loads((path / "config.json").read_text())
    config = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": layers.pop("draft_vocab_size"),
        "norm_before_residual": True,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": str(verifier)},
        },
        "speculators_model_type": "eagle3",
        "target_hidden_size": None,
        "transformer_layer_config": layers | {"model_type": "qwen3"},
    }
    if is_parallel:
        config |= {"speculators_model_type": "peagle", "mask_token_id": MASK}
    (path / "config.json").write_text(json.dumps(config))
    return path


LATENT, PLAIN, TURNED, VALUE, Q_RANK = 24, 8, 8, 12, 20


def write_latent_head(path: Path, vocab_size: int) -> Path:
    """Write an EAGLE-3 head with attention over latents."""
    sizes = {"kv_lora_rank": LATENT, "qk_nope_head_dim": PLAIN, "qk_rope_head_dim": TURNED, "v_head_dim": VALUE}
    write_head(path, vocab_size, is_third=True, draft_vocab=100, model_type="deepseek_v3", q_lora_rank=Q_RANK,
               architectures=["Eagle3DeepseekV2ForCausalLM"], **sizes)  # fmt: skip
    generator = torch.Generator().manual_seed(8)
    rows = {"q_a_proj": (Q_RANK, 2 * HIDDEN), "q_b_proj": (HEADS * (PLAIN + TURNED), Q_RANK)}
    rows |= {"kv_a_proj_with_mqa": (LATENT + TURNED, 2 * HIDDEN), "kv_b_proj": (HEADS * (PLAIN + VALUE), LATENT)}
    rows |= {"o_proj": (HIDDEN, HEADS * VALUE), "q_a_layernorm": (Q_RANK,), "kv_a_layernorm": (LATENT,)}
    tensors = {name: each for name, each in load_file(path / "model.safetensors").items() if "self_attn" not in name}
    for name, shape in rows.items():
        made = torch.randn(shape, generator=generator)
        tensors[f"midlayer.self_attn.{name}.weight"] = made * 1.5 / shape[1] ** 0.5 if shape[1:] else made.abs() + 0.5
    save_file(tensors, str(path / "model.safetensors"))
    return path


def latent_attention(x: Tensor, weights: dict[str, Tensor], layer: str) -> Tensor:
    """Attention over latents, x [tokens, inputs] → [tokens, hidden]."""

    def times(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{layer}.self_attn.{name}.weight"].T

    def normed(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], weights[f"{layer}.self_attn.{name}.weight"], EPS)

    angles = torch.outer(torch.arange(len(x)).float(), 10000.0 ** (-torch.arange(0, TURNED, 2).float() / TURNED))

    def turned(y: Tensor) -> Tensor:  # pairs stand side by side
        pairs = torch.view_as_complex(y.view(*y.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    q = times(normed(times(x, "q_a_proj"), "q_a_layernorm"), "q_b_proj").view(len(x), HEADS, -1).transpose(0, 1)
    latent, key = times(x, "kv_a_proj_with_mqa").split([LATENT, TURNED], 1)
    made = times(normed(latent, "kv_a_layernorm"), "kv_b_proj").view(len(x), HEADS, -1).transpose(0, 1)
    q = torch.cat((q[..., :PLAIN], turned(q[..., PLAIN:])), -1)
    k = torch.cat((made[..., :PLAIN], turned(key).expand(HEADS, -1, -1)), -1)
    attended = scaled_dot_product_attention(q[None], k[None], made[None, ..., PLAIN:], is_causal=True)[0]
    return times(attended.transpose(0, 1).flatten(1), "o_proj")


MASK, BLOCK_LAYERS, NOTED = 7, 2, (1, 3, 5)


def write_block_head(path: Path, vocab_size: int) -> Path:
    """Write a head that guesses blocks (DFlash) of a model of HIDDEN with 8 layers."""
    generator = torch.Generator().manual_seed(6)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * (1.5 / columns**0.5)

    def ones(size: int) -> Tensor:
        return torch.rand(size, generator=generator) + 0.5

    tensors = {"fc.weight": matrix(HIDDEN, 3 * HIDDEN), "hidden_norm.weight": ones(HIDDEN), "norm.weight": ones(HIDDEN)}
    for i in range(BLOCK_LAYERS):
        sizes = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM, "o": HIDDEN}
        own = {f"self_attn.{name}_proj": matrix(size, HIDDEN) for name, size in sizes.items()}
        own |= {f"self_attn.{name}_norm": ones(DIM) for name in "qk"}
        own |= {"mlp.gate_proj": matrix(WIDTH, HIDDEN), "mlp.up_proj": matrix(WIDTH, HIDDEN)}
        own |= {"mlp.down_proj": matrix(HIDDEN, WIDTH), "input_layernorm": ones(HIDDEN)}
        own["post_attention_layernorm"] = ones(HIDDEN)
        tensors |= {f"layers.{i}.{name}.weight": each for name, each in own.items()}
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": vocab_size, "hidden_size": HIDDEN,
        "intermediate_size": WIDTH, "num_hidden_layers": BLOCK_LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": DIM, "rms_norm_eps": EPS, "max_position_embeddings": 512,
        "rope_theta": 10000.0, "hidden_act": "silu", "block_size": 8,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [each - 1 for each in NOTED]},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, str(path / "model.safetensors"))
    return path


def block_guesses(path: Path, library: Any, known: Sequence[int], count: int) -> list[int]:
    """Return what such a head guesses behind `known`; one of DSpark, token by token. library: the model, of
    transformers."""
    weights = load_file(str(path / "model.safetensors"))
    found = library(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
    states = torch.cat([found[layer][0] for layer in NOTED], 1)

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], EPS)

    context = norm(states @ weights["fc.weight"].T, "hidden_norm")
    is_markov = "markov_head.markov_w1.weight" in weights
    x = library.model.embed_tokens.weight[torch.tensor([known[-1], *[MASK] * (count - is_markov)])]
    for i in range(BLOCK_LAYERS):
        layer = f"layers.{i}"
        read = torch.cat((context, norm(x, f"{layer}.input_layernorm")))
        own = {name: weights[f"{layer}.self_attn.{name}_proj.weight"] for name in "qkvo"}
        norms = {name: weights[f"{layer}.self_attn.{name}_norm.weight"] for name in "qk"}
        x = x + attention(read, own, norms, is_causal=False)[len(context) :]
        y = norm(x, f"{layer}.post_attention_layernorm")
        gate, up, down = (weights[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = x + silu(y @ gate.T) * (y @ up.T) @ down.T
    if not is_markov:
        chosen: list[int] = library.lm_head(norm(x[1:], "norm")).argmax(-1).tolist()
        return chosen
    tokens = [known[-1]]
    for logits in library.lm_head(norm(x, "norm")):
        changes = weights["markov_head.markov_w2.weight"] @ weights["markov_head.markov_w1.weight"][tokens[-1]]
        tokens.append(int((logits + changes).argmax()))
    return tokens[1:]


def write_markov_head(path: Path, vocab_size: int) -> Path:
    """Write a DSpark head for the same model, with the keys of DeepSeek's releases."""
    write_block_head(path, vocab_size)
    generator = torch.Generator().manual_seed(10)
    tensors = load_file(path / "model.safetensors")
    tensors |= {
        "markov_head.markov_w1.weight": torch.randn(vocab_size, 6, generator=generator),
        "markov_head.markov_w2.weight": torch.randn(vocab_size, 6, generator=generator),
        "confidence_head.proj.weight": torch.randn(1, HIDDEN + 6, generator=generator),
    }
    save_file(tensors, str(path / "model.safetensors"))
    config = json.loads((path / "config.json").read_text())
    own = {"mask_token_id": MASK, "target_layer_ids": config.pop("dflash_config")["target_layer_ids"]}
    own |= {"architectures": ["Qwen3DSparkModel"], "block_size": 4, "markov_rank": 6, "markov_head_type": "vanilla"}
    (path / "config.json").write_text(json.dumps(config | own))
    return path


def write_normed_head(path: Path, vocab_size: int) -> Path:
    """Write an EAGLE-3 head of two layers with a norm wherever heads may have one."""
    write_head(path, vocab_size, is_third=True, draft_vocab=100, num_hidden_layers=2, norm_before_fc=True, fc_norm=True,
               norm_output=True)  # fmt: skip
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(9)
    for name in list(tensors):
        if name.startswith("midlayer.") and "hidden_norm" not in name:
            own = tensors[name] + 0.1 * torch.randn(tensors[name].shape, generator=generator)
            own = own[:, :HIDDEN].contiguous() if name[-13:-7] in ("q_proj", "k_proj", "v_proj") else own
            tensors[name.replace("midlayer.", "layers.1.")] = own
    tensors["input_norm.weight"] = torch.rand(3 * HIDDEN, generator=generator) + 0.5
    for i in range(3):
        tensors[f"fc_norm.{i}.weight"] = torch.rand(HIDDEN, generator=generator) + 0.5
    save_file(tensors, str(path / "model.safetensors"))
    return path


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
    weights = {name.replace("midlayer.", "layers.0."): each for name, each in weights.items()}
    config = json.loads((path / "config.json").read_text())
    layer = "layers.0"

    def norm(x: Tensor, name: str) -> Tensor:
        return rms_norm(x, (x.shape[1],), weights[name], EPS)

    def attended(x: Tensor, layer: str) -> Tensor:
        if f"{layer}.self_attn.kv_b_proj.weight" in weights:
            return latent_attention(x, weights, layer)
        return attention(x, {name: weights[f"{layer}.self_attn.{name}_proj.weight"] for name in "qkvo"}, {
            name: weights[f"{layer}.self_attn.{name}_norm.weight"]
            for name in "qk" if f"{layer}.self_attn.{name}_norm.weight" in weights
        })  # fmt: skip

    def mlp(x: Tensor, layer: str = "layers.0") -> Tensor:
        gate, up, down = (weights[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return silu(x @ gate.T) * (x @ up.T) @ down.T

    def joined(states: Tensor) -> Tensor:
        if "input_norm.weight" in weights:
            states = norm(states, "input_norm.weight")
            states = torch.cat([norm(each, f"fc_norm.{i}.weight") for i, each in enumerate(states.chunk(3, 1))], 1)
        return states @ weights["fc.weight"].T

    def forward(embedded: Tensor, states: Tensor) -> Tensor:
        if not is_third:
            x = torch.cat((embedded, states), 1) @ weights["fc.weight"].T + weights["fc.bias"]
            read = x
        else:
            x = states
            normed = norm(x, f"{layer}.hidden_norm.weight")
            read = torch.cat((norm(embedded, f"{layer}.input_layernorm.weight"), normed), 1)
            x = normed if config.get("norm_before_residual") else x
        x = x + attended(read, layer)
        x = x + mlp(norm(x, f"{layer}.post_attention_layernorm.weight"))
        if "layers.1.mlp.up_proj.weight" in weights:
            x = x + attended(norm(x, "layers.1.input_layernorm.weight"), "layers.1")
            x = x + mlp(norm(x, "layers.1.post_attention_layernorm.weight"), "layers.1")
        return norm(x, "norm.weight") if config.get("norm_output") else x

    if not is_third:
        return Head(weights, forward, lambda x: x @ head_of_model.T)
    ids = (weights["d2t"] + torch.arange(len(weights["d2t"]))).tolist()

    def logits(x: Tensor) -> Tensor:
        return (x if config.get("norm_output") else norm(x[None], "norm.weight")[0]) @ weights["lm_head.weight"].T

    return Head(weights, forward, logits, ids, joined)


def attention(x: Tensor, weights: dict[str, Tensor], norms: dict[str, Tensor], *, is_causal: bool = True) -> Tensor:
    """Attention of rotated heads, x [tokens, inputs] → [tokens, hidden]."""
    angles = torch.outer(torch.arange(len(x)).float(), 10000.0 ** (-torch.arange(0, DIM, 2).float() / DIM))
    cos, sin = torch.cat([angles.cos()] * 2, 1), torch.cat([angles.sin()] * 2, 1)

    def heads(name: str, *, turns: bool) -> Tensor:
        y = (x @ weights[name].T).view(len(x), -1, DIM).transpose(0, 1)
        y = rms_norm(y, (DIM,), norms[name], EPS) if name in norms else y
        half = torch.cat((-y[..., DIM // 2 :], y[..., : DIM // 2]), -1)
        return y * cos + half * sin if turns else y

    k, v = (heads(name, turns=name == "k").repeat_interleave(HEADS // KV_HEADS, 0) for name in "kv")
    attended = scaled_dot_product_attention(heads("q", turns=True)[None], k[None], v[None], is_causal=is_causal)[0]
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


def parallel_guesses(head: Head, embed: Tensor, states: Tensor, known: Sequence[int], count: int) -> list[int]:
    """Return what a head of P-EAGLE guesses, as `guesses` does of others."""
    assert head.ids is not None
    tokens = [*known[1:], *[MASK] * (count - 1)]
    masks = head.weights["mask_hidden"].view(1, -1).expand(count - 1, -1)
    streams = head.forward(embed[torch.tensor(tokens)], head.joined(torch.cat((states, masks))))
    return [head.ids[int(head.logits(stream).argmax())] for stream in streams[-count:]]


def _streams(head: Head, embedded: Tensor, states: Tensor, own: list[Tensor]) -> Tensor:
    """Return the streams over the model's states, and then over the head's own ones."""
    return head.forward(embedded, torch.cat([head.joined(states), *(each[None] for each in own)]))
