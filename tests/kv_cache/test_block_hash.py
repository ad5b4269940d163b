"""A digest names a whole prefix."""

from __future__ import annotations

import pytest

from octavo.core.cache_key import PLAIN, CacheKey, Placeholder
from octavo.kv_cache.block_hash import extend_chain, token_keys

CAT, DOG = b"c" * 32, b"d" * 32


def hashes(token_ids: list[int], key: CacheKey = PLAIN, block_size: int = 2) -> list[bytes]:
    return extend_chain([], token_ids, block_size, key)


def with_image(offset: int, length: int, digest: bytes = CAT) -> CacheKey:
    return CacheKey(placeholders=(Placeholder(offset, length, digest),))


def test_only_full_blocks_have_a_digest() -> None:
    assert len(hashes([1, 2, 3])) == 1


def test_equal_prefixes_have_equal_digests_and_no_others() -> None:
    assert hashes([1, 2, 3, 4])[:1] == hashes([1, 2, 9, 9])[:1]
    assert hashes([1, 2, 3, 4])[1] != hashes([9, 9, 3, 4])[1]
    assert hashes([1, 2]) != hashes([2, 1])


def test_namespace_salt_and_adapter_separate() -> None:
    keys = [PLAIN, CacheKey("a"), CacheKey("b"), CacheKey(None, "a"), CacheKey("a", "b"), CacheKey("a\0adapter b")]
    keys += [CacheKey("a', 'b"), CacheKey("\ud800"), CacheKey("\\ud800")]
    keys += [CacheKey(cache_namespace="a"), CacheKey("b", cache_namespace="a"), CacheKey("a", cache_namespace="b")]
    keys += [CacheKey("a", cache_namespace="a"), CacheKey(cache_namespace="")]
    assert len({hashes([1, 2], key)[0] for key in keys}) == len(keys)
    assert hashes([1, 2], CacheKey("a", "b")) == hashes([1, 2], CacheKey("a", "b"))
    assert hashes([1, 2], CacheKey("")) == hashes([1, 2])


def test_digests_are_extended_not_computed_again() -> None:
    digests: list[bytes] = []
    first = list(extend_chain(digests, [1, 2, 3], 2, PLAIN))
    assert extend_chain(digests, [1, 2, 3, 4], 2, PLAIN) == [*first, hashes([1, 2, 3, 4])[1]]


def test_another_image_changes_the_digests_from_its_first_block_on() -> None:
    tokens = list(range(10))
    cat, dog, none = hashes(tokens, with_image(3, 4)), hashes(tokens, with_image(3, 4, DOG)), hashes(tokens)
    assert cat[:1] == dog[:1] == none[:1]
    for i in range(1, 5):  # the last one lies behind the image and depends on it through its parent
        assert len({cat[i], dog[i], none[i]}) == 3
    assert hashes(tokens, with_image(3, 4)) == cat


@pytest.mark.parametrize("other", [with_image(2, 4), with_image(3, 3), with_image(3, 5), with_image(4, 4)])
def test_the_place_of_an_image_is_part_of_the_digests(other: CacheKey) -> None:
    tokens = [7] * 8
    assert hashes(tokens, other)[-1] != hashes(tokens, with_image(3, 4))[-1]


def test_two_images_in_one_block_are_told_from_their_exchange() -> None:
    def both(first: bytes, second: bytes) -> CacheKey:
        return CacheKey(placeholders=(Placeholder(0, 1, first), Placeholder(1, 2, second)))

    assert hashes([7] * 4, both(CAT, DOG), block_size=4) != hashes([7] * 4, both(DOG, CAT), block_size=4)


def test_an_image_behind_the_full_blocks_changes_nothing() -> None:
    assert hashes([7] * 5, with_image(4, 9)) == hashes([7] * 5)


def test_what_is_compared_at_a_position_is_the_token_and_the_place_in_its_image() -> None:
    placeholders = with_image(3, 2).placeholders
    assert token_keys([5, 6, 7, 8, 9, 10], 2, 6, placeholders) == [7, (8, 0, CAT), (9, 1, CAT), 10]
    assert token_keys([5, 6, 7, 8], 2, 6, placeholders) == [7, (8, 0, CAT)]
    assert token_keys([5, 6, 7, 8], 0, 2, placeholders) == token_keys([5, 6, 7, 8], 0, 2, ()) == [5, 6]
