"""The settings of image processors, for the checkpoints whose images octavo reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeGuard

from octavo.config.checkpoint import Checkpoint
from octavo.config.media.encoder_sizes import check_encoder
from octavo.config.media.image_fits import MOST_TILES
from octavo.config.media.media_families import media_family
from octavo.config.media.media_family import MediaFamily
from octavo.config.section import Section, read_json_object, read_section

MOST_CROSS_IMAGES: Final = 4
"""Most images of one prompt where layers read them through caches, which have room for so many."""

PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json")
"""Files that may have the settings of processors."""
_MOST_PIXELS: Final = 1 << 25
"""Most pixels to which small images are scaled up."""
_LONGEST_EDGE: Final = 1 << 13
_PATCHES: Final = {
    "patch_size": "patch_size",
    "merge_size": "spatial_merge_size",
    "temporal_patch_size": "temporal_patch_size",
}
"""Settings of processors, and their names in the configs of encoders."""
_SIZES: Final = (
    *("size", "crop_size", "max_image_size", "num_crops", "min_pixels", "max_pixels", "min_patches", "max_patches"),
    *("max_slice_nums", "scale_resolution", "min_size", "min_tiles", "max_tiles", "tile_size", "encoder_patch_size"),
    *("min_image_tokens", "max_image_tokens"),
)
_ORDERED: Final = (
    ("size.shortest_edge", "size.longest_edge"),
    *((f"min_{each}", f"max_{each}") for each in ("pixels", "patches", "tiles", "image_tokens")),
)
"""Pairs of sizes: the first must not be larger than the second."""
_NEEDED: Final = (*_PATCHES, "size", "resample", "rescale_factor", "image_mean", "image_std", "do_resize")
"""Settings that a null leaves out, as a key that is not there: no image is read with it."""
_NUM_CHANNELS: Final = 3
_OF_CHANNELS: Final = (
    ("image_mean", -math.inf, math.inf, "finite numbers"),
    ("image_std", 0.0, math.inf, "numbers above 0"),
    ("background_color", -1, 256, "numbers from 0 to 255"),
)
_FILTERS: Final = range(6)


def image_settings(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """Return the settings of the image processor of a checkpoint that has images read; None for one without.

    Raises CheckpointError for a damaged file, for settings with which images become NaN or take all memory, and for
    sizes that no encoder can have.
    """
    family, config = media_family(checkpoint.architecture), checkpoint.stored
    if not family.images:
        return None
    for part in ("vision_config", "qformer_config", "projector_config", "adapter_config"):
        check_encoder(config.section(part))
    if checkpoint.image_processor is not None:
        return _checked(checkpoint.image_processor, str(checkpoint.mmproj or checkpoint.where))
    if family.computed is not None:
        made = family.computed(config, lambda name: read_section(checkpoint.path / name, may_lack=True))
        return None if made is None else _checked(made, checkpoint.where)
    for file in (checkpoint.path / each for each in PROCESSOR_FILES):
        found = _stored_settings(family, file)
        if "image_processor_type" in found.values:
            name = found.str("image_processor_type")
            _check_patches(found, config)
            own = {"image_processor_type": family.processors.get(name, name), **family.fit(found, config)}
            return _checked(
                {**found.values, **_merged_patch(checkpoint), **own}, found.where, _fixed_side(family, config)
            )
    return None if family.unstated is None else _checked(family.unstated(config), checkpoint.where)


def _stored_settings(family: MediaFamily, file: Path) -> Section:
    """Return what a file says of the image processor, in today's words; nothing where it is not there."""
    values = read_json_object(file) if file.is_file() else {}
    found = values.get("image_processor", values)
    if not isinstance(found, dict):
        return Section({}, str(file))
    if found and family.settings is not None:
        found = family.settings(Section(found, str(file)))
    return Section({name: each for name, each in found.items() if each is not None or name not in _NEEDED}, str(file))


def _check_patches(settings: Section, config: Section) -> None:
    """Raise CheckpointError for patches and pieces of images that are none, or that the encoder does not read."""
    vision = config.section("vision_config") or config
    for name, of_encoder in _PATCHES.items():
        if settings.values.get(name) is None:
            continue
        if isinstance(settings.values[name], Mapping):
            sides = settings.section(name) or settings
            for side in ("height", "width"):
                if sides.positive(side) > _LONGEST_EDGE:
                    raise sides.error(side, f"1 to {_LONGEST_EDGE:,}")
            continue
        size, expected = settings.positive(name), vision.values.get(of_encoder)
        if type(expected) is int and size != expected:
            raise settings.error(name, f"{of_encoder} of the encoder in config.json, which is {expected}")
        if size > _LONGEST_EDGE:
            raise settings.error(name, f"1 to {_LONGEST_EDGE:,}")
    grids = [
        sorted(_pinpoints(each)) for each in (settings, config) if each.values.get("image_grid_pinpoints") is not None
    ]
    if grids[1:] and grids[0] != grids[1]:
        raise config.error("image_grid_pinpoints", f"those of {settings.where}")


def _pinpoints(section: Section) -> list[Any]:
    """Return the heights and widths to which images are scaled before they are cut. Raises CheckpointError."""
    found = section.values["image_grid_pinpoints"]
    found = found if isinstance(found, list) else []
    sides = [side for pair in found if isinstance(pair, list) and len(pair) == 2 for side in pair]
    if not found or len(sides) != 2 * len(found) or not all(type(each) is int and each > 0 for each in sides):
        raise section.error("image_grid_pinpoints", "pairs of a height and a width")
    return found


def _fixed_side(family: MediaFamily, config: Section) -> tuple[str, int] | None:
    """Return the setting with the side of images and this side, where an encoder reads images of one size; None where
    it reads several. Raises CheckpointError."""
    vision, side = config.part("vision_config"), family.side
    if side is None or side.of not in (None, vision.values.get("model_type")):
        return None
    if side.default is None:
        found = vision.optional_positive("image_size")
        return None if found is None else (side.setting, found)
    sides = vision.values.get("image_size")
    if isinstance(sides, list):  # of InternVL's, some are no squares
        return (side.setting, sides[0]) if len({*sides}) == 1 else None
    return side.setting, vision.positive("image_size", side.default)


def _merged_patch(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the size that Pixtral's processor gives its image processor: sizes of images are multiples of that of
    patches that are merged. Raises CheckpointError."""
    section = read_section(checkpoint.path / PROCESSOR_FILES[1], may_lack=True)
    if section.values.get("processor_class") != "PixtralProcessor":
        return {}
    size = section.positive("patch_size", 16) * section.positive("spatial_merge_size", 1)
    return {"patch_size": {"height": size, "width": size}}


def _checked(settings: Mapping[str, Any], where: str, fixed: tuple[str, int] | None = None) -> Mapping[str, Any]:
    """Return the settings of an image processor. Raises CheckpointError, which names one that no image survives.

    fixed: the setting with the side of images, and this side, where the encoder reads those of one size.
    """
    name, side = fixed or ("size", 0)
    if fixed is not None and settings.get(name) is None:
        own = ("longest_edge",) if name == "max_image_size" else ("height", "width")
        settings = {**settings, name: dict.fromkeys(own, side)}
    sizes = _flat(settings)
    section = Section({**settings, **sizes}, where)
    ways = (name, *(f"{name}.{each}" for each in ("height", "width", "longest_edge")))
    if fixed is not None and any(sizes.get(each, side) != side for each in ways):
        raise section.error(name, f"the image_size of vision_config, {side} x {side}")
    _check_steps(section)
    _check_sizes(section, sizes, str(settings["image_processor_type"]))
    return settings


def _check_sizes(section: Section, sizes: Mapping[str, Any], processor: str) -> None:
    """Raise CheckpointError for sizes that are none, that no image survives, or that contradict each other."""
    counts_pixels = processor.startswith(("Ernie", "HYV4VL", "HunYuan", "Qwen", "Glm", "PaddleOCR", "VideoLlama"))
    counts_pixels &= not processor.startswith("Glm5Next")  # which counts vectors
    no_aims = ("size.longest_edge", "max_pixels") if counts_pixels else ()  # nothing is scaled up to them
    for name, value in sizes.items():
        most = _MOST_PIXELS if counts_pixels else _LONGEST_EDGE
        is_count = name.endswith(("_crops", "_patches", "_tiles", "_nums"))
        most = MOST_TILES if is_count and not processor.startswith("Kimi") else most
        is_none = isinstance(value, str | bool | Mapping) or ("." in name and isinstance(value, list))
        if is_none or (is_count and type(value) not in (int, type(None))):
            raise section.error(name, "an integer" if is_count else "a number")
        if _is_number(value) and not (0 < value <= most or (value > most and name in no_aims)):
            raise section.error(name, f"1 to {most:,}")
    edges = [sizes.get(f"size.{each}") is None for each in ("shortest_edge", "longest_edge")]
    if counts_pixels and edges[0] != edges[1]:
        raise section.error("size", "shortest_edge and longest_edge")
    for lower, upper in _ORDERED:
        first, second = sizes.get(lower), sizes.get(upper)
        if _is_number(first) and _is_number(second) and first > second:
            raise section.error(lower, f"at most {upper}, which is {second:,}")


def _check_steps(section: Section) -> None:
    """Raise CheckpointError for factors and flags of the processor's steps with which it fails, or makes NaN."""
    for name, least, most, words in _OF_CHANNELS:
        value = section.values.get(name)
        numbers = value if isinstance(value, list) else [value] * _NUM_CHANNELS
        is_fit = len(numbers) == _NUM_CHANNELS and all(_is_number(each) and least < each < most for each in numbers)
        if value is not None and not is_fit:
            raise section.error(name, f"{_NUM_CHANNELS} {words}")
    section.positive_float("rescale_factor", 1.0)
    if (filter_id := section.optional_int("resample")) is not None and filter_id not in _FILTERS:
        raise section.error("resample", f"one of Pillow's filters, {_FILTERS.start} to {_FILTERS.stop - 1}")
    for name in section.values:
        if name.startswith("do_"):
            section.bool(name, False)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes among settings, those in objects by both names with a dot between them."""
    found: dict[str, Any] = {}
    for name in _SIZES:
        value = settings.get(name)
        if isinstance(value, Mapping) and name.endswith("size"):
            found |= {f"{name}.{key}": each for key, each in value.items()}
        else:
            found[name] = value
    return found


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
