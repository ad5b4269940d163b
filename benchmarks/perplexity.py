"""What quantised weights cost in quality: held-out perplexity of octavo-tiny, or of another checkpoint on its text.

`python -m benchmarks.perplexity [--model DIR] [--documents N]` prints a line per weight format: the perplexity per
token over documents of each kind, each read alone from its start, and the change against weights as they are.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from octavo import LLM, SamplingParams
from training.octavo_tiny.corpus import HELD_OUT_START, KINDS, make_documents

FORMATS = (None, "int8", "int4", "int4-g128")


def held_out(kind: str, num_documents: int) -> list[str]:
    """Documents that the training of octavo-tiny has not seen."""
    return [document.text for document in make_documents(0, HELD_OUT_START, num_documents, kind)]


def perplexity(llm: LLM, documents: Sequence[str]) -> float:
    """Per token; the first one of a document is not predicted, since nothing comes before it."""
    total, count = 0.0, 0
    for output in llm.generate(list(documents), SamplingParams(max_tokens=1, prompt_logprobs=0)):
        assert output.prompt_logprobs is not None, output.error
        for token_id, choices in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert choices is not None
            total -= choices[token_id].logprob
            count += 1
    return math.exp(total / count)


def main(command_line: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Perplexity by weight format.")
    parser.add_argument("--model", default="octavo-tiny", help="default: octavo-tiny")
    parser.add_argument("--documents", type=int, default=100, help="documents of each kind (default: 100)")
    arguments = parser.parse_args(command_line)
    plain: dict[str, float] = {}
    for quantization in FORMATS:
        line = [f"{quantization or 'unquantised':12s}"]
        with LLM(model=arguments.model, quantization=quantization) as llm:
            for kind in KINDS:
                found = perplexity(llm, held_out(kind, arguments.documents))
                change = found / plain.setdefault(kind, found) - 1
                line.append(f"{kind} {found:.4f} ({change:+.2%})")
        print("  ".join(line), flush=True)


if __name__ == "__main__":
    main()
