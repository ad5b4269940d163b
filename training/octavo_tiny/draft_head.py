"""Trains an EAGLE head for octavo-tiny: `python -m training.octavo_tiny.draft_head --output DIR`.

The head reads the model's last hidden state at a token and the embedding of the next token, and makes from them the
hidden state there, so that the model's own output layer gives the token after that (https://arxiv.org/abs/2401.15077).
Behind its first guess it reads its own states: it is trained on those too.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from training.octavo_tiny.batches import IGNORED, PackedStream, RowShape
from training.octavo_tiny.corpus import LATE_WEIGHTS
from training.octavo_tiny.export import load_exported
from training.octavo_tiny.network import FeedForward, Network, NetworkShape, Norm, rotate
from training.octavo_tiny.train import FIRST_NEW_DOCUMENT

NUM_PASSES = 3
"""Guesses in a row that are trained: from the second on the head reads its own states."""
ROWS = RowShape(rows=16, length=256)


class HeadAttention(nn.Module):
    """Grouped-query attention without norms, causal over the whole row, as the layers of Llama have it."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.shape = shape
        query_size, kv_size = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Map `[batch, length, hidden]` to the same shape."""
        heads = (*x.shape[:2], -1, self.shape.head_size)
        query, key, value = (each(x).view(heads).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj))
        query, key = (rotate(each, cosines, sines).to(value.dtype) for each in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return output


class HeadLayer(nn.Module):
    """A decoder layer without a norm before its attention."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.self_attn = HeadAttention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, eps=shape.norm_epsilon)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Map `[batch, length, hidden]` to the same shape."""
        x = x + self.self_attn(x, cosines, sines)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class Head(nn.Module):
    """The head; its parameter names are those of the checkpoint."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList([HeadLayer(shape)])
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.5 * parameter.shape[1] ** -0.5)

    def forward(self, embedded: Tensor, states: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Return the states behind the tokens that `embedded` stands for, `[batch, length, hidden]`."""
        output: Tensor = self.layers[0](self.fc(torch.cat((embedded, states), 2)), cosines, sines)
        return output


def loss_of(head: Head, model: Network, ids: Tensor, is_counted: Tensor) -> Tensor:
    """Return the cross entropy of the head's guesses with the model's distributions. ids: `[batch, length]`.
    is_counted: which tokens are followed by one, `[batch, length]`."""
    with torch.no_grad():
        states = model.hidden_states(ids)
        wanted = F.softmax(F.linear(states[:, 1:], model.model.embed_tokens.weight).float(), -1)
        embedded = model.model.embed_tokens(ids[:, 1:])
    counted = is_counted[:, 1:].unsqueeze(2).float()
    length = embedded.shape[1]
    cosines, sines = model.get_buffer("cosines")[:length], model.get_buffer("sines")[:length]
    read, loss = states[:, :-1], torch.zeros(())
    for number in range(NUM_PASSES):
        made = head(embedded, read, cosines, sines)
        logits = F.linear(made, model.model.embed_tokens.weight).float()
        difference = F.smooth_l1_loss(made.float(), states[:, 1:].float(), reduction="none").mean(2, keepdim=True)
        lost = -(wanted * F.log_softmax(logits, -1)).sum(2, keepdim=True) + difference
        loss = loss + 0.8**number * (lost * counted).sum() / counted.sum()
        read = torch.cat((states[:, :1], made[:, :-1]), 1)
    return loss


def train(
    model_path: Path, output: Path, minutes: float, intermediate_size: int, seed: int = 0, rows: RowShape = ROWS
) -> None:
    """Train for about `minutes`, with a falling learning rate, and write the checkpoint. rows: of a batch."""
    torch.manual_seed(seed)
    model, tokenizer = load_exported(model_path)
    model.requires_grad_(requires_grad=False)
    sizes = {**vars(model.shape), "intermediate_size": intermediate_size}
    head = Head(NetworkShape(**sizes))
    matrices = [each for each in head.parameters() if each.dim() == 2]
    others = [each for each in head.parameters() if each.dim() != 2]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.01, weight_decay=0.0),
    ]
    stream = PackedStream(tokenizer, seed, rows, rows, FIRST_NEW_DOCUMENT)
    began, num_steps = time.monotonic(), 0
    while (share := (time.monotonic() - began) / (60 * minutes)) < 1:
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.01 * min(1.0, (num_steps + 1) / 20) * max(0.02, 1 - share)
        ids, targets = stream.next_batch(0.0, LATE_WEIGHTS)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(head, model, torch.tensor(ids), torch.tensor(targets) != IGNORED)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        num_steps += 1
        if num_steps % 20 == 1:
            print(f"{share:4.0%}  step {num_steps}  loss {loss.item():.3f}", flush=True)
    write(head, json.loads((model_path / "config.json").read_text()), intermediate_size, output)


def write(head: Head, config: dict[str, object], intermediate_size: int, output: Path) -> None:
    """Write the head in bfloat16. config: of its model."""
    output.mkdir(parents=True, exist_ok=True)
    own = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    kept = (
        "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
        "max_position_embeddings", "rms_norm_eps", "rope_theta", "torch_dtype",
    )  # fmt: skip
    values = own | {name: config[name] for name in kept} | {"intermediate_size": intermediate_size}
    (output / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    tensors = {name: each.detach().to(torch.bfloat16).contiguous() for name, each in head.state_dict().items()}
    weights = output / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)


def main() -> None:
    """Train a head, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("octavo/builtin/octavo-tiny"))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--intermediate-size", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    train(asked.model, asked.output, asked.minutes, asked.intermediate_size)


if __name__ == "__main__":
    main()
