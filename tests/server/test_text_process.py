"""What a helper process of the server may use."""

from __future__ import annotations

import subprocess
import sys

import pytest

_READ = """
import io, sys
from PIL import Image
from transformers import Qwen2VLImageProcessor
from octavo.multimodal.images import decoded
from octavo.server.text_process import _limit_memory

file = io.BytesIO()
Image.linear_gradient("L").resize((5792, 5792)).convert("RGB").save(file, "JPEG")
read = Qwen2VLImageProcessor(size={"shortest_edge": 3136, "longest_edge": int(sys.argv[1])})
_limit_memory()
print(read([decoded(file.getvalue())], return_tensors="np")["image_grid_thw"].prod())
"""


@pytest.mark.long
@pytest.mark.parametrize("max_pixels", [12_845_056, 16_777_216], ids=["qwen2_vl", "qwen3_vl"])
def test_an_image_of_the_most_pixels_is_read_in_a_helpers_memory(max_pixels: int) -> None:
    read = subprocess.run([sys.executable, "-c", _READ, str(max_pixels)], capture_output=True, text=True)
    assert read.returncode == 0, read.stderr
    assert 0.99 * max_pixels < int(read.stdout) * 14 * 14 <= max_pixels
