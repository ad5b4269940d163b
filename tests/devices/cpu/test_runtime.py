"""The runtime of CPU kernels: instruction sets, threads, reused memory, recordings."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from octavo.devices.cpu.runtime import CpuRuntime
from octavo.errors import ConfigError
from tests.conformance.runtimes import LEVELS

need_kernels = pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")


@need_kernels
def test_the_best_level_is_taken_unless_one_is_named() -> None:
    assert CpuRuntime.open().instruction_set == LEVELS[0]
    for level in LEVELS:
        assert CpuRuntime.open(instruction_set=level).instruction_set == level
    with pytest.raises(ConfigError, match="avx9 cannot run here; this machine has: .*avx2"):
        CpuRuntime.open(instruction_set="avx9")


@need_kernels
def test_memory_is_used_again_only_when_nobody_holds_it() -> None:
    runtime = CpuRuntime.open()
    first = runtime.empty((3, 5), torch.float32)
    view, address = first[1], first.data_ptr()
    second = runtime.empty((3, 5), torch.float32)
    assert second.data_ptr() != address
    del first
    assert runtime.empty((3, 5), torch.float32).data_ptr() != address
    del view
    assert runtime.empty((3, 5), torch.float32).data_ptr() == address


@need_kernels
@pytest.mark.parametrize("shape", [(1, 8), (0, 8), (70, 1000), (3, 40, 1000), (5,)])
def test_tensors_of_any_size_are_dense_and_keep_apart(shape: tuple[int, ...]) -> None:
    runtime = CpuRuntime.open()
    held = [runtime.empty(shape, torch.bfloat16) for _ in range(40)]  # more than are kept in their shape
    for value, tensor in enumerate(held):
        assert tensor.shape == shape
        assert tensor.is_contiguous()
        tensor.fill_(value)
    assert all(bool((tensor == value).all()) for value, tensor in enumerate(held))
    addresses = {tensor.data_ptr() for tensor in held}
    held.clear()
    del tensor
    again = [runtime.empty(shape, torch.bfloat16) for _ in range(40)]
    assert {tensor.data_ptr() for tensor in again} == addresses


@need_kernels
def test_small_tensors_take_bounded_memory_in_their_shapes() -> None:
    runtime = CpuRuntime.open()
    for width in range(1, 3000):
        runtime.empty((5, width), torch.float32)
    assert runtime._memory.ready_bytes_left >= 0
    assert sum(len(buffers) for buffers in runtime._memory.buffers.values()) <= 20
    assert runtime.held_bytes < 17 << 20


@need_kernels
def test_idle_memory_goes_before_a_limit_is_exceeded() -> None:
    runtime = CpuRuntime.open()
    runtime.limit_memory(20 << 20)
    in_use = runtime.empty((1 << 20,), torch.float32).fill_(3.0)
    for count in range(1 << 20, 3 << 20, 100_000):
        runtime.empty((count,), torch.float32)
        assert runtime.held_bytes <= 20 << 20
    assert in_use.eq(3.0).all()


@need_kernels
def test_a_smaller_tensor_takes_part_of_a_larger_unused_buffer() -> None:
    runtime = CpuRuntime.open()
    address = runtime.empty((1 << 20,), torch.float32).data_ptr()
    assert runtime.empty((700, 1000), torch.float32).data_ptr() == address


@need_kernels
def test_many_regions_from_more_threads_than_processors_all_end() -> None:
    ops = CpuRuntime.open(threads=5).bind()
    alone = CpuRuntime.open().bind()
    x, weight = torch.randn(200, 64), torch.rand(64)
    expected = alone.rms_norm(x, weight, 1e-6)
    for repeat in range(300):
        assert torch.equal(ops.rms_norm(x, weight, 1e-6), expected)
        if repeat % 100 == 0:
            time.sleep(0.002)  # workers fall asleep in between


@need_kernels
def test_two_runtimes_compute_at_the_same_time() -> None:
    x, weight = torch.randn(100, 64), torch.rand(64)
    expected = CpuRuntime.open().bind().rms_norm(x, weight, 1e-6)
    wrong = []

    def work() -> None:
        ops = CpuRuntime.open(threads=2).bind()
        for _ in range(50):
            if not torch.equal(ops.rms_norm(x, weight, 1e-6), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@need_kernels
def test_a_recording_computes_again_on_what_lies_at_its_addresses() -> None:
    runtime = CpuRuntime.open()
    ops = runtime.bind()
    x, weight = torch.randn(4, 32), torch.rand(32)
    runtime.cpu.begin_recording()
    out = ops.rms_norm(x, weight, 1e-6)
    recording = runtime.cpu.end_recording()
    assert len(recording) == 1
    x.copy_(torch.randn(4, 32))
    recording.run()
    assert torch.equal(out, ops.rms_norm(x, weight, 1e-6))


@need_kernels
def test_threads_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="threads must be at least 1"):
        CpuRuntime.open(threads=0)


@need_kernels
def test_threads_that_have_nothing_to_do_use_no_processor() -> None:
    ops = CpuRuntime.open(threads=3).bind()
    ops.rms_norm(torch.randn(200, 64), torch.rand(64), 1e-6)
    time.sleep(0.01)  # they spin for a moment
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.02


@need_kernels
def test_buffers_that_no_tensor_uses_are_given_back_but_not_those_of_recordings() -> None:
    runtime = CpuRuntime.open()
    in_use = runtime.empty((1 << 20,), torch.float32).fill_(3.0)
    unused = runtime.empty((1 << 20,), torch.float32).untyped_storage()
    recorded, _ = runtime.record(lambda: runtime.empty((1 << 20,), torch.float32))
    address = recorded.data_ptr()
    del recorded
    runtime.release_idle()
    assert torch._C._storage_Use_Count(unused._cdata) == 1
    assert in_use.eq(3.0).all()
    again, _ = runtime.record(lambda: runtime.empty((1 << 20,), torch.float32))
    assert again.data_ptr() == address
