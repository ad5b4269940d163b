"""Adapters for tasks, of which one is added to the weights of a model for vectors: Jina Embeddings v3 and v5.

Sources: https://arxiv.org/abs/2409.10173, https://arxiv.org/abs/2602.15547.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from octavo.config.section import Section, shown
from octavo.errors import CheckpointError

JINA5: Final = "JinaEmbeddingsV5Model"
FOLDER: Final = "adapters"
FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
_TASKS: Final = ("retrieval", "text-matching", "classification", "clustering")
"""Those of v5, the default first."""
_KEY: Final = "jina_task"


class TaskAdapter(NamedTuple):
    """The folder of the adapter of a task; or its place among adapters that are stored beside each weight, and the
    factor of their products."""

    folder: Path | None = None
    place: int = 0
    scale: float = 1.0


def jina5_layout(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of Jina Embeddings v5 with the type of the model that it is made of."""
    return {**config, "model_type": "eurobert" if config.get("is_decoder") is False else "qwen3"}


def task_adapter(c: Section, path: Path) -> TaskAdapter | None:
    """Return the adapter that is added to the weights of a checkpoint in the folder `path`: that of `jina_task`, or of
    the task that vLLM takes without it. None where there is none. Raises CheckpointError."""
    names, task = c.values.get("architectures"), c.values.get(_KEY)
    if names == [JINA5]:
        known = tuple(each for each in _TASKS if (path / FOLDER / each / FILES[0]).is_file())
        if task is None and not (path / FOLDER).is_dir():  # the checkpoint of one task, whose weights have it
            return None
        return TaskAdapter(path / FOLDER / known[_place(c, task, known, _TASKS[0])])
    listed = c.values.get("lora_adaptations")
    if c.values.get("model_type") != "jina_embeddings_v3" or not isinstance(listed, list) or not listed:
        return None
    tasks = tuple(map(str, listed))
    scale = c.positive_float("lora_alpha", 1.0) / c.positive("lora_rank", 4)
    return TaskAdapter(place=_place(c, task, tasks, tasks[-1]), scale=scale)


def _place(c: Section, task: Any, known: tuple[str, ...], default: str) -> int:
    task = default if task is None else task
    if task not in known:
        raise CheckpointError(
            f"{c.where}: {_KEY} is {shown(task)}, expected a task that this checkpoint has an adapter for "
            f"({', '.join(known) or 'it has none'}); set it with hf_overrides"
        )
    return known.index(task)
