"""Compile the kernels of the device cuda for a GPU that need not be there, and print what they take.

python -m benchmarks.gpu.compiled [--capability 90] [--kernel NAME ...]

Prints one JSON line per kernel: registers of a thread, bytes of its stack (spilled registers), bytes of shared memory,
how many instructions of each kind of tensor core (HMMA, from Hopper on HGMMA; IMMA of integers) its code has, and where
it has some, how many instructions each of its loops has, and how many of those read or write spilled registers. Of a
kernel that waits for earlier launches: which tensors it reads before, how many reads of machine code these are, and how
many writes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.gpu import persistent_kernel
from benchmarks.gpu.persistent import config_of, constants_of
from octavo.attention.cache_format import CACHE_DTYPES
from octavo.devices.cuda.attention import CODES, PREFILL_ROWS, ROWS, STAGES_OF_FEW, TILE, Division
from octavo.devices.cuda.draws import BLOCK, BLOCKS, DRAWN_BLOCK, GROUP, REFINED, SEARCHED, STEPS, WARPS
from octavo.devices.cuda.kernels import (
    attention,
    coded,
    elementwise,
    filters,
    linear,
    logprobs,
    processors,
    recurrent,
    rows,
    sampling,
)
from octavo.devices.cuda.ops.coded import QUANTIZED, ZEROS
from octavo.devices.cuda.ops.coded import tile_of as coded_tile
from octavo.devices.cuda.ops.elementwise import BLOCK as ELEMENTS
from octavo.devices.cuda.ops.linear import AT_ONCE, LARGE, MIDDLE, tile_of
from octavo.devices.cuda.ops.recurrent import CHANNELS, MATRIX, SCANNED, TOKENS
from octavo.devices.cuda.runtime import OPTIONS, power_of_2
from octavo.ops.coded import CodeSpec
from octavo.ops.prepare_quantized import INT4, INT8

_TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_STRIDES = (
    *("x_stride", "y_stride", "token_stride", "head_stride", "q_token_stride", "q_head_stride"),
    *("k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride"),
    *("query_stride", "key_stride", "value_stride", "before_stride", "after_stride", "gate_stride"),
    "row_stride",
    "out_stride",
    "block_stride",
    "cache_head_stride",
    "slot_stride",
)
UNFUSED = {"enable_fp_fusion": False}
_WAITS = re.compile(r"\bREDG(.*?)\bLDG\.E\.STRONG", re.DOTALL)
"""What is between a program's arrival at a barrier of the grid and its first look at the counter."""
_WAIT, _WAIT_OF_CODE = "griddepcontrol.wait", "ACQBULK"
"""The wait of a dependent launch for earlier ones, in PTX and in machine code."""
_DEPENDENT = (
    *("linear, 16 rows", "linear, 16 rows, gated", "linear, 32 rows", "linear, 2 chunks at once"),
    *("linear, 4 chunks at once", "rms_norm", "rotate_and_store", "silu_and_mul"),
    *("attend one token", "attend a chunk", "merge"),
)
"""Kernels that are compiled as dependent launches too."""
_FLOATS = frozenset({"scale", "eps", "offset", "first", "second", "least", "most"})
_INTEGERS = frozenset(
    {
        *("table_stride", "num_chunks", "dim", "num_columns", "num_rows", "num_experts", "num_groups", "num_blocks"),
        *("M", "N", "K", "KP", "G", "num_heads", "group", "share", "window", "chunk"),
        *("top_k", "repeats", "channels", "step_stride", "beta_stride"),
    }
)
_POINTERS = {
    **dict.fromkeys(("tables", "lengths", "work", "arrived"), "*i32"),
    **dict.fromkeys(("places", "order", "starts"), "*i32"),
    **dict.fromkeys(("slots", "positions"), "*i64"),
    **dict.fromkeys(("parts", "peaks", "slopes", "sinks", "add", "weights", "q_table", "k_table"), "*fp32"),
    **dict.fromkeys(("states", "decay_log", "step_bias", "skip"), "*fp32"),
    "scores": "*fp64",
}

_OF_DRAWS = {
    **dict.fromkeys(("logits", "largest", "weights"), "*fp32"),
    **dict.fromkeys(("places", "nearest", "limits", "distances"), "*i32"),
    **dict.fromkeys(("masses", "totals", "state", "keys", "token_ids"), "*i64"),
    **dict.fromkeys(("asked", "told"), "*fp64"),
}


class Kernel(NamedTuple):
    """A kernel with the constants of a model: heads of 128 that share keys in fours, as those of Qwen3-8B."""

    name: str
    function: Any
    constants: Mapping[str, Any]
    num_warps: int = 4
    types: Mapping[str, str] = {}
    """Of arguments that have another type than their name says."""
    options: Mapping[str, Any] = {}
    """What differs from `OPTIONS`."""


def kernels() -> Iterator[Kernel]:
    """Yield every kernel, those of decode steps as dependent launches too, and attention of few programs."""
    for each in plain_kernels():
        yield each
        if each.function is attention.attend and each.constants["M"] == ROWS:
            yield each._replace(name=f"{each.name}, few programs", options={"num_stages": STAGES_OF_FEW})
        if each.name in _DEPENDENT:
            yield each._replace(name=f"{each.name}, dependent", constants={**each.constants, "IS_DEPENDENT": True})


def plain_kernels() -> Iterator[Kernel]:
    """Yield every kernel as an ordinary launch."""
    division = Division()
    common = {"VALUE": 128, "DV": 128, "CHUNK": division.chunk, "AHEAD": 0, "HAS_WINDOW": False, "HAS_SINKS": False}
    shape = {"DIM": 128, "D": 128, "BLOCK": 16, "CAP": 0.0, "HAS_SLOPES": False}
    shape["TYPE"] = tl.bfloat16
    for name, num_rows, is_split, chunk in (
        ("attend one token", ROWS, False, division.chunk),
        ("attend a chunk", ROWS, True, division.chunk),
        ("attend a prompt", PREFILL_ROWS, False, 0),
        ("attend a prompt in chunks", PREFILL_ROWS, False, division.chunk),
    ):
        kinds = {f", {each}": CODES[CACHE_DTYPES[each]] for each in ("int8", "fp8") if "in chunks" not in name}
        for kind, codes in {"": 0, **kinds}.items():
            constants = {**common, **shape, "M": num_rows, "SPLIT": is_split, "CODES": codes, "CHUNK": chunk}
            constants["TILE"] = TILE // 2 if codes else TILE
            pointers = dict.fromkeys(("keys", "values"), "*u8") if codes else {}
            yield Kernel(name + kind, attention.attend, constants, 8 if num_rows == PREFILL_ROWS else 4, pointers)
            if codes and is_split:
                written = {"DIM": 128, "D": 128, "BLOCK": 16, "CODES": codes}
                yield Kernel(f"store{kind}", attention.store, written, types=pointers, options=UNFUSED)
    for dim, num_rows, warps in ((256, ROWS, 8), (256, 64, 8), (512, ROWS, 8), (512, 32, 8), (576, ROWS, 8)):
        width, value = power_of_2(dim), min(dim, 512)
        sizes = {"DIM": dim, "D": width, "VALUE": value, "DV": value, "M": num_rows}
        sizes |= {"TILE": (1 << 14) // width, "CHUNK": division.chunk if num_rows == ROWS else 0}
        constants = {**common, **shape, **sizes, "SPLIT": False, "CODES": 0}
        yield Kernel(f"attend {num_rows} rows of heads of {dim}", attention.attend, constants, warps)
    yield Kernel("merge", attention.merge, common)
    yield Kernel("store", attention.store, {"DIM": 128, "D": 128, "BLOCK": 16, "CODES": 0})
    for is_gated in (False, True):
        for num_rows, columns in ((16, 4096), (32, 4096), (64, 4096), (256, 1024), (2048, 4096)):
            constants, options = divided(tile_of(num_rows, columns, torch.bfloat16, gated=is_gated))
            flags = {"HAS_BIAS": False, "HAS_ADDEND": False, "IS_GATED": is_gated, "CHUNKS": 1 if is_gated else 4}
            flags |= {"IS_DIVIDED": num_rows <= 64 and not is_gated, "EVEN": True, "TYPE": tl.bfloat16}
            name = f"linear, {num_rows} rows{', gated' * is_gated}"
            yield Kernel(name, linear.linear, {**flags, **constants, "GROUP": 0}, options=options)
    for number in AT_ONCE:
        constants, options = divided(tile_of(1, 1024, torch.bfloat16, gated=False))
        flags = {"HAS_BIAS": False, "HAS_ADDEND": False, "CHUNKS": number, "TYPE": tl.bfloat16}
        flags |= {**constants, "BN": constants["BN"] // number}
        yield Kernel(f"linear, {number} chunks at once", linear.chunks_at_once, flags, options=options)
    for num_rows in (16, 2048):
        constants, options = divided(tile_of(num_rows, 4096, torch.bfloat16, gated=False))
        flags = {"HAS_BIAS": False, "HAS_ADDEND": False, "IS_GATED": False, "CHUNKS": 4, "IS_DIVIDED": num_rows <= 64}
        flags |= {"EVEN": True, "GROUP": 128, "TYPE": tl.bfloat16}
        types = {"weight": "*fp8e4nv", "scales": "*fp32"}
        yield Kernel(
            f"linear of FP8, {num_rows} rows", linear.linear, {**flags, **constants}, types=types, options=options
        )
    for tile, options in (divided(MIDDLE), divided(LARGE)):
        num_rows = tile["BM"]
        constants = {"E": 128, "OF_TOKENS": True, "HAS_BIAS": False, "IS_GATED": True, **tile, "TYPE": tl.bfloat16}
        yield Kernel(f"experts, {num_rows} rows", linear.experts, {**constants, "GROUP": 0}, options=options)
    yield from coded_kernels()
    yield from recurrent_kernels()
    yield Kernel("rms_norm", rows.rms_norm, {"HEADS": 1, "DIM": 4096, "D": 4096, "ADDS": True})
    for function in ("silu_and_mul", "gelu_tanh_and_mul", "clamped_swiglu", "gated_by_sigmoid", "soft_capped"):
        yield Kernel(function, elementwise.elementwise, {"FUNCTION": function, "BLOCK": ELEMENTS})
    turned = {"HEADS": 32, "KV_HEADS": 8, "DIM": 128, "D": 128, "HALF": 64, "INTERLEAVED": False, "HAS_NORM": True}
    yield Kernel("rotate_and_store", rows.rotate_and_store, {**turned, "BLOCK": 16, "HAS_SLOTS": True})
    types = {"layers": "*i64", "counters": "*i32", "angles": "*fp32", "first_layer": "i32", "last_layer": "i32"}
    for num_rows in (1, 16):
        constants = constants_of(config_of("qwen3-0.6b"), num_rows, programs=132)
        constants |= {"BLOCK": 16, "PHASE": persistent_kernel.ALL.value, "TYPE": tl.bfloat16}
        yield Kernel(f"persistent, {num_rows} rows", persistent_kernel.decode, constants, 8, types)
    yield from drawing_kernels()


def drawing_kernels() -> Iterator[Kernel]:
    """Yield those that draw tokens, and change or describe logits."""
    for function in (sampling.peaks, sampling.race_of_logits):
        yield Kernel(f"draws, {function.__name__}", function, {"BLOCK": DRAWN_BLOCK}, WARPS, _OF_DRAWS)
    for function in (sampling.likeliest, sampling.winners):
        yield Kernel(f"draws, {function.__name__}", function, {"BLOCK": BLOCKS}, types=_OF_DRAWS)
    yield Kernel("filters, survey", filters.survey, {"BLOCK": BLOCK, "GROUP": GROUP}, types=_OF_DRAWS)
    for step in range(STEPS):
        yield Kernel(f"filters, refine {step}", filters.refine, {"STEP": step, **REFINED}, types=_OF_DRAWS)
    block, warps = SEARCHED["BLOCK"], SEARCHED["num_warps"]
    for function in (filters.bound, filters.settle):
        yield Kernel(f"filters, {function.__name__}", function, {"BLOCK": block}, warps, _OF_DRAWS)
    for function in (filters.collect, filters.narrow):
        yield Kernel(f"filters, {function.__name__}", function, {"BLOCK": BLOCK}, types=_OF_DRAWS)
    surveyed = {**dict.fromkeys(("keys", "nearest", "masses", "ahead", "places"), "*i64")}
    surveyed |= dict.fromkeys(("logits", "largest", "chosen"), "*fp32")
    yield Kernel("logprobs, survey", logprobs.survey, {"BLOCK": BLOCK, "GROUP": GROUP}, types=surveyed)
    stored = {"logits": "*fp32", "tokens": "*i32", "words": "*i64", "asked": "*fp64", "counts": "*i32"}
    yield Kernel("bad words", processors.bar_words, {"WIDTH": 16}, types=stored)
    masked = {"logits": "*fp32", "masks": "*i32", "places": "*i64", "num_words": "i32"}
    yield Kernel("masks of forms", processors.bar_unset, {"BLOCK": BLOCK}, types=masked)
    yield Kernel("penalties, count", processors.count, {"BLOCK": BLOCK}, types=stored)
    yield Kernel("penalties", processors.penalise, {"BLOCK": BLOCK}, types=stored, options=UNFUSED)


def divided(tile: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the constants of a tile, and its options."""
    options = {name: tile[name] for name in ("num_warps", "num_stages") if name in tile}
    return {name: size for name, size in tile.items() if name not in options}, options


def coded_kernels() -> Iterator[Kernel]:
    """Yield products with codes, of few rows and of many."""
    plain = {"int4": INT4, "int8": INT8}
    specs = {
        **plain,
        "int4 with zero points": CodeSpec(4, 128, "zeros", torch.float16),
        "mxfp4": CodeSpec(4, 32, "none", torch.float32, is_float=True),
        "q4_k": CodeSpec(4, 32, "minimums", torch.int8, 256),
    }
    types = {"codes": "*i8", "scales": "*fp32"}
    tile, options = divided(QUANTIZED)
    flags = {"HAS_ORDER": False, "HAS_OWNERS": False, "PLANES": 1, **tile}
    yield Kernel("quantize", coded.quantize, flags, types=types, options={**UNFUSED, **options})
    for name, spec in specs.items():
        constants = {
            "BITS": spec.bits,
            "GROUP": spec.group,
            "SUPER": spec.super_group,
            "ZERO": ZEROS[spec.zero],
            "IS_FLOAT": spec.is_float,
            "PLANES": 1,
            "HAS_BIAS": False,
            "HAS_ADDEND": False,
            "E": 0,
            "OF_TOKENS": False,
        }
        of_scales = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int8: "*i8"}
        of_zeros = "*i16" if spec.zero == "zeros" else of_scales[spec.scale_dtype]
        own = {"x": "*i8", "row_scales": "*fp32", "weight": "*i8" if spec.bits == 8 else "*u8"}
        own |= {"scales": of_scales[spec.scale_dtype], "zeros": of_zeros}
        own |= dict.fromkeys(("super_scales", "super_zeros"), "*fp16")
        kinds = [(1, 1), (64, 1)] + [(32, 1)] * (name in plain) + [(128, 1)] * (name == "int8")
        kinds += [(tokens, 2) for tokens in (1, 16, 32, 64) if name != "q4_k"]
        for tokens, planes in kinds:
            tile, options = divided(coded_tile(replace(spec, activation_bits=8 * planes), tokens))
            shape = {**constants, **tile, "IS_GATED": name == "int4", "PLANES": planes}
            title = f"coded {name}{' and 16 bits' * (planes == 2)}, {tokens} rows"
            yield Kernel(title, coded.coded_linear, shape, types=own, options={**UNFUSED, **options})
            if name in ("int4", "mxfp4") and tokens == 64:
                shape |= {"E": 128, "OF_TOKENS": True, "IS_GATED": True}
                yield Kernel(f"experts, {title}", coded.coded_linear, shape, types=own, options={**UNFUSED, **options})


def recurrent_kernels() -> Iterator[Kernel]:
    """Yield those of layers with states: heads as delta rules and Mamba2 have them, channels as Mamba."""
    for tokens, is_gated in ((1, False), (TOKENS, True)):
        constants = {"TAPS": 4, "HAS_BIAS": True, "IS_GATED": is_gated, "BLOCK": 16, "BT": tokens, "BC": CHANNELS}
        name = f"short convolution, {tokens} tokens{', gated' * is_gated}"
        yield Kernel(name, recurrent.short_convolution, constants, options=UNFUSED)
    flags = ("IS_DELTA", "HAS_FACTORS", "DECAYS_BY_KEY", "IS_BOUNDED", "IS_SELECTIVE")
    for name, dim, value, elements, own in (
        ("delta rule of 128", 128, 128, MATRIX, ("IS_DELTA",)),
        ("delta rule of 128, decays by key", 128, 128, MATRIX, ("IS_DELTA", "DECAYS_BY_KEY")),
        ("delta rule of 128, bounded decays", 128, 128, MATRIX, ("IS_DELTA", "DECAYS_BY_KEY", "IS_BOUNDED")),
        ("mamba2 of 256", 256, 64, MATRIX, ()),
        ("mamba of 16", 16, 8192, SCANNED, ("IS_SELECTIVE",)),
    ):
        constants = {"DIM": dim, "D": dim, "VALUE": value, "BV": elements // dim, "BLOCK": 16}
        yield Kernel(name, recurrent.recurrence, {**constants, **{flag: flag in own for flag in flags}}, 1)
    constants = {"GROUP": 8192, "D": 8192, "HAS_ONE_WEIGHT": False, "IS_GATE_FIRST": True}
    yield Kernel("gated norm", recurrent.gated_rms_norm, constants)


def figures(kernel: Kernel, capability: int) -> dict[str, Any]:
    """Compile a kernel and return what it takes."""
    names = kernel.function.arg_names
    # a step of one row: Triton makes its number a constant where the kernel does not forbid it
    one = dict.fromkeys(
        [each.name for each in kernel.function.params if each.name == "M" and not each.do_not_specialize], 1
    )
    defaults = {each.name: each.default for each in kernel.function.params if each.has_default}
    known = {**one, **defaults, **kernel.constants}
    signature = {name: "constexpr" if name in known else kernel.types.get(name) or _type_of(name) for name in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name in (*_STRIDES, "N", "K", "KP", "chunk", "channels")
    }
    constants = {(names.index(name),): value for name, value in known.items()}
    source = ASTSource(fn=kernel.function, signature=signature, constexprs=constants, attrs=aligned)
    options = {**OPTIONS, "num_warps": kernel.num_warps, **kernel.options}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _output("-res-usage", file.name)
        # disassembling takes longer than all else: what has no instruction of tensor cores before has none behind
        has_code = kernel.name == "merge" or any(each in made.asm["ptx"] for each in ("mma.", _WAIT))
        code = _output("-sass", file.name) if has_code else ""
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    loops = loops_of(code)
    return {
        "kernel": kernel.name,
        "registers": int(found[1]),
        "stack": int(found[2]),
        "shared": made.metadata.shared,
        "imma": len(re.findall(r"\bI(?:G)?MMA", code)),
        "hmma": len(re.findall(r"\bHMMA", code)),
        "hgmma": len(re.findall(r"\bHGMMA", code)),
        "bytes": len(made.asm["cubin"]),
        "loops": [len(each) for each in loops],
        **before_wait(made.asm["ptx"], code, [name for name in names if signature[name] != "constexpr"]),
        "requested_before_waits": [len(re.findall(r"LDG\.E\.128", part)) for part in _WAITS.findall(code)],
        "read_at_once": max(len(re.findall(r"\bLDG", part)) for part in re.split(r"\bMUFU|\bBRA", code)),
        "spilled_in_loops": sum(bool(re.search(r"\b(LDL|STL)\b", line)) for each in loops for line in each),
    }


def before_wait(ptx: str, code: str, names: Sequence[str]) -> dict[str, Any]:
    """Return what a program reads and writes before it waits for earlier launches; nothing for one that does not wait.

    names: of the arguments that are parameters. An address is followed back to the parameters that it is made of.
    """
    early, wait, _ = ptx.partition(_WAIT)
    if not wait:
        return {}
    made_of: dict[str, set[str]] = {}
    read: set[str] = set()
    for line in early.splitlines():
        registers = re.findall(r"%[a-z]+\d+", line)
        if registers:
            given = {names[int(place)] for place in re.findall(r"ld\.param.*_param_(\d+)\]", line)}
            made_of[registers[0]] = given.union(*(made_of.get(each, set()) for each in registers[1:]))
        if "ld.global" in line:
            address = re.findall(r"%[a-z]+\d+", line.partition("[")[2])
            read = read.union(*(made_of.get(each, set()) for each in address))
    before = code.partition(_WAIT_OF_CODE)[0]
    writes = len(re.findall(r"\b(?:st|red|atom)\.global|cp\.async\b", early))
    return {"read_early": sorted(read), "early_reads": len(re.findall(r"\bLDG", before)), "early_writes": writes}


def loops_of(code: str) -> list[list[str]]:
    """Return the instructions of each loop of machine code: those from where a branch leads back to."""
    found = [(int(each[1], 16), each[2]) for each in re.finditer(r"/\*([0-9a-f]{4,})\*/ +([^;]+);", code)]
    ends = [(place, re.search(r"\bBRA\b.* 0x([0-9a-f]+)", line)) for place, line in found]
    spans = [(int(end[1], 16), place) for place, end in ends if end is not None and int(end[1], 16) < place]
    return [[line for place, line in found if first <= place <= last] for first, last in spans]


def _type_of(name: str) -> str:
    if name in _INTEGERS:
        return "i32"
    if name in _STRIDES:
        return "i64" if name == "block_stride" else "i32"
    return "fp32" if name in _FLOATS else _POINTERS.get(name, "*bf16")


def _output(flag: str, file: str) -> str:
    return subprocess.run([str(_TOOL), flag, file], capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Print the figures of every kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--kernel", nargs="+", help="only these, such as 'attend a prompt'")
    args = parser.parse_args()
    for kernel in kernels():
        if args.kernel is None or kernel.name in args.kernel:
            print(json.dumps(figures(kernel, args.capability)), flush=True)


if __name__ == "__main__":
    main()
