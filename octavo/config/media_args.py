"""What a person may set about images in prompts; a part of `ModelArgs`."""

from __future__ import annotations

from typing import Any, Final

from octavo.config.fields import ArgumentGroup, arg
from octavo.errors import ConfigError, suggestion

MOST_IMAGES: Final = 16
MOST_SOUNDS: Final = 4
MOST_VIDEOS: Final = 2
"""Most images, sounds and videos of one prompt, by default."""
_IMAGE_SETTINGS: Final[dict[str, int | None]] = {
    "min_pixels": 1 << 25,
    "max_pixels": 1 << 31,
    "min_patches": 256,
    "max_patches": 256,
    "min_tiles": 256,
    "max_tiles": 256,
    "min_image_tokens": 8192,
    "max_image_tokens": 8192,
    "max_slice_nums": 256,
    "max_soft_tokens": 8192,
    "do_image_splitting": None,
}
"""Settings of image processors that decide how many tokens an image has, and the most that each may be, so that no
image is scaled up to more than memory holds; None for true or false."""
_KNOWN_SETTINGS: Final = ", ".join(sorted(_IMAGE_SETTINGS))
_DEFAULTS: Final = {"image": MOST_IMAGES, "video": MOST_VIDEOS, "audio": MOST_SOUNDS}


class MediaArgs(ArgumentGroup, heading="Images and sounds"):
    """What prompts may bring besides text."""

    limit_mm_per_prompt: dict[str, int] = arg(
        {},
        f'Most images, videos and sounds in one prompt, as image=4 or {{"image": 4, "video": 1}}; {MOST_IMAGES}, '
        f"{MOST_VIDEOS} and {MOST_SOUNDS} by default. With image=0 a model that reads images, and with audio=0 one "
        "that hears sounds, reads text alone, without its encoder.",
    )
    mm_processor_kwargs: dict[str, Any] = arg(
        {},
        "Settings of the image processor in place of the checkpoint's, as JSON, such as "
        f'{{"max_pixels": 602112}}; known are {_KNOWN_SETTINGS}.',
    )
    mmproj: str | None = arg(
        None,
        "File of llama.cpp with the vision encoder of a model in a GGUF file; by default the one beside it with "
        "mmproj in its name that fits. With limit_mm_per_prompt image=0 none is read.",
    )
    allowed_media_domains: tuple[str, ...] = arg(
        (),
        "Hosts from which http: and https: URLs of images are fetched; none by default. A host with a private "
        "address is named by that address.",
    )
    allowed_local_media_path: str = arg("", "Folder under which file: URLs of images are read; none by default.")


def media_limits(args: MediaArgs) -> dict[str, int]:
    """Return how many images, videos and sounds a prompt may have. Raises ConfigError, for other settings too."""
    for name, value in args.mm_processor_kwargs.items():
        if name not in _IMAGE_SETTINGS:
            raise ConfigError(
                f"mm_processor_kwargs has {name}; known are {_KNOWN_SETTINGS}{suggestion(name, _IMAGE_SETTINGS)}"
            )
        most = _IMAGE_SETTINGS[name]
        fits = type(value) is bool if most is None else type(value) is int and 0 < value <= most
        if not fits:
            expected = "true or false" if most is None else f"1 to {most:,}"
            raise ConfigError(f"mm_processor_kwargs has {name}={str(value)[:100]}, expected {expected}")
    limits = args.limit_mm_per_prompt
    for kind, limit in limits.items():
        if kind not in _DEFAULTS or not 0 <= limit <= 1024:
            raise ConfigError(
                f"limit_mm_per_prompt has {kind}={limit}, expected {', '.join(_DEFAULTS)} with a number from 0 to 1024"
            )
    return _DEFAULTS | limits
