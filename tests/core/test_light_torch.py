"""The engine's own process imports torch without a part, and runs every family as it does with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.families import ALWAYS
from tests.fakes.strangers import make_stranger
from tests.worker.engine_config import make_config

_RUN = """
import sys
import msgspec
from octavo.config.schema import EngineConfig
from octavo.core.light_torch import without_meta_registrations
with without_meta_registrations():
    from octavo.worker.worker import Worker
    from tests.worker.dummy_steps import run_dummy
assert "torch._meta_registrations" not in sys.modules
for config in msgspec.json.decode(sys.stdin.buffer.read(), type=list[EngineConfig]):
    worker = Worker(config)
    plan = worker.prepare()
    num_groups = len(plan.cache.groups)
    worker.load(plan.max_model_len, [plan.cache.num_host_blocks] * num_groups)
    worker.allocate([plan.cache.num_blocks] * num_groups, [plan.cache.num_host_blocks] * num_groups)
    run_dummy(worker, num_seqs=2, num_tokens=9)
import torch._meta_registrations
assert torch._meta_registrations.meta_index_Tensor
"""
_STRANGER = """
import sys
from pathlib import Path
from octavo.core.light_torch import without_meta_registrations
with without_meta_registrations():
    import octavo.worker.worker
from octavo.config.checkpoint import Checkpoint
from octavo.models.fallback.library import open_library
open_library(Checkpoint.open(Path(sys.argv[1])))
"""
_AT_ONCE = """
import sys
import threading
import time
from octavo.core.light_torch import import_meta_registrations, without_meta_registrations
has_begun = threading.Event()
def import_ahead():
    with without_meta_registrations():
        has_begun.set()
        time.sleep(0.3)
        import torch
threading.Thread(target=import_ahead).start()
has_begun.wait()
import_meta_registrations()
assert sys.modules["torch._meta_registrations"].meta_index_Tensor
import torch._decomp
"""


def test_who_needs_the_part_waits_for_a_thread_that_imports_torch_without_it() -> None:
    assert subprocess.run([sys.executable, "-c", _AT_ONCE], check=False).returncode == 0


@pytest.mark.long
def test_a_class_of_transformers_is_imported_after_all(tmp_path: Path) -> None:
    stranger = make_stranger("helium", tmp_path, with_weights=False)
    assert subprocess.run([sys.executable, "-c", _STRANGER, str(stranger)], check=False).returncode == 0


def test_every_family_and_weight_format_runs_without_the_part_that_is_left_out(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192, "tie_word_embeddings": True}
    configs = []
    for family in ALWAYS:
        path = make_checkpoint(family, tmp_path / family, **(sizes if family in ("llama", "qwen2") else {}))
        formats = (None, "int8", "int4") if family in ("llama", "qwen2") else (None,)
        for quantization in formats:
            configs.append(make_config(path, num_gpu_blocks_override=30, quantization=quantization))
        configs.append(make_config(path, num_gpu_blocks_override=30, instruction_set="reference"))
        configs.append(make_config(path, num_gpu_blocks_override=30, load_format="dummy"))
    run = subprocess.run([sys.executable, "-c", _RUN], input=msgspec.json.encode(configs), check=False)
    assert run.returncode == 0
