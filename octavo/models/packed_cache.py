"""Packed weights on disk, from which a later start maps them instead of packing the checkpoint again.

A file that is not exactly as expected is packed again and replaced, never trusted. The content of the checkpoint's
files is part of the identity, by SHA-256; a record of their inodes and times stands for it at a start, and the digest
is computed in the background afterwards (`octavo.models.content`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor

from octavo.config.checkpoint import Checkpoint
from octavo.config.explain import render_bytes
from octavo.models.content import Record, WeightContent
from octavo.models.packed_file import Distrust, PackedFile, packed_bytes, write_packed
from octavo.models.packed_folder import RECORD_SUFFIX, SUFFIX, PackedFolder, remove
from octavo.ops.prepare_linear import TensorSpec

_log = logging.getLogger(__name__)

FORMAT_VERSION: Final = 3
"""Incremented at every change of the file's format, and of the order in which models arrange tensors in their
weights."""


class PackedCache:
    """The file in `folder` for weights that are made of `content` as `made` says.

    `made` has everything else that decides the bytes, as JSON; `title` is the model's name in the file's name.
    """

    def __init__(self, folder: PackedFolder, title: str, content: WeightContent, made: Mapping[str, Any]) -> None:
        self._folder = folder
        self._content = content
        self._made = json.loads(json.dumps({"format": FORMAT_VERSION, **made}))
        # a file is replaced by another version of the same weights: the same checkpoint, type and format
        place = json.dumps([self._made.get(key) for key in ("checkpoint", "dtype", "method", "layout", "ranks")])
        digest = hashlib.sha256(place.encode()).hexdigest()[:12]
        self.path = folder.directory / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', title)}-{digest}{SUFFIX}"
        self._record_path = self.path.with_name(self.path.name + RECORD_SUFFIX)

    def read(self, specs: Mapping[str, TensorSpec]) -> dict[str, Tensor] | None:
        """Map the tensors that meet `specs`; None where they are absent, or not trusted, which is logged."""
        started = time.monotonic()
        try:
            file = self._folder.open(self.path)
            record = Record.read(self._record_path)
            is_proven = record is not None and record.proves(self._content.stamps)
            digests = record.digests if record is not None and is_proven else self._content.digests()
            tensors = self._tensors(file, specs, digests)
        except FileNotFoundError:
            return None
        except Distrust as reason:
            self._warn(str(reason))
            return None
        except OSError as error:
            self._warn(f"cannot be compared with the checkpoint ({error.strerror})")
            return None
        with suppress(OSError):  # the time of the last use, by which old files are removed
            os.utime(self.path)
        if is_proven:
            self._folder.in_background(lambda stop: self._check(digests, stop))
        else:
            self._write_record(digests)
        seconds = time.monotonic() - started
        _log.info("packed weights mapped from %s (%s, %.1f s)", self.path, render_bytes(len(file.pages)), seconds)
        return tensors

    def prepare(self) -> None:
        """Prepare for `keep`; called before the weights are read. Raises OSError."""
        self._content.freeze()

    def keep(self, state: Mapping[str, Tensor]) -> None:
        """Write `state` in the background for later starts. A failure to write is noted in the log."""
        self._folder.in_background(lambda stop: self._keep(state, stop))

    def _tensors(
        self, file: PackedFile, specs: Mapping[str, TensorSpec], digests: Mapping[str, str]
    ) -> dict[str, Tensor]:
        identity = {**self._made, "content": dict(digests)}
        if file.header.get("identity") != identity:
            raise Distrust(f"is stale: {_difference(file.header.get('identity'), identity)}")
        places = file.header["tensors"]
        expected = {name: (list(spec.shape), _name(spec.dtype)) for name, spec in specs.items()}
        if {name: (place["shape"], place["dtype"]) for name, place in places.items()} != expected:
            raise Distrust("holds other tensors than this version expects")
        file.verify(self._folder.threads)
        return {name: _view(file, specs[name], place["offset"]) for name, place in places.items()}

    def _keep(self, state: Mapping[str, Tensor], stop: threading.Event) -> None:
        started = time.monotonic()
        try:
            digests = self._content.confirmed(stop)
            if digests is None:
                _log.warning(
                    "packed weights are not kept: the checkpoint changed while it was read; restart to load it"
                )
                return
            self._folder.directory.mkdir(parents=True, exist_ok=True)
            refusal = self._folder.make_room(self.path, packed_bytes(tensor.nbytes for tensor in state.values()))
            if refusal is not None:
                self._folder.note("packed weights are not kept in %s: %s", self._folder.directory, refusal)
                return
            tensors = {name: (list(each.shape), _name(each.dtype), _bytes(each)) for name, each in state.items()}
            size = write_packed(self.path, {**self._made, "content": digests}, tensors, stop)
        except OSError as error:
            self._folder.note("packed weights are not kept in %s: %s", self.path, error.strerror or error)
            return
        self._write_record(digests)
        _log.info("packed weights kept in %s (%s, %.1f s)", self.path, render_bytes(size), time.monotonic() - started)

    def _check(self, digests: Mapping[str, str], stop: threading.Event) -> None:
        """Compare the content of the checkpoint with the content that the packed weights were made of."""
        try:
            found = self._content.confirmed(stop)
            if found is None or found == digests:
                return  # a change after the start shows in the times at the next one
            remove(self.path)
        except OSError as error:
            _log.info("%s: its content is not compared with the checkpoint's: %s", self.path, error.strerror or error)
            return
        changed = [name for name, digest in found.items() if digests.get(name) != digest]
        _log.warning(
            "%s has changed since its weights were packed, although its size and times have not; this engine goes on "
            "with the weights as they were then. %s is removed: the next start packs the checkpoint again, so restart "
            "to use it as it is now",
            self._made.get("checkpoint", "") + f"/{changed[0]}",
            self.path,
        )

    def _write_record(self, digests: dict[str, str]) -> None:
        try:
            Record(self._content.seen_ns, self._content.stamps, digests).write(self._record_path)
        except OSError as error:
            self._folder.note("%s cannot be written: %s", self._record_path, error.strerror or error)

    def _warn(self, reason: str) -> None:
        _log.warning("%s %s; the checkpoint is packed again", self.path, reason)


def made_of(checkpoint: Checkpoint, *, dtype: torch.dtype, method: str, layout: str, ranks: str) -> dict[str, Any]:
    """Return everything beside the content of its files that decides the bytes of a packed model.

    `method` is how weights are held, `layout` the order of the packed bytes, `ranks` whose share of how many this is.
    """
    return {
        "checkpoint": str(checkpoint.path.resolve()),
        "config": hashlib.sha256(json.dumps(checkpoint.values, sort_keys=True).encode()).hexdigest(),
        "dtype": _name(dtype),
        "method": method,
        "layout": layout,
        "ranks": ranks,
    }


def _difference(found: Any, wanted: Mapping[str, Any]) -> str:
    for key, value in wanted.items():
        if not isinstance(found, dict) or found.get(key) != value:
            return f"its {key} is another"
    return "it has a field too many"


def _view(file: PackedFile, spec: TensorSpec, offset: int) -> Tensor:
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=spec.dtype)
    count = spec.nbytes // spec.dtype.itemsize
    return torch.frombuffer(file.pages, dtype=spec.dtype, count=count, offset=offset).view(spec.shape)


def _bytes(tensor: Tensor) -> memoryview:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
