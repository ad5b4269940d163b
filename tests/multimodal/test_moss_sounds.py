"""The seconds that MOSS-Transcribe-Diarize has between the vectors of a sound stand where transformers writes them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.config.section import Section
from octavo.core.media import MediaInput
from octavo.errors import CheckpointError, UnsupportedModel
from octavo.multimodal.sound_writers import SOUND_WRITERS

AROUND = SOUND_WRITERS["moss"].around
assert AROUND is not None


def written(folder: Path, counts: list[int], **settings: Any) -> str:
    """Return the tokens of a sound with windows of so many vectors, `a` for each vector."""
    (folder / "processor_config.json").write_text(json.dumps(settings))
    assert AROUND is not None
    around = AROUND(Section({}, str(folder / "config.json")), lambda text: [ord(each) for each in text])
    tokens: list[int] = []
    made = around.write(tokens, ord("a"), [MediaInput("audio", b"", (), count, {}) for count in counts])
    spans = [tokens[start : start + length] for each in made for start, length in each.spans]
    assert [sum(length for _, length in each.spans) for each in made] == counts
    assert all({*each} == {ord("a")} for each in spans)
    return "".join(map(chr, tokens))


@pytest.mark.parametrize("counts", [[3], [375, 375, 26], [375, 75, 50]])
@pytest.mark.parametrize("settings", [{}, {"time_marker_every_seconds": 0}, {"time_marker_every_seconds": 4}])
def test_seconds_stand_where_transformers_writes_them(
    counts: list[int], settings: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import MossTranscribeDiarizeProcessor

    usual = {"audio_token": "a", "audio_tokens_per_second": 12.5, "time_marker_every_seconds": 2}
    given = {"num_audio_tokens": [sum(counts)]}
    expected = MossTranscribeDiarizeProcessor.replace_audio_token(SimpleNamespace(**(usual | settings)), given, 0)
    found = written(tmp_path, counts, **settings)
    assert found == expected
    assert bool(re.search(r"\d", found)) == (sum(counts) > 25 and settings != {"time_marker_every_seconds": 0})


def test_settings_that_are_not_implemented_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="time_marker_every_seconds is 5, expected seconds with a whole number"):
        written(tmp_path, [3], time_marker_every_seconds=5)
    assert AROUND is not None
    with pytest.raises(UnsupportedModel, match="audio_merge_size is 5, expected 4"):
        AROUND(Section({"audio_merge_size": 5}, str(tmp_path / "config.json")), lambda text: [])
