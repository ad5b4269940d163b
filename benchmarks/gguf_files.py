"""Decoding, prefill and memory of a GGUF file beside llama.cpp: `python -m benchmarks.gguf_files`.

A file in the shape of Qwen3-0.6B or Llama 3.2 1B is written with random weights, quantised by ggml itself; of Q4_K_M
the types are those that llama.cpp chooses, layer by layer. Both engines run it in turns. It needs llama.cpp as it is
compiled for this machine (`pip install --no-binary llama-cpp-python --target DIR llama-cpp-python`, PYTHONPATH), and
the package `gguf`.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.experts import Octavo
from octavo.cli.report import report
from octavo.config.checkpoint import Checkpoint
from octavo.devices.cpu.runtime import CpuRuntime
from octavo.distributed.mesh import Mesh
from octavo.models.loader import LoadedModel

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "qwen3-0.6b": {
        "architecture": "qwen3",
        "layers": 28,
        "hidden": 1024,
        "width": 3072,
        "heads": 16,
        "kv": 8,
        "dim": 128,
        "vocabulary": 151_936,
        "theta": 1e6,
        "norms": True,
    },
    "llama-1b": {
        "architecture": "llama",
        "layers": 16,
        "hidden": 2048,
        "width": 8192,
        "heads": 32,
        "kv": 8,
        "dim": 64,
        "vocabulary": 128_256,
        "theta": 5e5,
        "norms": False,
    },
}
TYPES: Final = ("Q4_0", "Q8_0", "Q4_K", "Q4_K_M")
SHORT: Final = list(range(10, 42))
LONG: Final = [10 + 7 * i % 4000 for i in range(512)]
_DISTINCT_ROWS: Final = 64


class Llama:
    """The file in llama.cpp."""

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp

        sizes = {"n_ctx": 1024, "n_batch": len(LONG), "n_ubatch": len(LONG)}
        self._model = llama_cpp.Llama(str(path), n_threads=threads, n_threads_batch=threads, verbose=False, **sizes)

    def seconds(self, prompt: list[int], tokens: int) -> float:
        """Return how long the prompt and `tokens` - 1 further tokens take."""
        self._model.reset()
        start = time.perf_counter()
        self._model.eval(prompt)
        for token in range(tokens - 1):
            self._model.eval([10 + token])
        return time.perf_counter() - start


def resident_bytes() -> int:
    """Return the memory that this process has, with pages of files."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def type_of(kind: str, name: str, layer: int, layers: int) -> str:
    """Return the type of a matrix; Q4_K_M has embeddings, and values and down projections of some layers, in Q6_K."""
    if kind != "Q4_K_M":
        return kind
    is_wide = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    return "Q6_K" if name == "token_embd" or (name in ("attn_v", "ffn_down") and is_wide) else "Q4_K"


def quantised(number: int, rows: Any, row_bytes: int) -> Any:
    """Return the blocks that ggml makes of rows float32: uint8 [rows, bytes]."""
    import llama_cpp
    import numpy as np

    ggml = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    made = np.zeros((len(rows), row_bytes), np.uint8)
    sizes = [ctypes.c_int64(each) for each in (0, *rows.shape)]
    source, target = (each.ctypes.data_as(ctypes.c_void_p) for each in (rows, made))
    ggml.ggml_quantize_chunk(number, source, target, *sizes, None)
    return made


def write_file(path: Path, shape: dict[str, Any], kind: str) -> None:
    """Write random weights of the shape, norms in float32; rows of a matrix repeat."""
    import gguf
    import numpy as np

    made = np.random.default_rng(0)
    hidden, width, heads, kv, dim = (shape[each] for each in ("hidden", "width", "heads", "kv", "dim"))
    writer = gguf.GGUFWriter(str(path), shape["architecture"])
    writer.add_block_count(shape["layers"])
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(shape["theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*(f"t{i}" for i in range(shape["vocabulary"] - 2)), "t", "1"])
    writer.add_token_types([1] * shape["vocabulary"])
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def add(name: str, outputs: int, inputs: int, layer: int = 0) -> None:
        number = gguf.GGMLQuantizationType[type_of(kind, name, layer, shape["layers"])]
        block, block_bytes = gguf.GGML_QUANT_SIZES[number]
        rows = made.standard_normal((_DISTINCT_ROWS, inputs), np.float32) / np.float32(inputs**0.5)
        blocks = quantised(int(number), rows, inputs // block * block_bytes)
        full = name if name == "token_embd" else f"blk.{layer}.{name}"
        writer.add_tensor(f"{full}.weight", np.tile(blocks, (outputs // _DISTINCT_ROWS, 1)), raw_dtype=number)

    def ones(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    add("token_embd", shape["vocabulary"], hidden)
    ones("output_norm", hidden)
    for layer in range(shape["layers"]):
        ones(f"blk.{layer}.attn_norm", hidden)
        ones(f"blk.{layer}.ffn_norm", hidden)
        for name in ("attn_q_norm", "attn_k_norm") if shape["norms"] else ():
            ones(f"blk.{layer}.{name}", dim)
        for name, outputs, inputs in (
            *(("attn_q", heads * dim, hidden), ("attn_k", kv * dim, hidden), ("attn_v", kv * dim, hidden)),
            *(("attn_output", hidden, heads * dim), ("ffn_gate", width, hidden), ("ffn_up", width, hidden)),
            ("ffn_down", hidden, width),
        ):
            add(name, outputs, inputs, layer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokens_per_s(engine: Octavo | Llama, tokens: int) -> tuple[float, float]:
    """Return tokens per second of decoding and of a long prompt."""
    decode_s = engine.seconds(SHORT, 1 + tokens) - engine.seconds(SHORT, 1)
    return tokens / decode_s, len(LONG) / engine.seconds(LONG, 1)


def measure_file(path: Path, threads: int, tokens: int, repetitions: int) -> dict[str, Any]:
    """Return medians of both engines, which take turns; the first turn warms up."""
    opened = LoadedModel.open(Checkpoint.open(path), Mesh.single())
    weights, size = opened.model.planned_bytes(CpuRuntime.open(threads).bind()), path.stat().st_size
    engines: dict[str, Octavo | Llama] = {}
    before = resident_bytes()
    engines["octavo"] = Octavo(path, "bfloat16", threads)
    tokens_per_s(engines["octavo"], 2)
    resident = resident_bytes() - before
    engines["llama.cpp"] = Llama(path, threads)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for repetition in range(repetitions + 1):
        for name, engine in engines.items():
            figures = tokens_per_s(engine, tokens)
            if repetition:
                found[name].append(figures)
    result = {
        name: {
            "decode_tokens_per_s": round(statistics.median(each for each, _ in figures), 1),
            "prefill_tokens_per_s": round(statistics.median(each for _, each in figures), 1),
        }
        for name, figures in found.items()
    }
    return {
        **result,
        "file_mib": round(size / 2**20, 1),
        "octavo_weights_of_file": round(weights / size, 3),
        "octavo_resident_mib": round(resident / 2**20, 1),
    }


def main() -> None:
    """Print a JSON report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3-0.6b"])
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    result: dict[str, Any] = {}
    for shape in arguments.shapes:
        for kind in arguments.types:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"{shape}-{kind}.gguf"
                start = time.perf_counter()
                write_file(path, SHAPES[shape], kind)
                print(f"{path.name} written in {time.perf_counter() - start:.1f} s", flush=True)
                own = measure_file(path, arguments.threads, arguments.tokens, arguments.repetitions)
                result[f"{shape} {kind}"] = own
                print(own, flush=True)
                gc.collect()
    report("gguf_files", vars(arguments), result)


if __name__ == "__main__":
    main()
