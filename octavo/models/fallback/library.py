"""Finds the class of transformers that computes an architecture. No code of a checkpoint is ever run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NamedTuple

import torch

from octavo.config.blamed_keys import blamed_keys
from octavo.config.checkpoint import Checkpoint
from octavo.config.section import COUNTS, shown
from octavo.core.light_torch import import_meta_registrations
from octavo.errors import CheckpointError, UnsupportedModel, one_line

INSTALL = "pip install 'octavo[transformers]'"


_NUMBERS: Final = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads")


_NOT_OF_THE_MODEL: Final = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")
"""Keys that say who wrote the config, and how."""


class Library(NamedTuple):
    """A class of transformers and the config that it is made with."""

    model: Any
    config: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Library) and self.model is other.model and self._compared() == other._compared()

    def __ne__(self, other: object) -> bool:  # a tuple has its own
        return not self == other

    def __hash__(self) -> int:
        return hash(self.model)

    def _compared(self) -> dict[str, Any]:
        return {name: value for name, value in self.config.to_dict().items() if name not in _NOT_OF_THE_MODEL}

    def eager(self) -> Any:
        """Return the model with random weights in float32, which computes attention as transformers defines it."""
        return self._made("eager")

    def without_weights(self, name: str) -> Any:
        """Return the model with weights on the meta device and buffers that have values. name: that of functions in
        transformers' tables, which compute attention and experts. Raises UnsupportedModel for a buffer without one."""
        with torch.device("meta"):
            made = self._made(name)
        fill_buffers(made)
        return made

    def _made(self, name: str) -> Any:
        kinds = {"attn_implementation": name, "experts_implementation": name}
        return self.model._from_config(copy.deepcopy(self.config), dtype=torch.float32, **kinds).eval()


def fill_buffers(model: Any, device: torch.device | str = "cpu") -> None:
    """Compute the buffers that no checkpoint has, on a device and in float32 where they are floats.

    The parameters are on the meta device, or are not drawn again. Raises UnsupportedModel for a buffer that is not set.
    """
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    # the innermost model that a module is in sets its buffers
    owners = {part: owner for owner in model.modules() if hasattr(owner, "_init_weights") for part in owner.modules()}
    for module in model.modules():
        buffers = {name: module._buffers[name] for name in module._non_persistent_buffers_set}
        temporary = {name: buffer for name, buffer in buffers.items() if buffer is not None}
        for name, buffer in temporary.items():
            unset, dtype = (torch.nan, torch.float32) if buffer.is_floating_point() else (0, buffer.dtype)
            module._buffers[name] = torch.full_like(buffer, unset, dtype=dtype, device=device)
        if temporary:
            with torch.device(device):
                owners[module]._init_weights(module)
        for name in temporary:
            if (module._buffers[name] != module._buffers[name]).any():
                raise UnsupportedModel(f"{type(module).__name__} does not set its buffer {name}")


@cache  # the metadata of transformers takes milliseconds to read, and each start of an engine asks
def library_version() -> str | None:
    """Return the version of transformers; None where it is not installed."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


def find_class(checkpoint: Checkpoint) -> str | None:
    """Return the name of transformers' class of a text model for this checkpoint; None where there is none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    wanted = checkpoint.architecture
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(checkpoint.values.get("model_type")))
    return wanted if wanted in ((names,) if isinstance(names, str) else names or ()) else None


def refusal(
    checkpoint: Checkpoint, error: Exception, values: Mapping[str, Any], make: Callable[[dict[str, Any]], object]
) -> CheckpointError:
    """Return the exception for an error of transformers about `values` of a checkpoint, with the keys that it is about.

    make: gives values to transformers.
    """
    keys = blamed_keys(error, values, make)
    return CheckpointError(
        f"{checkpoint.origin()}: {keys and f'{keys}: '}transformers {library_version()} refuses it "
        f"({one_line(error)}); download config.json again"
    )


def open_library(checkpoint: Checkpoint) -> Library:
    """Return the class and the config of the checkpoint. Raises CheckpointError for a config that transformers refuses,
    and UnsupportedModel."""
    import_meta_registrations()
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name, model_type = find_class(checkpoint), str(checkpoint.values.get("model_type"))
    if name is None:
        where = checkpoint.origin("architectures", "model_type")
        raise UnsupportedModel(
            f"{where}: architecture is {checkpoint.architecture} and model_type is {shown(model_type)}, "
            "expected a text model of transformers"
        )
    for count in COUNTS.keys() & checkpoint.values.keys():
        if checkpoint.values[count]:
            checkpoint.positive(count)
    values = {key: value for key, value in checkpoint.values.items() if key != "auto_map"}
    make = CONFIG_MAPPING[model_type].from_dict
    try:
        config = make(values)
    except Exception as error:  # whatever it raises is about the values
        raise refusal(checkpoint, error, values, make) from error
    for number in _NUMBERS:
        try:
            found = getattr(config, number, None)
        except Exception as error:  # of configs whose layers differ, which have no one number
            raise UnsupportedModel(
                f"{checkpoint.origin(number)}: {number} of {name} is not one number: {one_line(error)}"
            ) from error
        if not isinstance(found, int):
            raise UnsupportedModel(
                f"{checkpoint.origin(number)}: {number} of {name} is {shown(found)}, expected an integer, as in "
                "the config of one text model with attention"
            )
    return Library(getattr(transformers, name), config)


def renamings(causal: Any) -> Callable[[str], str]:
    """Return the function that maps names of tensors in checkpoints to names in the class of this module."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    steps = [each for each in get_model_conversion_mapping(causal) if isinstance(each, WeightRenaming)]

    def rename(name: str) -> str:
        for step in steps:
            name = step.rename_source_key(name)[0]
        return name

    return rename
