"""From a checkpoint on disk to a server's answer, through the commands of the README."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from octavo import LLM, SamplingParams
from tests.fakes.byte_tokenizer import write_byte_tokenizer
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.families import FAMILIES
from tests.fakes.strangers import make_stranger
from tests.server.test_serve_process import ServerProcess

QUICK = ("qwen3_moe",)
"""The others start a process each, too: they are run with the long tests."""
PROMPT = [5, 17, 40, 8, 99, 100, 23]


@pytest.mark.parametrize(
    "family",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in (*FAMILIES, "helium")],
)
def test_a_server_gives_the_text_that_the_library_gives(family: str, tmp_path: Path) -> None:
    if family in FAMILIES:
        make_checkpoint(family, tmp_path, vocab_size=300)
    else:
        make_stranger(family, tmp_path)
    write_byte_tokenizer(tmp_path)
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(str(tmp_path), max_model_len=64, num_gpu_blocks_override=32) as llm:
        (expected,) = llm.generate(PROMPT, greedy, use_tqdm=False)[0].outputs
    server = ServerProcess(tmp_path, "--max-model-len", "64", "--num-gpu-blocks-override", "32")
    try:
        body = {"prompt": PROMPT, "temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
        response = httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["text"] == expected.text
        assert response.json()["usage"]["completion_tokens"] == 12
    finally:
        assert server.stop() == 0
