"""Decoding and prefill with a mixture of experts: `python -m benchmarks.experts`, perhaps beside llama.cpp.

Two stacks of few layers in the shape of Qwen3-30B-A3B (hidden 2048, 128 experts of which a token takes 8, 768 wide, 32
and 4 heads of 128) with random weights. What one more layer costs is the slope between them: head, sampling and the
step itself are in neither. A token reads the attention, the router and the chosen experts of a layer, a long prompt all
experts once: their bytes over the memory's measured speed are the floor. `--llama` runs llama.cpp on the same shape in
turns with octavo; it needs the packages `xllamacpp` and `gguf` (`pip install --target DIR xllamacpp gguf`, PYTHONPATH).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import octavo
from benchmarks.kernels.ceilings import measure
from octavo.cli.report import report
from octavo.core.sampling_params import SamplingParams
from octavo.devices.cpu.runtime import CpuRuntime
from octavo.llm import LLM

SHAPE: Final[dict[str, Any]] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
BYTES: Final = {"bfloat16": 2.0, "int8": 1.0, "int4": 0.5 + 2 / 64}
LLAMA_TYPES: Final = {"bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
SHORT: Final = list(range(10, 42))
LONG: Final = [10 + 7 * i % 4000 for i in range(512)]
"""Prompts: before a decode step, and one that takes all experts."""


def bytes_per_layer(kind: str, experts: int) -> float:
    """Return the weights of a layer that are read where this many of its experts are."""
    hidden, heads, kv, dim = (
        SHAPE[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    attention = hidden * dim * (2 * heads + 2 * kv)
    chosen = experts * 3 * hidden * SHAPE["moe_intermediate_size"]
    return (attention + chosen) * BYTES[kind] + hidden * SHAPE["num_experts"] * BYTES["bfloat16"]


class Octavo:
    """The stack in octavo."""

    def __init__(self, path: Path, kind: str, threads: int) -> None:
        """Load a GGUF file, or take random weights for the config in a folder."""
        options: dict[str, Any] = {} if kind == "bfloat16" else {"quantization": kind}
        if path.is_dir():
            tokenizer = str(Path(octavo.__file__).parent / "builtin" / "octavo-tiny")
            options |= {"load_format": "dummy", "tokenizer": tokenizer}
        self._llm = LLM(
            str(path),
            threads=threads,
            dtype="bfloat16",
            max_model_len=1024,
            max_num_batched_tokens=1024,
            enable_prefix_caching=False,
            kv_cache_memory="256MiB",
            **options,
        )

    def seconds(self, prompt: list[int], tokens: int) -> float:
        """Return how long generating `tokens` behind the prompt takes."""
        start = time.perf_counter()
        self._llm.generate(
            {"prompt_token_ids": prompt},
            SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0),
        )
        return time.perf_counter() - start


class Llama:
    """The stack in llama.cpp."""

    def __init__(self, path: Path, threads: int) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.warmup = 1024, 1, True
        params.cpuparams.n_threads = threads
        self._server = xllamacpp.Server(params)

    def seconds(self, prompt: list[int], tokens: int) -> float:
        """Return how long generating `tokens` behind the prompt takes."""
        asked = {
            "prompt": prompt,
            "max_tokens": tokens,
            "n_predict": tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "cache_prompt": False,
        }
        start = time.perf_counter()
        self._server.handle_completions(asked)
        return time.perf_counter() - start


def write_gguf(path: Path, kind: str, layers: int) -> None:
    """Write random weights of the shape, norms and router in float32."""
    import gguf
    import numpy as np

    made = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), "qwen3moe")
    heads, kv, dim = (SHAPE[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    hidden, width, experts, vocabulary = (
        SHAPE[key] for key in ("hidden_size", "moe_intermediate_size", "num_experts", "vocab_size")
    )
    writer.add_block_count(layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(SHAPE["intermediate_size"])
    writer.add_expert_feed_forward_length(width)
    writer.add_expert_count(experts)
    writer.add_expert_used_count(SHAPE["num_experts_per_tok"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{i}" for i in range(vocabulary)])
    writer.add_token_types([1] * vocabulary)
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    kind_of = getattr(gguf.GGMLQuantizationType, LLAMA_TYPES[kind])

    def add(name: str, *shape: int) -> None:
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            return
        rows = made.standard_normal((64, shape[-1]), np.float32) / np.float32(shape[-1] ** 0.5)
        if name.endswith("ffn_gate_inp.weight"):
            writer.add_tensor(name, made.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5))
            return
        packed = gguf.quants.quantize(rows, kind_of)
        count = int(np.prod(shape[:-1]))
        full = np.tile(packed, (-(-count // 64), 1))[:count].reshape(*shape[:-1], -1)
        writer.add_tensor(name, full, raw_dtype=kind_of)

    add("token_embd.weight", vocabulary, hidden)
    add("output_norm.weight", hidden)
    add("output.weight", vocabulary, hidden)
    for layer in range(layers):
        at = f"blk.{layer}"
        for name in ("attn_norm", "ffn_norm"):
            add(f"{at}.{name}.weight", hidden)
        for name in ("attn_q_norm", "attn_k_norm"):
            add(f"{at}.{name}.weight", dim)
        add(f"{at}.attn_q.weight", heads * dim, hidden)
        add(f"{at}.attn_k.weight", kv * dim, hidden)
        add(f"{at}.attn_v.weight", kv * dim, hidden)
        add(f"{at}.attn_output.weight", hidden, heads * dim)
        add(f"{at}.ffn_gate_inp.weight", experts, hidden)
        add(f"{at}.ffn_gate_exps.weight", experts, width, hidden)
        add(f"{at}.ffn_up_exps.weight", experts, width, hidden)
        add(f"{at}.ffn_down_exps.weight", experts, hidden, width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


Engine = Octavo | Llama


class Layer(NamedTuple):
    """Milliseconds that one more layer takes in each repetition: for a token of a decode step, for the long prompt."""

    decode: list[float]
    prefill: list[float]


def measure_layers(
    stacks: tuple[int, int], kind: str, threads: int, tokens: int, repetitions: int, *, llama: bool
) -> dict[str, Layer]:
    """Return what a layer takes in each engine. All stacks are loaded and take turns; the first turn warms up."""
    with ExitStack() as resources:
        engines: dict[str, list[Engine]] = {}
        for layers in stacks:
            path = Path(resources.enter_context(tempfile.TemporaryDirectory()))
            (path / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": layers}))
            engines.setdefault("octavo", []).append(Octavo(path, kind, threads))
            if llama:
                file = path / f"model-{layers}.gguf"
                write_gguf(file, kind, layers)
                engines.setdefault("llama.cpp", []).append(Llama(file, threads))
        found = {name: Layer([], []) for name in engines}
        more_ms = 1e3 / (stacks[1] - stacks[0])
        for repetition in range(repetitions + 1):
            for name, pair in engines.items():
                steps = [(each.seconds(SHORT, 1 + tokens) - each.seconds(SHORT, 1)) / tokens for each in pair]
                prompts = [each.seconds(LONG, 1) for each in pair]
                if repetition:
                    found[name].decode.append((steps[1] - steps[0]) * more_ms)
                    found[name].prefill.append((prompts[1] - prompts[0]) * more_ms)
    return found


def main() -> None:
    """Print a JSON report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs=2, default=[1, 3], help="of the two stacks")
    parser.add_argument("--kind", choices=sorted(BYTES), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--llama", action="store_true")
    arguments = parser.parse_args()
    kind, threads, (few, many) = arguments.kind, arguments.threads, sorted(arguments.layers)
    if few == many:
        parser.error("--layers: a slope needs two numbers that differ")
    measured = measure_layers(
        (few, many), kind, threads, arguments.tokens, arguments.repetitions, llama=arguments.llama
    )
    read_gbps = measure(CpuRuntime.open(threads)).read_gbps["dram"].of(threads)
    result: dict[str, Any] = {"read_gbps": round(read_gbps, 1)}
    for name, experts in (("decode", SHAPE["num_experts_per_tok"]), ("prefill", SHAPE["num_experts"])):
        floor_ms = bytes_per_layer(kind, experts) / read_gbps / 1e6
        layer_ms = {engine: statistics.median(getattr(each, name)) for engine, each in measured.items()}
        result[name] = {
            "floor_ms_per_layer": round(floor_ms, 3),
            "ms_per_layer": {engine: round(each, 3) for engine, each in layer_ms.items()},
            "share_of_floor": {engine: round(floor_ms / each, 3) for engine, each in layer_ms.items()},
        }
    report("experts", {"layers": [few, many], "kind": kind, "threads": threads}, result)


if __name__ == "__main__":
    main()
