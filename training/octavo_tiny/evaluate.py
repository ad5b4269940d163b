"""Held-out perplexity of a network per kind of text, and small samples of what it writes.

`python -m training.octavo_tiny.evaluate [DIR]` prints those of an exported model, by default the shipped one.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from octavo.builtin import model_directory
from training.octavo_tiny.corpus import END_OF_TEXT, HELD_OUT_START, KINDS, MESSAGE_END, make_documents
from training.octavo_tiny.export import load_exported
from training.octavo_tiny.network import Network
from training.octavo_tiny.tokenizer import token_id


@torch.inference_mode()
def held_out_perplexity(network: Network, tokenizer: Tokenizer, kind: str, num_documents: int, seed: int = 0) -> float:
    """Return the perplexity per token over held-out documents of one kind, each read alone from its start.

    The first token of a document is not predicted, since nothing comes before it.
    """
    total, count = 0.0, 0
    for document in make_documents(seed, HELD_OUT_START, num_documents, kind):
        ids = torch.tensor(tokenizer.encode(document.text).ids[: network.shape.max_positions])
        logits = network(ids[None, :-1])[0].float()
        total += float(F.cross_entropy(logits, ids[1:], reduction="sum"))
        count += len(ids) - 1
    return math.exp(total / count)


@torch.inference_mode()
def continue_text(
    network: Network, tokenizer: Tokenizer, prompt: str, max_tokens: int, temperature: float = 0.0, seed: int = 0
) -> str:
    """Continue `prompt` until the model ends it or `max_tokens` are written; return the new text alone."""
    ends = {token_id(tokenizer, END_OF_TEXT), token_id(tokenizer, MESSAGE_END)}
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = tokenizer.encode(prompt).ids
    start = len(ids)
    for _ in range(min(max_tokens, network.shape.max_positions - start)):
        logits = network(torch.tensor([ids]))[0, -1].float()
        if temperature > 0:
            token = int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator))
        else:
            token = int(logits.argmax())
        if token in ends:
            break
        ids.append(token)
    text: str = tokenizer.decode(ids[start:], skip_special_tokens=False)
    return text


def print_perplexities(network: Network, tokenizer: Tokenizer, num_documents: int) -> None:
    """Print the held-out perplexity of every kind of text."""
    for kind in KINDS:
        perplexity = held_out_perplexity(network, tokenizer, kind, num_documents)
        print(f"held-out perplexity, {kind}: {perplexity:.3f} over {num_documents} documents", flush=True)


def main(command_line: list[str] | None = None) -> None:
    """Parse the command line and print the held-out perplexities."""
    parser = argparse.ArgumentParser(
        prog="python -m training.octavo_tiny.evaluate", description="Measure an exported model on held-out text."
    )
    parser.add_argument("directory", type=Path, nargs="?", default=model_directory(), help="default: the shipped model")
    parser.add_argument("--documents", type=int, default=500, help="documents of each kind (default: 500)")
    arguments = parser.parse_args(command_line)
    network, tokenizer = load_exported(arguments.directory)
    print_perplexities(network, tokenizer, arguments.documents)


if __name__ == "__main__":
    main()
