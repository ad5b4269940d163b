"""Prompts of families whose training had images in certain places, or between certain tokens."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.multimodal.image_writer import Context


def paligemma_prompt(context: Context, marker: int, token_ids: Sequence[int]) -> list[int]:
    """Return the images, the token that begins a text, the text, and a line break; adds what the prompt lacks."""
    config = context.config
    text, tokens, lines = config.section("text_config") or config, [*token_ids], context.encode("\n")
    begin = config.positive("bos_token_id", text.positive("bos_token_id", 2))
    if tokens[:1] == [begin]:
        del tokens[0]
    behind = len(tokens) - tokens[::-1].index(marker) if marker in tokens else 0
    if behind and lines and tokens[behind : behind + len(lines)] == lines:  # as conversations are written
        del tokens[behind : behind + len(lines)]
    if tokens[behind : behind + 1] != [begin]:
        tokens.insert(behind, begin)
    return tokens if tokens[-len(lines) :] == lines else tokens + lines


def blip2_prompt(context: Context, marker: int, token_ids: Sequence[int]) -> list[int]:
    """Return the images, and then the text with the token that begins it. A prompt without a marker gets one for each
    image."""
    text = [each for each in token_ids if each != marker]
    num_markers = len(token_ids) - len(text)
    return [*[marker] * (num_markers or context.num_images), *text]


def ernie_prompt(context: Context, marker: int, token_ids: Sequence[int]) -> list[int]:
    """Return a prompt where each image, and each video, is between the tokens that begin and end one."""
    config, kinds = context.config, {marker: "image"}
    if config.values.get("video_token_id") is not None:
        kinds[config.positive("video_token_id")] = "video"
    written: list[int] = []
    for place, token_id in enumerate(token_ids):
        if (kind := kinds.get(token_id)) is None:
            written.append(token_id)
            continue
        begin, end = (config.positive(f"{kind}_{name}_token_id") for name in ("start", "end"))
        written += [token_id] if written[-1:] == [begin] else [begin, token_id]
        written += [] if list(token_ids[place + 1 : place + 2]) == [end] else [end]
    return written
