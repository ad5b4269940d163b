"""Traces of torch's profiler: the kernels that a rank computes between two calls."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path
from typing import Any

from octavo.core.profiler_config import ProfilerConfig
from octavo.errors import ConfigError


class Profiling:
    """The profile that a rank makes. Nothing is imported, and nothing runs, before one begins."""

    def __init__(self, config: ProfilerConfig | None, rank_name: str) -> None:
        """rank_name: ends the names of files."""
        self._config = config
        self._rank_name = rank_name
        self._running: Any = None
        self._path = Path()

    def switch(self, name: str | None) -> None:
        """Begin a profile with this name; with None end and write the current one, if any.

        Raises ConfigError where a file cannot be written, one runs already, or none is allowed; and OSError.
        """
        if self._config is None:
            raise ConfigError("profiles are off; start the engine with profiler_config")
        if name is None:
            self._end()
        elif self._running is not None:
            raise ConfigError(f"a profile runs already, for {self._path}; end it with stop_profile")
        else:
            self._begin(self._config, name)

    def _begin(self, config: ProfilerConfig, name: str) -> None:
        import torch
        from torch.autograd.profiler import profile  # that of torch.profiler imports its compiler, which takes seconds

        ending = ".gz" if config.torch_profiler_use_gzip else ""
        self._path = Path(config.torch_profiler_dir) / f"{name}-{self._rank_name}.pt.trace.json{ending}"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch()  # so that an error is raised before the profile begins, not at its end
        running: Any = profile(
            use_device="cuda" if torch.cuda.is_available() else None,
            record_shapes=config.torch_profiler_record_shapes,
            profile_memory=config.torch_profiler_with_memory,
            with_stack=config.torch_profiler_with_stack,
            with_flops=config.torch_profiler_with_flops,
            # threads that share an engine begin, compute and end in any order; a profile of one thread that another
            # ends takes the process down
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        )
        running.__enter__()
        self._running = running

    def _end(self) -> None:
        running, self._running = self._running, None
        if running is None:
            return
        running.__exit__(None, None, None)
        plain = self._path.with_suffix("") if self._path.suffix == ".gz" else self._path
        unfinished = plain.with_name(f"{plain.name}.tmp")  # torch's, which logs that a disk is full, and raises nothing
        try:
            running.export_chrome_trace(str(plain))
            if unfinished.exists() or not plain.exists() or not plain.stat().st_size:
                raise ConfigError(f"the profile {self._path} cannot be written; is there space for it?")
            if plain != self._path:
                with plain.open("rb") as trace, gzip.open(self._path, "wb", compresslevel=3) as compressed:
                    shutil.copyfileobj(trace, compressed)
        except BaseException:
            self._path.unlink(missing_ok=True)
            raise
        finally:
            unfinished.unlink(missing_ok=True)
            if plain != self._path:
                plain.unlink(missing_ok=True)
