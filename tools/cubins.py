"""Compile the kernels of the device cuda for GPUs that need not be there: `python -m tools.cubins`.

Writes `sm_90.json` and `sm_90.xz`, and those of the other capabilities, to octavo/devices/cuda/cubins, from where a
wheel has them. Which variants there are is found by the operators themselves, on tensors without memory; built twice,
they are the same bytes.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.attention.backend import Scores
from octavo.attention.metadata import AttentionMetadata
from octavo.devices.cuda.attention import CudaBackend
from octavo.devices.cuda.cubins import ALIGNED, FOLDER, ONE, Call, call_of, hash_of, layout_of, source_hash
from octavo.devices.cuda.launch import OPTIONS, triton_constants, triton_function
from octavo.devices.cuda.runtime import CudaRuntime

CAPABILITIES: Final = (80, 89, 90, 100)
MODELS: Final = {
    "Qwen3-0.6B": (1024, 16, 8, 128), "Qwen3-1.7B": (2048, 16, 8, 128), "Qwen3-4B": (2560, 32, 8, 128),
    "Qwen3-8B, Llama-3.1-8B": (4096, 32, 8, 128), "Qwen3-14B": (5120, 40, 8, 128), "Qwen3-32B": (5120, 64, 8, 128),
    "Llama-3.1-70B": (8192, 64, 8, 128), "Llama-3.2-1B": (2048, 32, 8, 64), "Llama-3.2-3B": (3072, 24, 8, 128),
    "Qwen2.5-0.5B": (896, 14, 2, 64), "Qwen2.5-7B": (3584, 28, 4, 128), "Phi-2": (2560, 32, 32, 80),
    "Phi-3-mini": (3072, 32, 32, 96), "Gemma-2B": (2048, 8, 1, 256),
}  # fmt: skip
"""Hidden size, heads, heads of keys, and their size."""
_LAYOUTS: Final = {"u64": "Q", "u32": "i", "f32": "f"}
"""Types of parameters in PTX."""


def calls() -> list[Call]:
    """Return the launches of every model, once each."""
    found: dict[Call, None] = {}

    def record(kernel: str, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        found[call_of(kernel, arguments, constants, unspecialized(kernel))] = None

    for is_invariant in (False, True):
        runtime = CudaRuntime(is_invariant, record)
        for dtype in (torch.bfloat16, torch.float16):
            for hidden, heads, kv_heads, dim in MODELS.values():
                _attend(runtime, dtype, heads, kv_heads, dim)
                _compute_rows(runtime, dtype, hidden, heads, kv_heads, dim)
    return list(found)


def unspecialized(kernel: str) -> frozenset[int]:
    """Return the places of a kernel's arguments whose values make no other code."""
    return frozenset(each.num for each in triton_function(kernel).params if each.do_not_specialize)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attend(runtime: CudaRuntime, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    backend = CudaBackend(runtime, dtype)
    cache = torch.empty(backend.cache_shape(8, 16, kv_heads, dim), dtype=dtype, device="meta")
    for queries, length in ((1, 4096), (1, 16), (16, 16)):  # divided among programs, not divided, a prompt
        blocks = list(range(-(-length // 16)))
        metadata = AttentionMetadata.build([queries], [length], [blocks], 16)
        q, k = (_empty(queries, each, dim, dtype=dtype) for each in (heads, kv_heads))
        backend.run(q, k, k, cache, metadata, Scores(dim**-0.5))


def _compute_rows(runtime: CudaRuntime, dtype: torch.dtype, hidden: int, heads: int, kv_heads: int, dim: int) -> None:
    ops, x, weight = runtime.bind(), _empty(3, hidden, dtype=dtype), _empty(hidden, dtype=dtype)
    ops.rms_norm(x, weight, 1e-6)
    ops.add_rms_norm(x, x, weight, 1e-6)
    ops.silu_and_mul(_empty(3, 4 * hidden, dtype=dtype))
    positions, table = _empty(3, dtype=torch.int64), _empty(9, dim, dtype=torch.float32)
    q, k = (_empty(3, each, dim, dtype=dtype) for each in (heads, kv_heads))
    norm = _empty(dim, dtype=dtype)
    for weights in ((None, None), (norm, norm)):
        ops.rotary(q, k, positions, table, *weights, (1e-6, 0.0))


def compiled(call: Call, capability: int) -> tuple[bytes, dict[str, Any]]:
    """Return the machine code of a launch, and its line of the manifest. Raises RuntimeError for unknown parameters."""
    function = triton_function(call.kernel)
    names, constants = function.arg_names, dict(call.constants)
    options = {name: constants.pop(name) for name in list(constants) if name not in names}
    types = {
        name: "constexpr" if kind == ONE else kind.removesuffix(ALIGNED)
        for name, kind in zip(names, call.types, strict=False)
    }
    values = {(names.index(name),): value for name, value in triton_constants(constants).items()}
    values |= {(place,): 1 for place, kind in enumerate(call.types) if kind == ONE}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(call.types) if kind.endswith(ALIGNED)}
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(fn=function, signature=signature, constexprs=values, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={**OPTIONS, **options})
    entry = re.search(r"\.entry \w+\((.*?)\)", made.asm["ptx"], re.DOTALL)
    assert entry is not None, made.asm["ptx"]
    own, expected = "".join(_LAYOUTS[each] for each in re.findall(r"\.param \.(\w+)", entry[1])), layout_of(call.types)
    scratch, metadata = own[len(expected) :], made.metadata
    if own != expected + "Q" * len(scratch) or metadata.global_scratch_size or metadata.profile_scratch_size:
        raise RuntimeError(
            f"{call.kernel} takes {own} in Triton {triton.__version__}, expected {expected} and addresses"
        )
    line = {"kernel": call.kernel, "types": call.types, "constants": sorted(call.constants), "function": metadata.name}
    code: bytes = made.asm["cubin"]
    line |= {"shared": metadata.shared, "num_warps": metadata.num_warps, "num_scratch": len(scratch)}
    return code, line | {"bytes": len(code), "sha256": sha256(code).hexdigest()}


def build(chosen: list[Call], capability: int) -> tuple[dict[str, Any], bytes]:
    """Return the manifest and the archive of launches."""
    # neither lines of sources, whose paths would be in the code, nor what was compiled before
    knobs.compilation.disable_line_info = True
    knobs.compilation.always_compile = True
    codes, variants, offset = [], [], 0
    for call in chosen:
        code, line = compiled(call, capability)
        variants.append(line | {"offset": offset})
        codes.append(code)
        offset += len(code)
    packed = lzma.compress(b"".join(codes), preset=9)
    manifest = {
        "capability": capability,
        "triton": triton.__version__,
        "sources": source_hash(),
        "archive": sha256(packed).hexdigest(),
        "kernels": {name: sorted(unspecialized(name)) for name in sorted({call.kernel for call in chosen})},
        "variants": variants,
    }
    return manifest, packed


def write(folder: Path, manifest: dict[str, Any], packed: bytes) -> Iterator[Path]:
    """Write an archive and its manifest, and yield their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"sm_{manifest['capability']}.json"
    path.write_text(json.dumps({"sha256": hash_of(json.loads(json.dumps(manifest))), "manifest": manifest}))
    path.with_suffix(".xz").write_bytes(packed)
    yield from (path, path.with_suffix(".xz"))


def main() -> None:
    """Build every archive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--capability", type=int, nargs="+", default=CAPABILITIES)
    parser.add_argument("--kernel", nargs="+", help="only these, such as rows.rotary")
    parser.add_argument("--most", type=int, help="only so many variants of each kernel")
    arguments = parser.parse_args()
    every = [call for call in calls() if not arguments.kernel or call.kernel in arguments.kernel]
    kernels = dict.fromkeys(call.kernel for call in every)
    chosen = [c for name in kernels for c in [each for each in every if each.kernel == name][: arguments.most]]
    for capability in arguments.capability:
        for path in write(arguments.out, *build(chosen, capability)):
            print(f"{path}: {len(chosen)} variants, {path.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main()
