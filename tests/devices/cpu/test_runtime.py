"""The runtime of CPU kernels: instruction sets, threads, reused memory, recordings."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from octavo.errors import ConfigError
from octavo.ops.registry import bind, open_runtime
from octavo.platform import Platform
from tests.conformance.runtimes import LEVELS, PLATFORM

need_kernels = pytest.mark.skipif(not LEVELS, reason="the compiled kernels cannot run on this machine")


def test_without_the_compiled_library_there_is_no_runtime_and_references_are_bound(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bare = Platform(**{**{name: getattr(PLATFORM, name) for name in PLATFORM.__struct_fields__}, "native_module": None})
    assert open_runtime(bare, instruction_set="reference") is None
    assert caplog.messages == []
    assert open_runtime(bare) is None
    (warning,) = caplog.messages
    assert warning.startswith("the compiled library is absent: install a C++20 compiler")
    assert warning.endswith("PyTorch computes instead, several times slower")
    with pytest.raises(ConfigError, match="the compiled library is absent"):
        open_runtime(bare, instruction_set="avx2")
    ops = bind(bare, runtime=open_runtime(bare))
    assert {choice.implementation for choice in ops.choices} == {"reference"}


@need_kernels
def test_the_best_level_is_taken_unless_one_is_named() -> None:
    assert open_runtime(PLATFORM).instruction_set == LEVELS[0]
    for level in LEVELS:
        assert open_runtime(PLATFORM, instruction_set=level).instruction_set == level
    assert open_runtime(PLATFORM, instruction_set="reference") is None
    with pytest.raises(ConfigError, match="avx9 cannot run here; this machine has: .*avx2"):
        open_runtime(PLATFORM, instruction_set="avx9")


@need_kernels
def test_memory_is_used_again_only_when_nobody_holds_it() -> None:
    runtime = open_runtime(PLATFORM)
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
    runtime = open_runtime(PLATFORM)
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
    runtime = open_runtime(PLATFORM)
    for width in range(1, 3000):
        runtime.empty((5, width), torch.float32)
    assert runtime._ready_bytes_left >= 0
    assert sum(len(buffers) for buffers in runtime._buffers.values()) <= 3


@need_kernels
def test_many_regions_from_more_threads_than_processors_all_end() -> None:
    ops = bind(PLATFORM, runtime=open_runtime(PLATFORM, threads=5))
    alone = bind(PLATFORM, runtime=open_runtime(PLATFORM))
    x, weight = torch.randn(200, 64), torch.rand(64)
    expected = alone.rms_norm(x, weight, 1e-6)
    for repeat in range(300):
        assert torch.equal(ops.rms_norm(x, weight, 1e-6), expected)
        if repeat % 100 == 0:
            time.sleep(0.002)  # workers fall asleep in between


@need_kernels
def test_two_runtimes_compute_at_the_same_time() -> None:
    x, weight = torch.randn(100, 64), torch.rand(64)
    expected = bind(PLATFORM, runtime=open_runtime(PLATFORM)).rms_norm(x, weight, 1e-6)
    wrong = []

    def work() -> None:
        ops = bind(PLATFORM, runtime=open_runtime(PLATFORM, threads=2))
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
    runtime = open_runtime(PLATFORM)
    ops = bind(PLATFORM, runtime=runtime)
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
        open_runtime(PLATFORM, threads=0)


@need_kernels
def test_threads_that_have_nothing_to_do_use_no_processor() -> None:
    ops = bind(PLATFORM, runtime=open_runtime(PLATFORM, threads=3))
    ops.rms_norm(torch.randn(200, 64), torch.rand(64), 1e-6)
    time.sleep(0.01)  # they spin for a moment
    before = time.process_time()
    time.sleep(0.2)
    assert time.process_time() - before < 0.02


@need_kernels
def test_buffers_that_no_tensor_uses_are_given_back_but_not_those_of_recordings() -> None:
    runtime = open_runtime(PLATFORM)
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
