"""Settings for every test: one thread for torch, asyncio for anyio, reproducible property tests."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from octavo.core.process import processes
from octavo.platform import Platform
from tests.fakes.warm_processes import WarmProcesses
from tests.fakes.warm_server import WarmServer

settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True)
# in engines and servers too, also those in processes of their own
os.environ["OCTAVO_THREADS"] = "1"
# processes that may not keep compiled modules compile octavo at each start, a fifth of its time; this one would rewrite
# the asserts of all files of tests in each run, for 7 s of each worker
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# 4 GiB are a quarter of a million blocks of a tiny model, whose lists take longer than its weights
os.environ["OCTAVO_SWAP_SPACE"] = "0.0625"
# most engines make cycles of few objects; what is imported and collected before the tests stays
gc.set_threshold(10_000, 20, 20)
gc.disable()
_num_modules = 0
"""How many were imported when the last were kept out of the search for garbage."""
_file: Path | None = None
"""That of the last test."""

settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def _logging_is_left_as_it_was() -> Iterator[None]:
    """A command sets logging up for its process, which here is that of all tests."""
    logger = logging.getLogger("octavo")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-compiler", action="store_true", help="this machine has no C++ compiler: skip tests of kernels"
    )
    parser.addoption(
        "--sanitize-kernels",
        action="store_true",
        help="watch what kernels of the device cuda read and write (tests/devices/cuda/sanitizer.py): ten times slower",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to run without the compiled kernels, whose tests would be skipped, unless that is asked for.

    Also hear Ctrl-C where tests run in the background: a shell starts such processes with SIGINT ignored.
    """
    if Platform.detect().native_module is None and not config.getoption("--without-compiler"):
        raise pytest.UsageError(
            "the compiled kernels are absent: octavo was not built, or its build failed; run pip install -e . -v, or "
            "say pytest --without-compiler on a machine that has none"
        )
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # what lives until the interpreter ends is released there, compiled objects with it; pytest searches before that
    atexit.register(gc.unfreeze)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long runs are for those who ask for them: `-m long`."""
    if "long" in config.getoption("markexpr"):
        return
    long = [item for item in items if item.get_closest_marker("long") is not None]
    config.hook.pytest_deselected(items=long)
    items[:] = [item for item in items if item not in long]


def pytest_collection_finish() -> None:
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Keep what was imported, and what other files have left, out of the search for garbage.

    It takes 0.3 s for the million objects of transformers and all tests, and each engine that is closed makes one.
    """
    global _num_modules, _file
    if len(sys.modules) > _num_modules + 50 or item.path != _file:
        gc.collect()
        gc.freeze()
        _num_modules, _file = len(sys.modules), item.path


@pytest.fixture(scope="session", autouse=True)
def _own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is written to the user's cache folder, by processes of their own neither."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    """Tiny tensors lose more to thread wake-ups than they gain, and machines that test are shared."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def _source_of_processes() -> Iterator[WarmProcesses]:
    source = WarmProcesses()
    yield source
    source.close()


@pytest.fixture(scope="session")
def serve(_source_of_processes: WarmProcesses) -> Callable[..., WarmServer]:
    """Starts `octavo serve` with a model and further arguments."""
    return partial(WarmServer, _source_of_processes)


@pytest.fixture(autouse=True)
def _processes_are_warm(
    request: pytest.FixtureRequest, _source_of_processes: WarmProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cores, ranks and processes for text are forks of one that has imported torch, but for tests marked `cold`."""
    if request.node.get_closest_marker("cold") is None:
        monkeypatch.setattr(processes, "spawn", _source_of_processes.spawn)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
