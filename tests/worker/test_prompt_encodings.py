"""Vectors of images in place of tokens: which rows get which, and what is kept."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from octavo.core.media import MediaInput, TypedArray
from octavo.core.sampling_params import SamplingParams
from octavo.core.step import NewSequence, ScheduledSequence
from octavo.devices.token_store import HostTokenStore
from octavo.errors import CheckpointError
from octavo.models.encoder import without_layers
from octavo.worker.batch.input_batch import BatchRow
from octavo.worker.batch.sequence_state import Sequences
from octavo.worker.prompt_encodings import PromptEncodings


def media(number: int, *spans: tuple[int, int]) -> MediaInput:
    array = TypedArray("uint8", (1,), bytes([number]))
    return MediaInput("image", bytes([number]) * 32, spans, sum(length for _, length in spans), {"x": array})


class Fixture:
    """Encodes number n as the vectors n.0, n.1, n.2, …"""

    def __init__(self, most: int = 100) -> None:
        self.calls: list[int] = []
        self.sizes: dict[int, int] = {}
        self.sequences = Sequences(HostTokenStore())
        self.encodings = PromptEncodings(self.encode, self.outline, most, torch.device("cpu"))

    def encode(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        number = int(arrays["x"][0])
        self.calls.append(number)
        return number + torch.arange(self.sizes[number])[:, None] / 10

    def outline(self, kind: str, arrays: Mapping[str, Tensor]) -> Tensor:
        return torch.zeros(4, 1)

    def add(self, seq_id: int, *inputs: MediaInput) -> None:
        self.sizes.update((each.digest[0], each.num_embeddings) for each in inputs)
        ids, params = [1] * 30, SamplingParams()
        new = NewSequence(
            seq_id=seq_id, index=0, epoch=0, token_ids=ids, num_prompt_tokens=30, block_tables=[[1]], params=params,
            media=inputs,
        )  # fmt: skip
        self.sequences.add(new)

    def step(self, *rows: tuple[int, int, int]) -> dict[int, float]:
        """Return the value at each place of a step with rows (sequence, start, tokens)."""
        made = [BatchRow(ScheduledSequence(i, 0, start, count, 0), self.sequences[i]) for i, start, count in rows]
        _, found = self.encodings.read(made, self.sequences.unfinished_media)
        if found is None:
            return {}
        return dict(zip(found.token_indices.tolist(), found.values[:, 0].tolist(), strict=True))


def test_each_row_gets_the_vectors_of_its_part_of_the_spans() -> None:
    f = Fixture()
    f.add(0, media(1, (2, 2), (5, 2)), media(2, (9, 1)))
    f.add(1, media(3, (0, 3)))
    assert f.step((0, 0, 3)) == {2: 1.0}
    assert f.step((1, 1, 1), (0, 3, 3)) == {0: torch.tensor(3.1).item(), 1: torch.tensor(1.1).item(),
                                            3: torch.tensor(1.2).item()}  # fmt: skip
    assert f.step((0, 6, 4)) == {0: torch.tensor(1.3).item(), 3: 2.0}
    assert f.step((0, 10, 5)) == {}
    assert f.calls == [1, 3, 2]


@pytest.mark.parametrize(
    ("num_bytes", "num_vectors", "is_encoded"), [(1, 4, True), (1 << 18, 4, False), (1 << 18, 5, True)]
)
def test_a_large_example_is_encoded_only_where_its_outline_is_amiss(
    num_bytes: int, num_vectors: int, is_encoded: bool
) -> None:
    f = Fixture()
    f.sizes[1] = num_vectors
    array = TypedArray("uint8", (num_bytes,), bytes([1]) * num_bytes)
    f.encodings.check(MediaInput("image", bytes(32), ((0, num_vectors),), num_vectors, {"x": array}))
    assert f.calls == [1] * is_encoded


def test_layers_are_left_out_of_an_encoder_for_a_while() -> None:
    encoder = nn.Sequential(nn.Linear(2, 3))
    encoder.add_module("layers", nn.ModuleList([nn.Linear(3, 3)]))
    layer, given = encoder.get_submodule("layers.0"), torch.ones(1, 3)
    made = layer(given)
    with without_layers(encoder):
        assert layer(input=given) is given
        assert encoder[0](torch.ones(1, 2)).shape == (1, 3)
    assert torch.equal(layer(given), made)


def test_the_same_content_is_encoded_once() -> None:
    f = Fixture()
    f.add(0, media(1, (2, 2)))
    f.add(1, media(1, (4, 2)))
    assert f.step((0, 0, 4), (1, 4, 2)) == {2: 1.0, 3: torch.tensor(1.1).item(), 4: 1.0, 5: torch.tensor(1.1).item()}
    assert f.calls == [1]


def test_what_was_used_longest_ago_goes_first_and_unfinished_prompts_keep_theirs() -> None:
    f = Fixture(most=4)
    for number in (1, 2, 3):
        f.add(number, media(number, (0, 2)))
    f.step((1, 0, 1))  # the rest of its span comes later
    f.step((2, 0, 2))
    f.step((2, 2, 1))  # only now it cannot be computed again
    assert f.encodings.num_kept == 4
    f.step((3, 0, 2))
    assert f.encodings.num_kept == 4
    f.step((1, 1, 1))
    assert f.calls == [1, 2, 3]
    f.add(4, media(2, (0, 2)))
    f.step((4, 0, 2))
    assert f.calls == [1, 2, 3, 2]


def test_another_number_of_vectors_than_a_prompt_has_is_refused_and_nothing_of_a_trial_is_kept() -> None:
    f = Fixture()
    f.sizes[1] = 12
    with pytest.raises(CheckpointError, match="makes 12 vectors of a small image, for which a prompt has 21 tokens"):
        f.encodings.check(media(1, (0, 21)))
    f.encodings.check(media(1, (0, 12)))
    assert f.encodings.num_kept == 0
