"""The file of a vision encoder beside a GGUF file is found where it fits."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config.args import EngineArgs
from octavo.config.checkpoint import Checkpoint
from octavo.config.explain import model_facts
from octavo.config.gguf_checkpoint import fitting_mmproj
from octavo.config.resolve import configure
from octavo.errors import ConfigError
from octavo.worker.start.identity import model_digest
from tests.fakes.mmproj_files import convert_both, make_released


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    return convert_both(make_released("gemma3", tmp_path / "m"), "gemma3")


def test_of_several_files_the_first_that_fits_is_taken(both: tuple[Path, Path], tmp_path: Path) -> None:
    text, encoder = both
    first = encoder.rename(encoder.with_name("Model.MMPROJ-bf16.gguf"))
    (text.with_name("mmproj-f16.gguf")).write_bytes(first.read_bytes())
    assert fitting_mmproj(text) == text.with_name("mmproj-f16.gguf")
    other = convert_both(make_released("smolvlm", tmp_path / "other"), "smolvlm")[1]
    other.rename(text.with_name("a-mmproj.gguf"))
    assert fitting_mmproj(text) == text.with_name("mmproj-f16.gguf")


def test_a_model_without_one_that_fits_reads_text(both: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    text, encoder = both
    encoder.write_bytes(encoder.read_bytes().replace(b"gemma3", b"gemma9"))
    assert fitting_mmproj(text) is None
    [said] = caplog.messages
    assert "is run as a model for text alone" in said
    assert "clip.projector_type is 'gemma9', expected one of gemma3, gemma4v" in said
    encoder.unlink()
    assert fitting_mmproj(text) is None


def test_a_directory_in_hugging_face_layout_takes_none(both: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mmproj is .*, but the model .* is no GGUF file: .*leave it out"):
        Checkpoint.open(tmp_path / "m", mmproj=both[1])


def test_a_folder_with_both_files_is_the_model(both: tuple[Path, Path]) -> None:
    assert Checkpoint.open(both[0].parent, mmproj=both[1]).architecture == "Gemma3ForConditionalGeneration"


def test_the_engine_knows_and_counts_what_was_found(both: tuple[Path, Path], tmp_path: Path) -> None:
    text, encoder = both
    tokenizer = str(tmp_path / "m")
    config = configure(EngineArgs(model=str(text), tokenizer=tokenizer))
    checkpoint, alone = Checkpoint.of(config.model), Checkpoint.open(text)
    assert config.model.mmproj == str(encoder)
    assert ("vision encoder", encoder) in model_facts(config, checkpoint)
    assert checkpoint.weights_bytes() == alone.weights_bytes() + encoder.stat().st_size
    assert model_digest(checkpoint) != model_digest(alone)
    without = configure(EngineArgs(model=str(text), tokenizer=tokenizer, limit_mm_per_prompt={"image": 0}))
    assert Checkpoint.of(without.model).architecture == "Gemma3ForCausalLM"
