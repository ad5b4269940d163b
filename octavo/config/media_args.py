"""What a person may set about images in prompts; a part of `ModelArgs`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final

from octavo.config.fields import Arg
from octavo.errors import ConfigError

MOST_IMAGES: Final = 16
"""Of one prompt, by default."""
MOST_SOUNDS: Final = 4
"""Of one prompt."""
MOST_VIDEOS: Final = 2
"""Of one prompt, by default."""


@dataclass(frozen=True, kw_only=True)
class MediaArgs:
    """What prompts may bring besides text."""

    heading: ClassVar = "Images and sounds"

    limit_mm_per_prompt: Annotated[
        dict[str, int],
        Arg(
            f'Most images and videos in one prompt, as image=4 or {{"image": 4, "video": 1}}; {MOST_IMAGES} and '
            f"{MOST_VIDEOS} by default. With image=0 a model that reads images reads text alone, without its encoder."
        ),
    ] = dataclasses.field(default_factory=dict)
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
        if kind not in ("image", "video") or not 0 <= limit <= 1024:
            raise ConfigError(
                f"limit_mm_per_prompt has {kind}={limit}, expected image or video with a number from 0 to 1024: the "
                "limits of other kinds are fixed"
            )
    return {"image": limits.get("image", MOST_IMAGES), "video": limits.get("video", MOST_VIDEOS), "audio": MOST_SOUNDS}


def most_images(args: MediaArgs) -> int:
    """Return how many images a prompt may have. Raises ConfigError."""
    return media_limits(args)["image"]
