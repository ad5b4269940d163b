"""Decode steps with adapters beside those of the base: `python -m benchmarks.lora DIRECTORY`.

A step has 32 rows. One, 8 or 32 adapters of rank 16 are dealt to them in turn, of attention alone or of all linear
layers. Each adapter's matrices are read once a step: their bytes over the memory's measured speed, beside the base's
step, are the floor. Steps of the base and with adapters are made in turns; the figure is the median of their ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from benchmarks.kernels.ceilings import measure
from octavo.config.args import EngineArgs
from octavo.config.checkpoint import Checkpoint
from octavo.config.resolve import resolve
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import BlockOps, NewSequence, ScheduledSequence, SchedulerOutput
from octavo.devices.cpu.runtime import CpuRuntime
from octavo.engine.adapter_files import digest_of
from octavo.platform import Platform
from octavo.worker.worker import Worker

ROWS: Final = 32
RANK: Final = 16
ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL: Final = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def write_adapter(shapes: dict[str, tuple[int, ...]], folder: Path, targets: tuple[str, ...], seed: int) -> int:
    """Write a random adapter; return the bytes of its matrices in bfloat16."""
    folder.mkdir()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            for which, size in (("A", (RANK, shape[1])), ("B", (shape[0], RANK))):
                values = torch.randn(size, generator=generator) / 100
                tensors[f"base_model.model.{module}.lora_{which}.weight"] = values.bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 32, "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return sum(each.nbytes for each in tensors.values())


class Steps:
    """A worker whose sequences, 32 with and 32 without adapters, make one token a step."""

    def __init__(self, path: Path, quantization: str | None) -> None:
        options: dict[str, Any] = {"max_loras": ROWS, "max_num_seqs": 2 * ROWS, "quantization": quantization}
        args = EngineArgs(model=str(path), enable_lora=True, max_model_len=512, dtype="bfloat16", **options)
        config = resolve(args, Checkpoint.open(path), Platform.detect(), tokenizer_path=path)
        self.worker = Worker(config)
        plan = self.worker.prepare()
        num_host_blocks = [0] * len(plan.cache.groups)
        self.worker.load(plan.max_model_len, num_host_blocks)
        self.worker.allocate([300], num_host_blocks)
        self._given, self._block = 0, config.cache.block_size

    def load(self, slot: int, folder: Path) -> None:
        digest = digest_of(folder)
        while (state := self.worker.call("read_adapter", str(folder), digest)[0]) is None:
            time.sleep(0.01)
        assert not state, state
        self.worker.call("load_adapter", slot, digest)

    def submit(self, new: list[NewSequence], starts: dict[int, tuple[int, int]]) -> float:
        """Run a step with rows {sequence: (start, tokens)}; return its seconds."""
        rows = [
            ScheduledSequence(seq_id=i, epoch=0, start=start, num_tokens=count, num_samples=1)
            for i, (start, count) in starts.items()
        ]
        step = SchedulerOutput(step_id=1, new_sequences=new, rows=rows, finished_ids=[], block_ops=BlockOps())
        began = time.perf_counter()
        self.worker.submit(step).result()
        return time.perf_counter() - began

    def begin(self, adapters: list[int]) -> list[int]:
        """Begin a sequence for each of these adapters, and compute its prompt."""
        ids = list(range(self._given, self._given + len(adapters)))
        self._given += len(adapters)
        params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
        blocks = 48 // self._block + 1
        new = [
            NewSequence(
                seq_id=i,
                index=0,
                epoch=0,
                token_ids=[7, 8, 9, 10],
                num_prompt_tokens=4,
                block_tables=[[1 + (i % 64) * blocks + each for each in range(blocks)]],
                params=params,
                adapter=adapter,
            )
            for i, adapter in zip(ids, adapters, strict=True)
        ]
        self.submit(new, dict.fromkeys(ids, (0, 4)))
        return ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, metavar="DIRECTORY", help="of the model")
    parser.add_argument("--quantization")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    header = Checkpoint.open(options.model).tensors
    shapes = {name: each.shape for name, each in header.items() if len(each.shape) == 2}
    threads = len(os.sched_getaffinity(0))
    speed = 1e9 * measure(CpuRuntime.open(threads)).read_gbps["dram"].of(threads)
    for targets, name in ((ATTENTION, "attention"), (ALL, "all linear")):
        with tempfile.TemporaryDirectory() as root:
            folders = [Path(root) / str(each) for each in range(ROWS)]
            num_bytes = max(write_adapter(shapes, each, targets, seed) for seed, each in enumerate(folders))
            steps = Steps(options.model, options.quantization)
            for slot, folder in enumerate(folders, start=1):
                steps.load(slot, folder)
            for count in (1, 8, 32):
                base = steps.begin([0] * ROWS)
                own = steps.begin([1 + i % count for i in range(ROWS)])
                times: dict[bool, list[float]] = {False: [], True: []}
                for n in range(options.steps + 3):
                    for is_adapted, ids in ((False, base), (True, own)):
                        took = steps.submit([], dict.fromkeys(ids, (4 + n, 1)))
                        if n >= 3:  # the first ones are recorded
                            times[is_adapted].append(took)
                ratio = statistics.median(b / a for a, b in zip(times[False], times[True], strict=True))
                plain = statistics.median(times[False])
                floor = 1 + count * num_bytes / speed / plain
                print(
                    f"{name}, {count} adapters: base {plain * 1e3:.1f} ms, with adapters {ratio:.3f} x, "
                    f"floor {floor:.3f} x: {floor / ratio:.0%} of the floor",
                    flush=True,
                )


if __name__ == "__main__":
    main()
