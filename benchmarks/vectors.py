"""Vectors of texts beside other runtimes: `python -m benchmarks.vectors --model FOLDER --onnx FILE --engines …`.

Each engine has a process of its own; they take turns, and ratios are those of the shortest times, above 1 where octavo
is faster. All get the same texts at once. onnxruntime and openvino run a model.onnx with inputs input_ids,
attention_mask and token_type_ids and the last hidden states, on texts sorted by length in batches of `--batch`, padded
to the longest of each, and average over the tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo.cli.report import report

LENGTHS = {"short": (6, 8, 12, 16, 20), "mixed": (4, 8, 16, 32, 64, 128, 180)}
"""Words of the texts of each load."""
NUM_TEXTS = {"short": 512, "mixed": 192}

Embed = Callable[[Sequence[str]], Any]


def texts_of(load: str, folder: Path) -> list[str]:
    """Random words of the vocabulary."""
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    words = [word for word in vocabulary if word.isalpha() and len(word) > 2]
    source = random.Random(0)
    return [" ".join(source.choices(words, k=source.choice(LENGTHS[load]))) for _ in range(NUM_TEXTS[load])]


def octavo_embed(args: argparse.Namespace) -> Embed:
    from octavo import LLM

    llm = LLM(str(args.model), dtype=args.dtype)
    return lambda texts: [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]


def library_embed(args: argparse.Namespace) -> Embed:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(args.model), device="cpu")
    return lambda texts: model.encode(list(texts), batch_size=args.batch)


def batched(args: argparse.Namespace, run: Callable[[dict[str, Any]], Any]) -> Embed:
    """Run a graph on batches of texts of like length, and average."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    tokenizer.enable_truncation(256)
    tokenizer.enable_padding()

    def embed(texts: Sequence[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        found: list[Any] = [None] * len(texts)
        for start in range(0, len(order), args.batch):
            places = order[start : start + args.batch]
            encoded = tokenizer.encode_batch([texts[place] for place in places])
            ids = np.array([each.ids for each in encoded], dtype=np.int64)
            mask = np.array([each.attention_mask for each in encoded], dtype=np.int64)
            hidden = run({"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)})
            pooled = (hidden * mask[:, :, None]).sum(1) / mask.sum(1)[:, None]
            pooled /= np.linalg.norm(pooled, axis=1)[:, None]
            for place, vector in zip(places, pooled, strict=True):
                found[place] = vector
        return np.stack(found)

    return embed


def onnxruntime_embed(args: argparse.Namespace) -> Embed:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(args.onnx), providers=["CPUExecutionProvider"])
    return batched(args, lambda inputs: session.run(None, inputs)[0])


def openvino_embed(args: argparse.Namespace) -> Embed:
    import openvino

    hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    model = openvino.Core().compile_model(str(args.onnx), "CPU", hints)
    return batched(args, lambda inputs: model(inputs)[0])


ENGINES = {
    "octavo": octavo_embed,
    "sentence-transformers": library_embed,
    "onnxruntime": onnxruntime_embed,
    "openvino": openvino_embed,
}


def serve(args: argparse.Namespace) -> None:
    """Embed the texts of each load that is asked for on standard input; print seconds and the first elements."""
    embed = ENGINES[args.serve](args)
    embed(texts_of("short", args.model)[:32])
    print("ready", flush=True)
    for line in sys.stdin:
        texts = texts_of(line.strip(), args.model)
        began, cpu = time.perf_counter(), time.process_time()
        vectors = embed(texts)
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        print(json.dumps([seconds, cpu_s, [round(float(vector[0]), 4) for vector in vectors[:4]]]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--onnx", type=Path)
    parser.add_argument("--engines", default="octavo,sentence-transformers")
    parser.add_argument("--loads", default="short,mixed")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return
    names = args.engines.split(",")
    command = [sys.executable, "-m", "benchmarks.vectors", *sys.argv[1:], "--serve"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes: dict[str, Any] = {name: subprocess.Popen([*command, name], **pipes) for name in names}  # type: ignore[call-overload]
    seconds: dict[str, dict[str, list[float]]] = {load: {name: [] for name in names} for load in args.loads.split(",")}
    cpu_seconds: dict[str, dict[str, list[float]]] = {load: {name: [] for name in names} for load in seconds}
    try:
        for process in processes.values():
            assert process.stdout.readline() == "ready\n"
        for _ in range(args.repetitions):
            for load in seconds:
                firsts = []
                for name, process in processes.items():
                    print(load, file=process.stdin, flush=True)
                    took, cpu_s, first = json.loads(process.stdout.readline())
                    seconds[load][name].append(took)
                    cpu_seconds[load][name].append(cpu_s)
                    firsts.append(first)
                assert np.allclose(firsts, firsts[0], atol=2e-3 if args.dtype == "float32" else 0.1), firsts
    finally:
        for process in processes.values():
            process.stdin.close()
            process.wait()
    figures = {}
    for load, found in seconds.items():
        best = {name: min(each) for name, each in found.items()}
        cpu = {name: statistics.median(each) for name, each in cpu_seconds[load].items()}
        figures[load] = {
            "texts_per_s": {name: round(NUM_TEXTS[load] / each, 1) for name, each in best.items()},
            "cpu_s": {name: round(each, 2) for name, each in cpu.items()},
            "ratio": {name: round(each / best[names[0]], 2) for name, each in best.items()},
        }
    report("vectors", {"arguments": {key: str(value) for key, value in vars(args).items()}}, figures)


if __name__ == "__main__":
    main()
