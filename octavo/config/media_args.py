"""What a person may set about images in prompts; a part of `ModelArgs`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from octavo.config.fields import Arg
from octavo.errors import ConfigError

MOST_IMAGES: Final = 16
MOST_SOUNDS: Final = 4
MOST_VIDEOS: Final = 2
"""Of one prompt, by default."""
_DEFAULTS: Final = {"image": MOST_IMAGES, "video": MOST_VIDEOS, "audio": MOST_SOUNDS}


@dataclass(frozen=True, kw_only=True)
class MediaArgs:
    """What prompts may bring besides text."""

    heading: ClassVar = "Images and sounds"

    limit_mm_per_prompt: Annotated[
        dict[str, int],
        Arg(
            f'Most images, videos and sounds in one prompt, as image=4 or {{"image": 4, "video": 1}}; {MOST_IMAGES}, '
            f"{MOST_VIDEOS} and {MOST_SOUNDS} by default. With image=0 a model that reads images, and with audio=0 one "
            "that hears sounds, reads text alone, without its encoder."
        ),
    ] = dataclasses.field(default_factory=dict)
    mmproj: Annotated[
        str | None,
        Arg(
            "File of llama.cpp with the vision encoder of a model in a GGUF file; by default the one beside it with "
            "mmproj in its name that fits. With limit_mm_per_prompt image=0 none is read."
        ),
    ] = None
    allowed_media_domains: Annotated[
        tuple[str, ...],
        Arg(
            "Hosts from which http: and https: URLs of images are fetched; none by default. A host with a private "
            "address is named by that address."
        ),
    ] = ()
    allowed_local_media_path: Annotated[
        str, Arg("Folder under which file: URLs of images are read; none by default.")
    ] = ""


def media_limits(args: MediaArgs) -> dict[str, int]:
    """Return how many images, videos and sounds a prompt may have. Raises ConfigError."""
    limits = args.limit_mm_per_prompt
    for kind, limit in limits.items():
        if kind not in _DEFAULTS or not 0 <= limit <= 1024:
            raise ConfigError(
                f"limit_mm_per_prompt has {kind}={limit}, expected {', '.join(_DEFAULTS)} with a number from 0 to 1024"
            )
    return _DEFAULTS | limits
