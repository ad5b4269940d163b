"""A worker encodes sounds, and reads them through a cache group of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.core.media import MediaInput, TypedArray, View
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import NewSequence
from tests.conformance.runtimes import LEVELS
from tests.fakes.checkpoints import make_checkpoint
from tests.models.test_whisper import Oracle, sound
from tests.worker.engine_config import make_config, start_worker
from tests.worker.prefix_model import row, step

NUM_BLOCKS = 3
"""Of 16 vectors each."""
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, logprobs=3)


def media(seed: int) -> MediaInput:
    features = TypedArray("float32", (8, 74), sound(seed).numpy().tobytes())
    return MediaInput("audio", bytes([seed]) * 32, (), 37, {"input_features": features})


def sequence(seq_id: int, ids: list[int], encoding: int, sounds: tuple[MediaInput, ...]) -> NewSequence:
    """Its tokens are in blocks of its own, its sound in those from `encoding` on."""
    blocks = [[3 * seq_id + 1, 3 * seq_id + 2, 3 * seq_id + 3], list(range(encoding, encoding + NUM_BLOCKS))]
    return NewSequence(
        seq_id=seq_id, index=0, epoch=0, token_ids=ids, num_prompt_tokens=len(ids), block_tables=blocks, params=PARAMS,
        media=sounds, views=(View(0, 0, 37),),
    )  # fmt: skip


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(not LEVELS, reason="the kernels cannot run on this machine")),
        "reference",
    ],
)
def test_sounds_are_encoded_written_and_found(device: str, tmp_path: Path) -> None:
    path = make_checkpoint("whisper", tmp_path / "model", vocab_size=130)
    worker = start_worker(make_config(path, device=device))
    prompts = [[5, 17, 99], [8, 4, 60, 7, 11], [5, 17, 99]]
    # the third sequence has the blocks of the first one's sound
    arrivals = {0: [(0, 1, (media(0),)), (1, 4, (media(1),))], 3: [(2, 1, ())]}
    drawn: dict[int, list[int]] = {}
    for number in range(20):
        new = [sequence(i, prompts[i], blocks, sounds) for i, blocks, sounds in arrivals.get(number, ())]
        rows = [row(i, len(prompts[i]) + len(ids) - 1, 1) for i, ids in drawn.items()]
        rows += [row(each.seq_id, 0, each.num_prompt_tokens) for each in new]
        for output in worker.submit(step(new, rows)).result().rows:
            drawn.setdefault(output.seq_id, []).append(output.tokens[0].token_id)
    for i, seed in enumerate((0, 1, 0)):
        ids = prompts[i] + drawn[i]
        with torch.inference_mode():
            logits: Any = Oracle(path, sound(seed))(torch.tensor([ids[:-1]])).logits[0]
        assert logits[len(prompts[i]) - 1 :].argmax(-1).tolist() == drawn[i]
    assert drawn[2][:15] == drawn[0][:15]
    worker.shutdown()
