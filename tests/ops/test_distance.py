"""Attention by distance is the textbook's, in one piece or in several."""

from __future__ import annotations

import pytest
import torch

from octavo.ops import distance


@pytest.mark.parametrize("most_scores", [1 << 22, 50])
def test_scores_have_products_with_their_distances_place(monkeypatch: pytest.MonkeyPatch, most_scores: int) -> None:
    monkeypatch.setattr(distance, "MOST_SCORES", most_scores)
    ((content, places, rows, lengths, scale),) = distance._disentangled(torch.float32)
    found = distance.disentangled_attention(content, places, rows, lengths, scale)
    reach, start = len(rows) // 2, 0
    for length in lengths:
        for head in range(content[0].shape[1]):
            q, k, v = (each[start : start + length, head].double() for each in content)
            place_q, place_k = (each[:, head].double() for each in places)
            scores = q @ k.T
            for query in range(length):
                for key in range(length):
                    row = rows[query - key + reach]
                    scores[query, key] += q[query] @ place_k[row] + place_q[row] @ k[key]
            want = ((scores * scale).softmax(-1) @ v).float()
            torch.testing.assert_close(found[start : start + length, head], want, rtol=1e-5, atol=1e-6)
        start += length


@pytest.mark.parametrize("most_scores", [1 << 22, 50])
def test_scores_have_the_bias_of_their_distance(monkeypatch: pytest.MonkeyPatch, most_scores: int) -> None:
    monkeypatch.setattr(distance, "MOST_SCORES", most_scores)
    ((q, k, v, biases, lengths, scale),) = distance._examples(torch.float32)
    found, reach, start = distance.distance_attention(q, k, v, biases, lengths, scale), biases.shape[1] // 2, 0
    for length in lengths:
        for head in range(q.shape[1]):
            own_q, own_k, own_v = (each[start : start + length, head].double() for each in (q, k, v))
            scores = own_q @ own_k.T * scale
            for query in range(length):
                for key in range(length):
                    scores[query, key] += biases[head, max(-reach, min(reach, key - query)) + reach]
            want = (scores.softmax(-1) @ own_v).float()
            torch.testing.assert_close(found[start : start + length, head], want, rtol=1e-5, atol=1e-6)
        start += length
