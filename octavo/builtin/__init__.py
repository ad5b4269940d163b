"""The model that ships with octavo, octavo-tiny, in Hugging Face layout with its card.
`training/octavo_tiny` in the repository makes it.
Used by the command line and the API for their default model.
"""

from pathlib import Path

MODEL_NAME = "octavo-tiny"


def model_directory() -> Path:
    """Return the folder of the packaged model, in Hugging Face layout."""
    return Path(__file__).parent / MODEL_NAME
