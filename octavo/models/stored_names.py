"""The names of stored tensors: which of them a model reads, which text is generated without, and what is wrong."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import torch

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.media_families import media_family
from octavo.config.safetensors_header import TensorInfo
from octavo.errors import CheckpointError
from octavo.gguf.names import OWN
from octavo.layers.layer import TensorSlot
from octavo.models.decoder import LAYER_NUMBER, DecoderStack
from octavo.models.weight_files import FLOATS, StoredTensor
from octavo.quantization.stored import CODED

_log = logging.getLogger(__name__)

_OF_A_TEXT_MODEL: Final = (
    "model.language_model.",
    "language_model.model.decoder.",
    "language_model.model.",
    "language_model.",
    "model.text_model.",
    "llm.model.",
    "llm.",
)
"""Prefixes of the names of a text model within a model that reads images or sound too."""
_OTHER_PARTS: Final = re.compile(
    r"(?:model\.)?((?:vision|visual|image|audio|sound_|speech|multi_modal|embed_(?:audio|tokens_extend|vision)|mm_|"
    r"connector|patch_merge|resampler_|mlp1|mtp|vit_)\w*)\..*"
)
"""Encoders of images and sound, the projections of their results, and layers that predict further tokens."""
_OF_ENCODERS: Final = re.compile(
    r"(?:model\.)?(aligner|apm|encoder|generation_\w+|image_newline|language_projection|merger|mlp1|mlp_AR|\w*projectors?|qformer|query_tokens|qwen2_model|resampler|sam_model|tts|visual_tokenizer|vte|vpm|"
    r"view_sep[ae]rator|vqmodel)(?:\..*)?"
)
"""Names of such parts in models that read images or sound, which text models have for other things."""
_MOST_DRAFT_LAYERS: Final = 16


def tensor_slots(model: DecoderStack) -> dict[str, TensorSlot]:
    """Return everything that the model's layers read, by name without prefix."""
    slots: dict[str, TensorSlot] = {}
    for path, layer in model.layers_by_path():
        for slot in layer.tensor_slots(path):
            assert slot.name not in slots, f"two layers read {slot.name}"
            slots[slot.name] = slot
    return slots


def check_tensors(checkpoint: Checkpoint, model: DecoderStack, stored: Iterable[TensorInfo | StoredTensor]) -> None:
    """Compare the tensors that the model reads with all stored tensors, before any is read. Raises CheckpointError."""
    slots = tensor_slots(model)
    found: dict[str, str] = {}
    for tensor in stored:
        name = strip_prefix(model, tensor.name)
        if name in found:
            raise CheckpointError(
                f"{tensor.file}: holds {tensor.name}, which came before as {found[name]}; "
                "the checkpoint is damaged, download it again"
            )
        found[name] = tensor.name
        slot = slots.get(name)
        if slot is None:
            continue
        is_table = slot.dtype is torch.int64 and tensor.dtype in ("I64", "I32")
        if tensor.dtype not in FLOATS and name.rpartition(".")[2] not in CODED and not is_table:
            raise CheckpointError(
                f"{tensor.file}: {tensor.name} is stored as {tensor.dtype}, expected F32, F16 or BF16; "
                "a quantised checkpoint needs a quantization_config in its config.json, which says how"
            )
        if tensor.shape != slot.shape:
            raise CheckpointError(
                f"{tensor.file}: {tensor.name} has shape {list(tensor.shape)}, config.json requires "
                f"{list(slot.shape)}; the two do not belong together"
            )
    _check_names(checkpoint, model, slots, found)


def strip_prefix(model: DecoderStack, name: str) -> str:
    """Return a checkpoint's name for a tensor without prefix."""
    if name.startswith(OWN):
        return model.stored_name(name.removeprefix(OWN))
    name = model.own_name(name)
    for prefix in (*_OF_A_TEXT_MODEL, *model.PREFIXES):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _check_names(
    checkpoint: Checkpoint, model: DecoderStack, slots: Mapping[str, TensorSlot], found: Mapping[str, str]
) -> None:
    """Compare names; `found` has the checkpoint's name of each stored tensor by its name without prefix."""
    missing = [slot.name for slot in slots.values() if slot.required and slot.name not in found]
    own = {name.partition(".")[0] for name in (*slots, *dict(model.layers_by_path()))}
    known = re.compile("|".join(f"(?:{pattern})" for pattern in model.IGNORED))
    unread: dict[str, str] = {}
    num_skipped: Counter[str] = Counter()
    for short, name in found.items():
        if short in slots or not model.owns(short) or known.fullmatch(short):
            continue
        if part := _other_part(checkpoint, model, short, own):
            num_skipped[part] += 1
        else:
            unread[short] = name
    architecture, names = checkpoint.architecture, [*unread.values()]
    if missing:
        because = model.INCOMPLETE
        if unread:
            because = (
                f"{_counted(names)} left over: config.json and weights belong to different models, or these are other "
                f"names than those that {architecture} reads"
            )
        raise CheckpointError(
            f"{checkpoint.path}: {_counted(missing)} missing, which {architecture} needs by its config.json; {because}"
        )
    if num_skipped:
        counts = ", ".join(f"{part} ({count} tensors)" for part, count in sorted(num_skipped.items()))
        _log.info("%s: skipped what %s generates text without: %s", checkpoint.path, architecture, counts)
    # names inside the decoder, where another model would compute with them
    inside = [name for short, name in unread.items() if short != name or short.partition(".")[0] in own]
    if inside:
        raise CheckpointError(
            f"{checkpoint.path}: {_counted(inside)} left over, which {architecture} does not read by its "
            "config.json; the weights belong to another config.json, or to a variant that is not implemented"
        )
    if unread:
        _log.warning("%s: %s no part of %s and ignored", checkpoint.path, _counted(names), architecture)


def _other_part(checkpoint: Checkpoint, model: DecoderStack, name: str, own: Collection[str]) -> str | None:
    """Return the part of the checkpoint that a tensor without slot belongs to, where text is generated without it.

    own: the parts that the model has. Encoders are such a part of models without them: text models, and later stages
    of a pipeline. Layers behind the last one are such a part where `num_nextn_predict_layers` counts them.
    """
    if found := _OTHER_PARTS.fullmatch(name):
        return found[1]
    has_encoders = media_family(checkpoint.architecture).is_around_text
    if has_encoders and (found := _OF_ENCODERS.fullmatch(name)) and found[1] not in own:
        return found[1]
    num_drafts = min(checkpoint.optional_int("num_nextn_predict_layers") or 0, _MOST_DRAFT_LAYERS)
    part, _, rest = name.partition(".")
    index = rest.partition(".")[0]
    if part == "layers" and LAYER_NUMBER.fullmatch(index) and 0 <= int(index) - model.config.num_layers < num_drafts:
        return f"layers.{index}"
    return None


def _counted(names: list[str]) -> str:
    """Return `a.weight is` or `a.weight and 3 more are`."""
    return f"{names[0]} is" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more are"
