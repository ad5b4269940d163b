"""What requests must have alike to share blocks."""

from __future__ import annotations

import msgspec
import pytest

from octavo.core.cache_key import PLAIN, CacheKey, Placeholder, namespace_digest
from tests.fakes.engine import make_request


def test_a_request_says_its_key() -> None:
    request = make_request("r", range(9))
    assert request.cache_key == PLAIN
    request.cache_salt, request.adapter, request.placeholders = "s", "a", (Placeholder(2, 3, b"d" * 32),)
    request.cache_namespace = "n"
    assert request.cache_key == CacheKey("s", "a", (Placeholder(2, 3, b"d" * 32),), "n")


def test_a_namespace_digest_depends_on_its_secret_alone_and_does_not_show_it() -> None:
    secrets = ["alice", "bob", "", "\ud800", "alice\0"]
    digests = [namespace_digest(secret) for secret in secrets]
    assert len(set(digests)) == len(secrets)
    assert digests == [namespace_digest(secret) for secret in secrets]
    assert all(len(digest) == 64 and "alice" not in digest for digest in digests)


def test_placeholders_go_over_the_wire() -> None:
    request = make_request("r", range(9))
    request.placeholders = (Placeholder(2, 3, bytes(range(32))), Placeholder(6, 1, b"e" * 32))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=type(request)) == request


def test_a_placeholder_has_tokens_and_a_place() -> None:
    with pytest.raises(AssertionError, match="a placeholder has 0 tokens"):
        Placeholder(0, 0, b"d" * 32)
    with pytest.raises(AssertionError, match="a placeholder begins at -1"):
        Placeholder(-1, 1, b"d" * 32)
