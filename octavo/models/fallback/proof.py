"""The proof that a class of transformers computes over the paged cache what it computes alone.

A small copy with random weights in float32 goes the way that the model goes: a checkpoint on disk, octavo's loader,
packed rows over blocks. Two sequences, one of them cut, and steps that decode are compared with transformers' eager
attention over whole sequences. The verdict is kept, so that it costs one start.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from octavo.attention.backend import AttentionBackend, cache_layout
from octavo.attention.metadata import AttentionMetadata, ModelInput
from octavo.config.checkpoint import Checkpoint
from octavo.distributed.mesh import Mesh
from octavo.errors import OctavoError, UnsupportedModel, one_line
from octavo.models.content import replacement
from octavo.models.decoder import PROOF_BLOCK_SIZE
from octavo.models.fallback.library import Library, library_version
from octavo.models.fallback.recording import Recording, record
from octavo.models.fallback.shrink import layer_kinds, shrink
from octavo.ops.registry import Ops

TOLERANCE: Final = 1e-5
"""The largest difference of a logit, relative to the largest logit."""
_LENGTHS: Final = (50, 39)
"""Tokens of the two sequences: about three windows of the copy."""
_CUT: Final = 23
_DECODED: Final = 3
_NUM_BLOCKS: Final = 16
_MOST_PARAMETERS: Final = 1 << 27
"""The limit of parameters of the small copy, whose heads keep their full size."""

_log = logging.getLogger(__name__)


class Verdict(msgspec.Struct, frozen=True):
    """The result of the comparison: the error, relative to the largest logit; why the class is refused, or None."""

    error: float | None = None
    refused: str | None = None

    def render(self) -> str:
        """Return it in words."""
        return f"proved: at most {self.error:.1e} from eager attention in float32" if self.refused is None else ""


def proved(
    library: Library, where: str, ops: Ops, attention: Callable[[int], AttentionBackend], folder: Path | None
) -> str:
    """Return the verdict on a class and config in words: that of an earlier start, or one that is found now.

    attention: makes a backend for float32 and a head size. folder: where this version of octavo keeps verdicts; None to
    keep none. Raises UnsupportedModel where the class does not compute the same.
    """
    file = None if folder is None else folder / f"{_digest(library, ops)}.json"
    verdict = None if file is None else _read(file)
    if verdict is None:
        verdict = _find(library, where, ops, attention)
        # without an error it may be about this start, as when the disk is full
        if file is not None and verdict.error is not None:
            _keep(file, verdict)
    if verdict.refused is not None:
        raise UnsupportedModel(f"{where}: {library.model.__name__} by transformers' code is refused: {verdict.refused}")
    return verdict.render()


def _read(file: Path) -> Verdict | None:
    """Return a verdict that is kept; None where there is none, or one that no comparison finds."""
    try:
        verdict = msgspec.json.decode(file.read_bytes(), type=Verdict) if file.is_file() else Verdict()
    except (OSError, ValueError):
        return None
    is_found = verdict.error is not None and (verdict.refused is not None or 0 <= verdict.error <= TOLERANCE)
    return verdict if is_found else None


def _keep(file: Path, verdict: Verdict) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacement(file) as content:
            content.write(msgspec.json.encode(verdict))
    except OSError as error:
        _log.warning("what was proved of the model is not kept, and the next start proves it again: %s", error)


def _digest(library: Library, ops: Ops) -> str:
    config = library.config.to_json_string(use_diff=False)
    chosen = sorted((each.operator, each.implementation) for each in ops.choices)
    versions = (library_version(), version("torch"), library.model.__name__)
    return hashlib.sha256(f"{versions} {chosen} {config}".encode()).hexdigest()[:32]


def _find(library: Library, where: str, ops: Ops, attention: Callable[[int], AttentionBackend]) -> Verdict:
    whole = record(library, where)
    try:
        small = shrink(library, whole)
        with _silence(), tempfile.TemporaryDirectory(prefix="octavo-proof-") as name:
            recording = record(small, where)
            if missing := _missing_kinds(whole, recording):
                return Verdict(refused=f"its small copy lacks layers of the kind {missing}")
            count = sum(each.numel() for each in recording.causal.parameters())
            if count > _MOST_PARAMETERS:
                return Verdict(refused=f"its small copy has {count:,} parameters, at most {_MOST_PARAMETERS:,} are run")
            eager = _with_random_weights(small.eager())
            eager.save_pretrained(name)
            return _compare(eager, _Paged(Path(name), ops, attention))
    except OctavoError as error:
        return Verdict(refused=f"of its small copy, {error}")
    except Exception as error:  # an error of transformers' code: whatever its type, nothing is proved
        return Verdict(refused=f"its small copy does not run ({one_line(error)})")


@contextmanager
def _silence() -> Iterator[None]:
    """Keep transformers from writing of the small copy as if it were the user's model: warnings and a progress bar."""
    logging: Any = import_module("transformers.utils.logging")
    verbosity, progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if progress:
            logging.enable_progress_bar()


def _missing_kinds(whole: Recording, small: Recording) -> str | None:
    there = set(layer_kinds(small))
    return next((str(kind) for kind in layer_kinds(whole) if kind not in there), None)


def _with_random_weights(model: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.copy_(noise * 0.2 + (0.0 if name.endswith("bias") else 1.0))
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model


class _Paged:
    """The small copy over a paged cache."""

    def __init__(self, path: Path, ops: Ops, attention: Callable[[int], AttentionBackend]) -> None:
        from octavo.models.loader import LoadedModel

        opened = LoadedModel.open(Checkpoint.open(path), Mesh.single())
        shape = opened.shape
        backend = attention(shape.head_dim)
        self._model = opened.load(ops, backend)
        self._num_groups = len(shape.cache_groups)
        layouts = [
            (layer, cache_layout(backend, group.keeps, _NUM_BLOCKS, PROOF_BLOCK_SIZE))
            for group in shape.cache_groups
            for layer in group.layers
        ]
        self._caches = [torch.zeros(layout.shape, dtype=layout.dtype) for _, layout in sorted(layouts)]

    def step(self, *rows: tuple[Sequence[int], int, Sequence[int]]) -> list[Tensor]:
        """Compute rows (tokens, position of the first, block table); return the logits [tokens, vocab] of each."""
        counts = [len(tokens) for tokens, *_ in rows]
        ends = [start + len(tokens) for tokens, start, _ in rows]
        metadata = AttentionMetadata.build(counts, ends, [table for *_, table in rows], PROOF_BLOCK_SIZE)
        ids = torch.tensor([token for tokens, *_ in rows for token in tokens])
        positions = torch.tensor([start + i for tokens, start, _ in rows for i in range(len(tokens))])
        batch = ModelInput(ids, positions, (metadata,) * self._num_groups, self._caches)
        return list(torch.split(self._model.compute_logits(self._model(batch)), counts))


@torch.inference_mode()
def _compare(eager: Any, paged: _Paged) -> Verdict:
    generator = torch.Generator().manual_seed(1)
    high = eager.config.vocab_size
    a, b = (torch.randint(3, high, (length,), generator=generator).tolist() for length in _LENGTHS)
    expected = [eager(input_ids=torch.tensor([each])).logits[0].float() for each in (a, b)]
    left, right = (5, 9, 2, 7), (3, 11, 4, 8)
    alone = paged.step((a, 0, left))[0], paged.step((b, 0, right))[0]
    # the blocks are written anew, in other steps
    end, last = len(a) - _DECODED, len(b) - 1
    first = paged.step((a[:end], 0, right), (b[:_CUT], 0, left))
    second = paged.step((a[end : end + 1], end, right), (b[_CUT:last], _CUT, left))
    rest = [paged.step((a[place : place + 1], place, right))[0] for place in range(end + 1, len(a))]
    found = (
        torch.cat([first[0], second[0], *rest]),
        torch.cat([first[1], second[1], *paged.step((b[last:], last, left))]),
    )
    size = max(float(each.abs().max()) for each in expected)
    differences = torch.cat([each - wanted for each, wanted in zip(found, expected, strict=True)])
    error = float(differences.abs().max()) / max(size, 1e-6)
    if not error <= TOLERANCE:  # or the error is NaN
        return Verdict(error, f"it is {error:.1e} of the largest logit from eager attention, allowed are {TOLERANCE:g}")
    if not all(torch.equal(each, other) for each, other in zip(found, alone, strict=True)):
        return Verdict(error, "the bits of a sequence depend on how it is cut or on what is computed beside it")
    return Verdict(error)
