"""What the compiler wrote: no object needs more of a processor than its level promises.

The linker merges functions that several objects define under one name (inline functions, templates) and keeps one of
them for all: code of a higher level could run where cpuid forbids it. So objects of a level define no such function.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OBJECTS = sorted(
    path
    for kind in ("_native", "kernels_*")
    for path in ROOT.glob(f"build/*/CMakeFiles/{kind}.dir/**/*.o")
    if path.is_file()
)
LEVEL = re.compile(r"kernels_(\w+)\.dir")
AVX = r"%ymm|\tv(?!err|erw|mcall)[a-z]"
AVX512 = r"%zmm|%k[0-7]\b|%[xy]mm(?:1[6-9]|2\d|3[01])\b"
BF16 = r"\tvdpbf16ps|\tvcvtne2?ps2bf16"
TILES = r"%tmm|\t(?:tile|ldtilecfg|sttilecfg|tdp)"
FORBIDDEN = {
    None: (AVX, AVX512, TILES),
    "avx2": (AVX512, TILES),
    "avx512": (BF16, TILES),
    "avx512_bf16": (TILES,),
    "amx_emulated": (TILES,),
    "amx": (),
}

pytestmark = [
    pytest.mark.skipif(shutil.which("objdump") is None or shutil.which("nm") is None, reason="needs objdump and nm"),
    pytest.mark.skipif(not OBJECTS, reason="no objects in build/: octavo was not built here"),
]


def level_of(path: Path) -> str | None:
    found = LEVEL.search(str(path))
    return found and found[1]


def lines_of(*command: str) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("level", FORBIDDEN)
def test_objects_hold_only_instructions_of_their_level(level: str | None) -> None:
    forbidden = [re.compile(pattern) for pattern in FORBIDDEN[level]]
    objects = [path for path in OBJECTS if level_of(path) == level]
    assert objects
    for path in objects:
        wrong = [
            line
            for line in lines_of("objdump", "-d", "--no-show-raw-insn", str(path))
            if any(pattern.search(line) for pattern in forbidden)
        ]
        assert not wrong, f"{path} has {len(wrong)}: {wrong[:3]}"


def test_a_level_is_compiled_in_few_units() -> None:
    """Headers take longer to read than most subjects to compile."""
    for build in {path.parents[3] for path in OBJECTS}:
        levels = Counter(level_of(path) for path in OBJECTS if path.is_relative_to(build))
        assert max(levels.values()) <= 3, (build, levels)


def test_levels_are_there_to_be_told_apart() -> None:
    """The patterns find what they look for, where it should be."""
    for level, pattern in (("avx2", AVX), ("avx512", AVX512), ("avx512_bf16", BF16), ("amx", TILES)):
        objects = [path for path in OBJECTS if level_of(path) == level]
        assert any(re.search(pattern, line) for path in objects for line in lines_of("objdump", "-d", str(path))), level


@pytest.mark.parametrize("path", [path for path in OBJECTS if level_of(path)], ids=level_of)
def test_objects_of_a_level_define_nothing_that_the_linker_could_share(path: Path) -> None:
    defined = [line.split(maxsplit=2) for line in lines_of("nm", "--defined-only", "--demangle", str(path))]
    # a pointer to the C++ library's handler of exceptions is the same everywhere
    shared = [name for _, kind, name in defined if kind in "WVu" and name != "DW.ref.__gxx_personality_v0"]
    assert not shared
