"""The shipped demonstration model, octavo-tiny, with the generator of its text and the script that trains it.
This file and the text generator import the standard library only; torch and tokenizers are for the training files.
Used by the CLI and the API for their default model (`model_directory`), and by people who want to train it again.
"""

from pathlib import Path

MODEL_NAME = "octavo-tiny"


def model_directory() -> Path:
    """Return the folder of the packaged model, in Hugging Face layout."""
    return Path(__file__).parent / MODEL_NAME
