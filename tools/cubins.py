"""Compile the kernels of the device cuda for GPUs that need not be there: `python -m tools.cubins`.

Writes `sm_90.json` and `sm_90.xz`, and those of the other capabilities, to octavo/devices/cuda/cubins, from where a
wheel has them. Which variants there are is found by models that run on tensors without memory (`kernel_launches`);
built twice, they are the same bytes.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from hashlib import sha256
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.devices.cuda.cubins import ALIGNED, FOLDER, ONE, Call, has_room, hash_of, layout_of, source_hash
from octavo.devices.cuda.runtime import OPTIONS, triton_constants, triton_function
from tools.kernel_launches import launches, unspecialized
from tools.kernel_models import MODELS

SHARED_BYTES: Final = {80: (164 << 10, 100 << 10), 89: (100 << 10,), 90: (228 << 10,), 100: (228 << 10,)}
"""Shared memory of an SM, for each capability that binaries are made for: its own, and that of others that run them
(8.6), whose tiles are smaller."""
BLOCK_BYTES: Final = 1 << 20
"""Most machine code of a block, which a start unpacks as a whole: larger ones are packed better."""
_LAYOUTS: Final = {"u64": "Q", "u32": "i", "f32": "f"}
"""Types of parameters in PTX."""


def calls_of(
    models: Sequence[Mapping[str, Any]], capability: int, dtypes: Sequence[str], *, has_codes: bool
) -> list[Call]:
    """Return the launches of all GPUs that run the binaries of a capability, once each, as `launches` finds them."""
    return [
        *dict.fromkeys(
            call
            for each in SHARED_BYTES[capability]
            for call in launches(models, dtypes, has_codes=has_codes, shared_bytes=each, has_float8=capability >= 89)
        )
    ]


def compiled(call: Call, capability: int) -> tuple[bytes, dict[str, Any]]:
    """Return the machine code of a launch, and its line of the manifest. Raises RuntimeError for unknown parameters."""
    # neither lines of sources, whose paths would be in the code, nor what was compiled before
    knobs.compilation.disable_line_info = True
    knobs.compilation.always_compile = True
    function = triton_function(call.kernel)
    names = function.arg_names
    constants = {each.name: each.default for each in function.params if each.has_default} | dict(call.constants)
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


def is_kept(line: dict[str, Any], capability: int) -> bool:
    """Return whether a binary can be loaded, and print that it cannot."""
    if has_room(line, SHARED_BYTES[capability][0]):
        return True
    print(f"left out: {line['kernel']} needs {line['shared']} bytes of shared memory, {line['constants']}", flush=True)
    return False


def build(chosen: list[Call], capability: int, processes: int = 1) -> tuple[dict[str, Any], bytes]:
    """Return the manifest and the archive of launches, compiled by so many processes beside each other."""
    compile_one = partial(compiled, capability=capability)
    if processes == 1:
        made = [compile_one(call) for call in chosen]
    else:
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            made = list(pool.map(compile_one, chosen, chunksize=8))
    variants, blocks = divided([each for each in made if is_kept(each[1], capability)])
    packed = [lzma.compress(block, preset=9) for block in blocks]
    archive = b"".join(packed)
    manifest = {
        "capability": capability,
        "triton": triton.__version__,
        "sources": source_hash(),
        "archive": sha256(archive).hexdigest(),
        "blocks": [*accumulate(map(len, packed))],
        "kernels": {name: sorted(unspecialized(name)) for name in sorted({call.kernel for call in chosen})},
        "variants": variants,
    }
    return manifest, archive


def divided(made: Sequence[tuple[bytes, dict[str, Any]]]) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Return the lines of variants with their places, and the blocks, each of one kernel."""
    variants, blocks, last = list[dict[str, Any]](), list[bytes](), None
    for code, line in sorted(made, key=lambda each: each[1]["kernel"]):
        if line["kernel"] != last or len(blocks[-1]) + len(code) > BLOCK_BYTES:
            blocks.append(b"")
        last = line["kernel"]
        variants.append(line | {"block": len(blocks) - 1, "offset": len(blocks[-1])})
        blocks[-1] += code
    return variants, blocks


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
    parser.add_argument("--capability", type=int, nargs="+", default=tuple(SHARED_BYTES), choices=SHARED_BYTES)
    parser.add_argument("--model", nargs="+", choices=MODELS, help="only these, and no codes as weights")
    parser.add_argument("--dtype", nargs="+", default=("bfloat16", "float16"), choices=("bfloat16", "float16"))
    parser.add_argument("--kernel", nargs="+", help="only these, such as rows.rms_norm")
    parser.add_argument("--most", type=int, help="only so many variants of each kernel")
    parser.add_argument("--processes", type=int, default=1, help="that compile beside each other")
    arguments = parser.parse_args()
    models = [MODELS[name] for name in arguments.model or MODELS]
    for capability in SHARED_BYTES:
        if capability not in arguments.capability:
            continue
        found = calls_of(models, capability, arguments.dtype, has_codes=not arguments.model)
        every = [call for call in found if not arguments.kernel or call.kernel in arguments.kernel]
        kernels = dict.fromkeys(call.kernel for call in every)
        chosen = [c for name in kernels for c in [each for each in every if each.kernel == name][: arguments.most]]
        for path in write(arguments.out, *build(chosen, capability, arguments.processes)):
            print(f"{path}: {len(chosen)} launches, {path.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    main()
