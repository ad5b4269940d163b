"""Profiles by torch: a trace for each rank, nothing before one begins, and errors by name."""

from __future__ import annotations

import gzip
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.config.json_options import profiler_config
from octavo.core.profiler_config import ProfilerConfig, profile_name
from octavo.errors import ConfigError, InvalidRequest
from octavo.worker.profiling import Profiling

PARAMS = SamplingParams(max_tokens=3, ignore_eos=True, temperature=0.0)


def options(folder: Path, **fields: Any) -> dict[str, Any]:
    return {"profiler": "torch", "torch_profiler_dir": str(folder), "torch_profiler_with_stack": False, **fields}


def events_of(path: Path) -> list[str]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [each["name"] for each in json.loads(content)["traceEvents"]]


@pytest.mark.parametrize("compressed", [True, False])
def test_a_profile_has_what_is_computed_between_its_calls_and_changes_no_token(
    tmp_path: Path, compressed: bool
) -> None:
    config = options(tmp_path / "traces", torch_profiler_use_gzip=compressed)
    with LLM(max_model_len=64, device="reference", profiler_config=config) as llm:
        expected = llm.generate("One", PARAMS, use_tqdm=False)[0].outputs[0].token_ids
        llm.stop_profile()
        llm.start_profile("mine")
        assert llm.generate("One", PARAMS, use_tqdm=False)[0].outputs[0].token_ids == expected
        with pytest.raises(ConfigError, match="a profile runs already, for .*mine-.*; end it with stop_profile"):
            llm.start_profile()
        llm.stop_profile()
        (trace,) = (tmp_path / "traces").iterdir()
        assert trace.name.startswith("mine-")
        assert trace.name.endswith("-rank0.pt.trace.json" + ".gz" * compressed)
        assert any("aten::" in name for name in events_of(trace))
        llm.start_profile()
        llm.stop_profile()
        assert len(list((tmp_path / "traces").iterdir())) == 2
        with pytest.raises(InvalidRequest, match=r"profile_prefix is '\.\./a', must be"):
            llm.start_profile("../a")


def test_threads_begin_compute_and_end_one_profile(tmp_path: Path) -> None:
    """A profile of torch is that of one thread by default: another that ends it takes the process down."""
    code = """
import sys, threading
from octavo import LLM, SamplingParams
def in_thread(function, *arguments):
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join()
config = {"profiler": "torch", "torch_profiler_dir": sys.argv[1], "torch_profiler_use_gzip": False}
with LLM(max_model_len=64, device="reference", profiler_config=config) as llm:
    in_thread(llm.start_profile)
    in_thread(llm.generate, "One", SamplingParams(max_tokens=2), False)
    llm.stop_profile()
"""
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    (trace,) = tmp_path.iterdir()
    assert any("aten::" in name for name in events_of(trace))


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("limit", [0, 20_000])
def test_a_disk_that_is_full_is_an_error_and_leaves_no_part_of_a_file(
    tmp_path: Path, compressed: bool, limit: int
) -> None:
    config = options(tmp_path, torch_profiler_use_gzip=compressed)
    profiling = Profiling(profiler_config(config), "rank0")
    profiling.switch("a")
    for _ in range(1000):
        torch.ones(3).exp()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(ConfigError, match="the profile .*/a-rank0.* cannot be written; is there space for it"):
            profiling.switch(None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
    profiling.switch("b")
    profiling.switch(None)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("prefix", ["", "a/b", "\ud800", "a" * 41, "a\nb", 5, "\0"])
def test_a_prefix_that_is_no_beginning_of_a_name_is_refused(prefix: Any) -> None:
    with pytest.raises(InvalidRequest, match="profile_prefix is .*, must be"):
        profile_name(prefix)


def test_every_rank_has_a_trace_of_its_own(tmp_path: Path) -> None:
    with LLM(max_model_len=64, device="reference", tensor_parallel_size=2, profiler_config=options(tmp_path)) as llm:
        llm.start_profile()
        llm.generate("One", PARAMS, use_tqdm=False)
        llm.stop_profile()
    assert [path.name.split("-")[-1] for path in sorted(tmp_path.iterdir(), key=lambda path: path.name[-20:])] == [
        "rank0.pt.trace.json.gz",
        "rank1.pt.trace.json.gz",
    ]


def test_without_it_profiles_are_refused_and_the_engine_goes_on(tmp_path: Path) -> None:
    with LLM(max_model_len=64) as llm:
        with pytest.raises(ConfigError, match="profiles are off; start the engine with profiler_config"):
            llm.start_profile()
        assert llm.generate("One", PARAMS, use_tqdm=False)[0].error is None
    (tmp_path / "file").touch()
    with LLM(max_model_len=64, profiler_config=options(tmp_path / "file")) as llm:
        with pytest.raises(ConfigError, match="file"):
            llm.start_profile()
        assert llm.generate("One", PARAMS, use_tqdm=False)[0].error is None


def test_the_profiler_is_imported_when_a_profile_begins(tmp_path: Path) -> None:
    code = "import sys, octavo.worker.profiling; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(ConfigError, match="profiles are off"):
        Profiling(None, "rank0").switch("a")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"profiler": "torch"}, "profiler_config: torch_profiler_dir is not set"),
        ({"profiler": "cuda"}, "profiler_config: profiler is 'cuda', invalid enum value"),
        ({"torch_profiler_folder": "a"}, "profiler_config has the unknown field 'torch_profiler_folder'.*did you mean"),
        ({"torch_profiler_with_stack": 1}, "torch_profiler_with_stack is 1, expected `bool`"),
    ],
)
def test_wrong_fields_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        profiler_config(given)


def test_the_directory_is_absolute_and_none_is_needed_without_a_profiler() -> None:
    assert profiler_config({}) is None
    config = profiler_config({"profiler": "torch", "torch_profiler_dir": "a"})
    assert config == ProfilerConfig(profiler="torch", torch_profiler_dir=str(Path("a").absolute()))
