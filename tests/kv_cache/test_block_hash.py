"""A digest names a whole prefix."""

from __future__ import annotations

from octavo.core.sequence import Sequence
from octavo.kv_cache.block_hash import extend_hashes


def hashes(token_ids: list[int], salt: str | None = None, block_size: int = 2) -> list[bytes]:
    return extend_hashes(Sequence(1, 0, token_ids, len(token_ids)), block_size, salt)


def test_only_full_blocks_have_a_digest() -> None:
    assert len(hashes([1, 2, 3])) == 1


def test_equal_prefixes_have_equal_digests_and_no_others() -> None:
    assert hashes([1, 2, 3, 4])[:1] == hashes([1, 2, 9, 9])[:1]
    assert hashes([1, 2, 3, 4])[1] != hashes([9, 9, 3, 4])[1]
    assert hashes([1, 2]) != hashes([2, 1])


def test_a_salt_separates() -> None:
    assert hashes([1, 2], "a") != hashes([1, 2], "b")
    assert hashes([1, 2], "a") != hashes([1, 2])
    assert hashes([1, 2], "a") == hashes([1, 2], "a")


def test_digests_are_extended_not_computed_again() -> None:
    sequence = Sequence(1, 0, [1, 2, 3], 3)
    first = list(extend_hashes(sequence, 2, None))
    sequence.token_ids.append(4)
    assert extend_hashes(sequence, 2, None) == [*first, hashes([1, 2, 3, 4])[1]]
