"""Kustomizations with resources and merge patches, rendered without kubectl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]


def render(folder: Path) -> list[Manifest]:
    """Return the manifests of a kustomization. Fails for fields that this does not know."""
    wanted = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert wanted.keys() <= {"apiVersion", "kind", "resources", "patches"}
    found: list[Manifest] = []
    for name in wanted["resources"]:
        path = folder / name
        found += render(path) if path.is_dir() else yaml.safe_load_all(path.read_text())
    for each in wanted.get("patches", ()):
        patch = yaml.safe_load((folder / each["path"]).read_text())
        (place,) = (place for place, manifest in enumerate(found) if identity(manifest) == identity(patch))
        found[place] = merged(found[place], patch)
    return found


def identity(manifest: Manifest) -> tuple[str, str]:
    return manifest["kind"], manifest["metadata"]["name"]


def merged(old: Any, new: Any) -> Any:
    """Return what a patch makes of a value: mappings are merged, everything else is replaced."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return new
    return old | {name: merged(old.get(name), value) for name, value in new.items()}
