"""From the name of a model to a directory on this machine: a local one, the shipped one, or a download from a hub.

A hub's library is imported only when a name has to be looked up there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from os.path import expanduser
from pathlib import Path
from typing import Any, Final, NamedTuple

from octavo.builtin import model_directory
from octavo.config.args import BUILTIN_MODEL, EngineArgs, ModelSource
from octavo.config.checkpoint import CONFIG, Checkpoint, model_file
from octavo.config.gguf_checkpoint import fitting_mmproj
from octavo.config.listed import refuse_unlisted
from octavo.config.media_args import media_limits
from octavo.config.model_names import full_name, sizes_of
from octavo.config.pooling.sentence_modules import listed_modules
from octavo.config.released.mistral import is_native
from octavo.config.released.phi4 import adapter_files
from octavo.config.section import read_json_object
from octavo.config.sources import offline_variable
from octavo.config.speculative_args import speculative_config
from octavo.errors import CheckpointError, UnsupportedModel, is_disk_full, suggestion
from octavo.gguf.reader import is_gguf, is_mmproj

_HUB_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")
_GGUF_NAME: Final = re.compile(r"([\w.-]+/[\w.-]+):([\w.-]+)")
# fonts are those in which ERNIE draws on frames of videos
_TEXT_FILES: Final = [
    *("*.json", "*.jinja", "*.txt", "tokenizer.model", "tiktoken.model", "qwen.tiktoken", "*.ttf", "artifact.metadata")
]
# of a folder that modules.json of sentence-transformers names
_MODULE_FILES: Final = ("config.json", "model.safetensors", "pytorch_model.bin")
# heads beside the model of BGE-M3
_OTHER_WEIGHTS: Final = ("sparse_linear.pt", "colbert_linear.pt")
# in the order of preference; a repository often holds the same weights in both
_WEIGHT_FILES: Final = (["*.safetensors", *_OTHER_WEIGHTS], ["pytorch_model*.bin", *_OTHER_WEIGHTS])
# of the types in which hubs have it, the one that almost all have
_ENCODER: Final = "*mmproj*[-_.][fF]16*.gguf"
# copies of the weights in other layouts, exports for other programs
_NEVER: Final = ["*/*", "consolidated*"]


def is_hub_name(name: str) -> bool:
    """Return whether `name` has the form of a name on a hub: owner/model[:type of a GGUF file], or a single word."""
    own = _GGUF_NAME.fullmatch(name)
    return _HUB_NAME.fullmatch(own[1] if own else name) is not None and not name.startswith((".", "~"))


def locate_model(args: EngineArgs) -> Path:
    """Return the directory of `args.model`, downloaded where need be: weights only of an architecture that may be read.

    Raises CheckpointError, and UnsupportedModel.
    """
    texts = _locate(args, args.model, args.revision, with_weights=False)
    if args.load_format == "dummy" or texts == Path(expanduser(args.model)):
        return texts
    if (texts / CONFIG).is_file():
        refuse_unlisted(Checkpoint.open(texts, args.hf_overrides))
    return _locate(args, args.model, args.revision, with_weights=True)


def locate_tokenizer(args: EngineArgs, model_path: Path) -> Path:
    """Return the directory or tokenizer.json of `args.tokenizer`; by default `model_path`."""
    if args.tokenizer is None:
        return model_path
    path = Path(expanduser(args.tokenizer))
    if path.is_file():
        return path
    return _locate(args, args.tokenizer, args.tokenizer_revision, with_weights=False)


def locate_draft(args: EngineArgs, model_path: Path) -> Path | None:
    """Return the directory of the model that guesses: the one that `speculative_config` names, else `model_path`, which
    has layers for it; None where no model guesses."""
    config = speculative_config(args)
    if config is None or not config.has_model:
        return None
    return model_path if config.model is None else locate_named(args, config.model, config.revision)


def locate_named(args: EngineArgs, model: str, revision: str | None) -> Path:
    """Return the directory of a model that guesses, downloaded where need be."""
    return _locate(args, model, revision, with_weights=args.load_format != "dummy")


def locate_mmproj(args: EngineArgs, model_path: Path) -> Path | None:
    """Return the file with the vision encoder of a GGUF file: the one that `mmproj` names, else one beside it that
    fits. None where there is none, and where prompts may have no images.

    Raises CheckpointError, and UnsupportedModel for a file that is named and not read.
    """
    if media_limits(args)["image"] == 0:
        return None
    if args.mmproj is not None:
        path = Path(expanduser(args.mmproj))
        if not is_gguf(path):
            state = "is no GGUF file" if path.exists() else "does not exist"
            raise CheckpointError(f"mmproj is {path}, which {state}; name the mmproj-*.gguf file of the model")
        return path
    model = model_file(model_path)
    return fitting_mmproj(model) if is_gguf(model) else None


def _locate(args: EngineArgs, model: str, revision: str | None, *, with_weights: bool) -> Path:
    return locate(
        model,
        revision,
        source=args.model_source,
        cache_dir=Path(args.download_dir) if args.download_dir else None,
        with_weights=with_weights,
        with_encoder=model == args.model and args.mmproj is None and media_limits(args)["image"] > 0,
    )


def locate(
    model: str,
    revision: str | None = None,
    *,
    source: ModelSource = "huggingface",
    endpoint: str | None = None,
    cache_dir: Path | None = None,
    with_weights: bool = True,
    with_encoder: bool = False,
    text_files: Sequence[str] = _TEXT_FILES,
) -> Path:
    """Return the directory that `model` names: itself when it exists, else what the hub has of it at `revision`.

    A short name, such as qwen3:0.6b, stands for its entry in the table of short names, and owner/model:Q4_K_M for the
    first GGUF file of that type, `with_encoder` beside the one of its vision encoder in F16.

    Downloads configuration and tokenizer (`text_files`), and `with_weights` the safetensors (PyTorch archives only
    where there are none); what is in the cache is not fetched again, and is enough when the hub cannot be reached.
    `endpoint` replaces the hub's address, `cache_dir` its library's own cache. Raises CheckpointError that says what to
    do.
    """
    path = Path(expanduser(model))
    try:
        if path.is_dir():
            return path
    except OSError as error:
        raise CheckpointError(
            f"{model[:60]}: cannot be looked for ({error.strerror}); check the path or the name"
        ) from error
    model = full_name(model)
    if model == BUILTIN_MODEL:
        return _shipped()
    if is_gguf(path):
        return path
    if path.exists():
        raise CheckpointError(
            f"{model}: is a file, expected a GGUF file, a model directory or the name of a model on a hub; give the "
            f"directory with {CONFIG} and the weights"
        )
    if not is_hub_name(model):
        raise CheckpointError(
            f"{model}: does not exist, and is no name on a hub (owner/model); check the path or the name{_meant(model)}"
        )
    wanted = _Wanted(model, revision, text_files, with_weights)
    if source == "modelscope":
        return _from_modelscope(wanted, cache_dir)
    if named := _GGUF_NAME.fullmatch(model):
        # hubs have files of both spellings, in one part or several
        files = [f"*[-.]{kind}{end}.gguf" for kind in {named[2].upper(), named[2].lower()} for end in ("", "-*-of-*")]
        wanted = _Wanted(named[1], revision, [*files, _ENCODER] if with_encoder else files, with_weights=False)
        path = _from_hugging_face(wanted, endpoint, cache_dir)
        found = sorted(each for pattern in files for each in path.glob(pattern) if not is_mmproj(each))
        if not found:
            raise CheckpointError(f"{model}: {named[1]} has no GGUF file of type {named[2]}; look at its list of files")
        return found[0]
    return _from_hugging_face(wanted, endpoint, cache_dir)


def _meant(model: str) -> str:
    """Return what follows an error about a name with blanks around it, or the address of its page: the name alone."""
    name = re.sub(r"^https?://[^/]+/", "", model.strip()).rstrip("/:")  # a slash before it begins a path
    return f"; did you mean {name}?" if name != model and is_hub_name(name) else ""


class _Wanted(NamedTuple):
    """What is downloaded of a model on a hub."""

    model: str
    revision: str | None
    text_files: Sequence[str]
    with_weights: bool

    def __str__(self) -> str:
        return f"{self.model} at revision {self.revision}" if self.revision else self.model


def _shipped() -> Path:
    path = model_directory()
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: the demonstration model is missing from this installation; install octavo again, make it with "
            "`python -m training.octavo_tiny.train` in a checkout, or name another model"
        )
    return path


def _from_hugging_face(wanted: _Wanted, endpoint: str | None, cache_dir: Path | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    snapshot = partial(snapshot_download, wanted.model, endpoint=endpoint, cache_dir=cache_dir)
    hub = endpoint or "the Hugging Face hub"
    offline = offline_variable()
    near = suggestion(wanted.model, [BUILTIN_MODEL]) or sizes_of(wanted.model)
    try:
        path = _download(snapshot, wanted, by_commit=True)
    except GatedRepoError as error:
        raise CheckpointError(
            f"{wanted}: {hub} gives it only to those who accepted its terms; accept them on its page, then log in with "
            "`hf auth login` or set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{wanted}: {hub} has no such model, and there is no such file or directory; check the name, and if the "
            f"model is private log in with `hf auth login` or set HF_TOKEN{near}"
        ) from error
    except RevisionNotFoundError as error:
        raise CheckpointError(
            f"{wanted}: {hub} has the model but not this revision; check branch, tag or commit"
        ) from error
    except LocalEntryNotFoundError as error:
        if offline is not None:
            raise _offline(wanted, hub, offline) from error
        raise CheckpointError(
            f"{wanted}: {hub} cannot be reached, and there is no such file or directory and no complete download of "
            f"such a model; check the connection, or give the path of a file or directory{near}"
        ) from error
    except Exception as error:
        # the library lets many kinds of network and disk trouble through, which differ by its release
        raise CheckpointError(f"{wanted}: the download from {hub} failed: {_reason(error)}") from error
    is_file = any(each.endswith(".gguf") for each in wanted.text_files)
    if not is_file and not (path / CONFIG).is_file() and "gguf" in wanted.model.lower():
        raise UnsupportedModel(
            f"{wanted}: has no {CONFIG}, and by its name holds GGUF files; name the type of one of them, such as "
            f"{wanted.model}:Q4_K_M, or use the model that they were made from"
        )
    if offline is not None and wanted.with_weights and not any(any(path.glob(kind[0])) for kind in _WEIGHT_FILES):
        raise _offline(wanted, hub, offline)
    return path


def _offline(wanted: _Wanted, hub: str, variable: str) -> CheckpointError:
    return CheckpointError(
        f"{wanted}: {hub} is not asked, because {variable} is set, and there is no such file or directory and no "
        f"complete download of such a model; unset {variable} to download it, or give the path of a file or directory"
    )


def _from_modelscope(wanted: _Wanted, cache_dir: Path | None) -> Path:
    try:
        snapshot_download = import_module("modelscope.hub.snapshot_download").snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"{wanted.model}: ModelScope's library is not installed; run `pip install modelscope`, or take the model "
            "from Hugging Face (model_source huggingface)"
        ) from error

    snapshot = partial(snapshot_download, wanted.model, cache_dir=None if cache_dir is None else str(cache_dir))
    try:
        return _download(snapshot, wanted)
    except Exception as error:
        # the library's own errors have no common base
        raise CheckpointError(f"{wanted}: the download from ModelScope failed: {_reason(error)}") from error


def _download(snapshot: Callable[..., Any], wanted: _Wanted, *, by_commit: bool = False) -> Path:
    """Download texts, and weights in the first form that there is; return their directory.

    by_commit: that directory is called after its commit, and weights are downloaded of the same commit.
    """

    def fetch(patterns: Sequence[str], revision: str | None, never: Sequence[str] = _NEVER) -> Path:
        return Path(snapshot(revision=revision, allow_patterns=list(patterns), ignore_patterns=list(never)))

    path = fetch(wanted.text_files, wanted.revision)
    same = path.name if by_commit else wanted.revision
    folders = [each.relative_to(path) for _, each in listed_modules(path) or () if each != path]
    if folders:
        fetch([f"{folder}/{file}" for folder in folders for file in _MODULE_FILES], same, ())
    config = path / CONFIG
    if wanted.with_weights and config.is_file() and (adapter := adapter_files(read_json_object(config))):
        fetch(adapter, same, ())
    if wanted.with_weights and is_native(path):
        return fetch(["consolidated*"], same, _NEVER[:1])
    for patterns in _WEIGHT_FILES if wanted.with_weights else ():
        path = fetch(patterns, same)
        if any(path.glob(patterns[0])):
            break
    return path


def _reason(error: Exception) -> str:
    """Return why a download failed, in one line, with a remedy where the disk is full."""
    if is_disk_full(error):
        return "the disk is full; free some space, or name a directory on another disk with download_dir"
    if isinstance(error, OSError) and error.filename is not None:
        return (
            f"{error.filename} cannot be written or read ({error.strerror}); name a directory that may be written to "
            "with download_dir, or HF_HOME"
        )
    return str(error).strip().partition("\n")[0] or type(error).__name__
