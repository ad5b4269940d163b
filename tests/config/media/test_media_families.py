"""Rows of families that read images, videos or sounds: each names what writes and encodes, and nothing is unnamed."""

from __future__ import annotations

from collections import Counter
from importlib import import_module

import pytest

from octavo.config.media.media_families import FAMILIES, family_of_release, media_family
from octavo.config.media.media_family import MediaFamily
from octavo.models.registry import known_architectures
from octavo.models.vision import ImageReader
from octavo.models.vision_names import STORED
from octavo.multimodal.image_writers import IMAGE_WRITERS
from octavo.multimodal.sound_writers import SOUND_WRITERS
from octavo.multimodal.video_writers import VIDEO_WRITERS
from octavo.server.speech.speech_prompts import STYLES

TABLES = {
    "images": IMAGE_WRITERS,
    "videos": VIDEO_WRITERS,
    "sounds": SOUND_WRITERS,
    "speech": STYLES,
    "names": STORED,
}
each_family = pytest.mark.parametrize("family", FAMILIES, ids=[family.architectures[0] for family in FAMILIES])


@pytest.mark.parametrize("field", TABLES)
def test_every_row_has_its_writer_and_no_writer_lacks_a_row(field: str) -> None:
    named = {getattr(family, field) for family in FAMILIES}
    assert named | {""} == set(TABLES[field]) | {""}


def test_an_architecture_is_in_one_row() -> None:
    counts = Counter(name for family in FAMILIES for name in (*family.architectures, *family.released))
    assert [name for name, count in counts.items() if count > 1] == []
    for family in FAMILIES:
        assert all(media_family(name) is family for name in family.architectures)
        assert all(family_of_release(name) is family for name in (*family.architectures, *family.released))


def test_an_architecture_of_text_alone_reads_nothing_else() -> None:
    assert media_family("Qwen3ForCausalLM") == MediaFamily()
    assert not media_family("Qwen3ForCausalLM").is_around_text
    assert media_family("Qwen3VLForConditionalGeneration").is_around_text


@each_family
def test_a_row_names_classes_that_there_are(family: MediaFamily) -> None:
    transformers = pytest.importorskip("transformers")
    if family.reader:
        module, _, name = family.reader.partition(".")
        assert issubclass(getattr(import_module(f"octavo.models.{module}"), name), ImageReader)
    for name in filter(None, (family.library, family.library_config)):
        assert hasattr(transformers, name)


def test_families_of_text_models_are_there() -> None:
    known = {name.partition("For")[0].lower().replace("_", "") for name in known_architectures()}
    named = {text.replace("_", "") for family in FAMILIES for text in family.text.values()}
    assert named <= known


def test_a_row_that_speaks_hears() -> None:
    for family in FAMILIES:
        assert not family.speech or family.sounds or family.listener is not None
        assert not family.videos or family.images
