"""`octavo pull | list | rm | models`: models of the hub on this machine, in its library's cache, and all families."""

from __future__ import annotations

import json
import sys
import time
from importlib.resources import files
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING

from octavo.cli.options import Given, with_options
from octavo.cli.terminal import say
from octavo.config.args import BUILTIN_MODEL, EngineArgs
from octavo.config.explain import render_bytes, render_table
from octavo.config.fields import arguments
from octavo.config.hub import locate_model
from octavo.config.model_names import full_name, short_names
from octavo.errors import CheckpointError, suggestion

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, HFCacheInfo

_NOT_FOR_A_CACHE = set(arguments(EngineArgs)) - {"model", "download_dir"}
_NOT_FOR_A_DOWNLOAD = _NOT_FOR_A_CACHE - {"revision", "model_source"}
_WEIGHTS = (".safetensors", ".bin")
_NAME = "Hub name or short name (qwen3:0.6b) of the model."


@with_options(EngineArgs, without=_NOT_FOR_A_DOWNLOAD, model="positional", model_help=_NAME)
def pull(*, given: Given) -> None:
    """Download a model from a hub, or what is missing of it. A download that was cut goes on where it was."""
    args = given.arguments(EngineArgs)
    if args.model == BUILTIN_MODEL and "model" not in given.values:
        raise CheckpointError("pull needs a model, as in `octavo pull qwen3:0.6b`")
    if not sys.stderr.isatty():
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
    path = locate_model(args)
    size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    say(f"{args.model}: {render_bytes(size)}", sys.stderr)
    print(path)


@with_options(EngineArgs, without={*_NOT_FOR_A_CACHE, "model"})
def list_models(*, given: Given) -> None:
    """List the models of the hub that are on this machine, with their size and when they were used last."""
    names: dict[str, str] = {}
    for short, full in short_names().items():
        names.setdefault(full, short)
    rows = [("MODEL", "SHORT NAME", "SIZE", "USED", "")]
    repos = _models(_scan(given.arguments(EngineArgs)))
    for _, repo in sorted(repos.items(), key=lambda item: item[0].lower()):
        files = {file.file_name for revision in repo.revisions for file in revision.files}
        note = "" if any(name.endswith(_WEIGHTS) for name in files) else "without weights"
        used = _ago(time.time() - repo.last_accessed)
        rows.append((repo.repo_id, names.get(repo.repo_id, ""), render_bytes(repo.size_on_disk), used, note))
    rows.append((BUILTIN_MODEL, "", "", "", "ships with octavo"))
    say(dedent(render_table(rows)))


@with_options(EngineArgs, without=_NOT_FOR_A_CACHE, model="positional", model_help=_NAME)
def remove(*, given: Given) -> None:
    """Remove a model of the hub from this machine, with all of its revisions."""
    args = given.arguments(EngineArgs)
    if "model" not in given.values:
        raise CheckpointError("rm needs a model; `octavo list` shows those that are there")
    if args.model == BUILTIN_MODEL:
        raise CheckpointError(f"{BUILTIN_MODEL} ships with octavo and is not in the hub's cache; name another model")
    name = full_name(args.model)
    cache = _scan(args)
    repos = _models(cache)
    if cache is None or name not in repos:
        raise CheckpointError(
            f"{name}: is not in the hub's cache; `octavo list` shows what is there{suggestion(name, repos)}"
        )
    strategy = cache.delete_revisions(*(revision.commit_hash for revision in repos[name].revisions))
    strategy.execute()
    if repos[name].repo_path.exists():
        raise CheckpointError(f"{name}: {repos[name].repo_path} cannot be removed; check the rights to that folder")
    say(f"{name}: removed, {strategy.expected_freed_size_str} are free again", sys.stderr)


def _models(cache: HFCacheInfo | None) -> dict[str, CachedRepoInfo]:
    return {} if cache is None else {repo.repo_id: repo for repo in cache.repos if repo.repo_type == "model"}


def _scan(args: EngineArgs) -> HFCacheInfo | None:
    """Return what the hub's cache has; None where there is no cache yet."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        return scan_cache_dir(Path(args.download_dir) if args.download_dir else None)
    except CacheNotFound:
        return None


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if (count := int(seconds // size)) >= 1:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "now"


def families() -> None:
    """List the families of models with their caches, quantization and parallel ways. The table is of this version."""
    table = json.loads((files("octavo") / "models" / "families.json").read_text(encoding="utf-8"))
    rows = [("FAMILY", "READS", "CACHES", "QUANTIZATION", "PARALLEL", "ARCHITECTURES")]
    for name, row in table.items():
        rows.append(
            (name, *(", ".join(row[key]) for key in ("reads", "caches", "quantization", "parallel", "architectures")))
        )
    rows.append(
        ("any other", "text", "as its class", "int8, int4, int4-g128", "", "by transformers' class, proved at start")
    )
    say(dedent(render_table(rows)))
