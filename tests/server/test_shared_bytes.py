"""Features of images and sounds of open requests have one bound, and each sender a share of it."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.server.errors import ApiError
from octavo.server.shared_bytes import FeatureLimits, take_features


def scope_of(address: str) -> Any:
    return {"client": (address, 1), "state": {}}


def test_features_count_until_the_request_ends() -> None:
    limits = FeatureLimits(100)
    one, same, other = scope_of("a"), scope_of("a"), scope_of("b")
    with limits.request(one), limits.request(same), limits.request(other):
        take_features(one, 60)  # more than half, but the sender's only request
        for scope, num_bytes in ((same, 1), (other, 41)):
            with pytest.raises(ApiError, match=f"fill the 100 bytes .* has {num_bytes}; .*--max-features") as refused:
                take_features(scope, num_bytes)
            assert (refused.value.status, refused.value.headers) == (503, {"Retry-After": "1"})
        take_features(other, 40)
    with limits.request(same):
        take_features(same, 100)
        take_features(other, 0)  # a text


def test_a_request_with_more_than_there_is_room_for_is_refused_for_good() -> None:
    scope = scope_of("a")
    with FeatureLimits(100).request(scope):
        with pytest.raises(ApiError, match="become 101 bytes of features, must be at most 100; send fewer") as refused:
            take_features(scope, 101)
        assert (refused.value.status, refused.value.code) == (413, "request_too_large")
        take_features(scope, 100)
