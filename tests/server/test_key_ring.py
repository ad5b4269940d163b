"""Keys change while the server runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.config.server_args import ServerArgs
from octavo.server import key_ring
from octavo.server.key_ring import KeyRing
from octavo.server.keys import key_digest

ONE, TWO = "- {name: a, key: a-key, requests_per_minute: 2}", "- {name: b, key: b-key}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "keys.yaml").write_text(ONE)
    (tmp_path / "keys.yaml").chmod(0o600)
    return tmp_path / "keys.yaml"


def names(ring: KeyRing) -> list[str | None]:
    return [caller.tenant for caller in ring.callers.values()]


@pytest.mark.anyio
async def test_reload_takes_new_keys_and_keeps_what_was_used(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    ring = KeyRing(ServerArgs(api_key_file=str(file), admin_api_key=("root",)))
    caller = ring.callers[key_digest(b"a-key")]
    meter = ring.meter_of(caller)
    assert meter is not None
    file.write_text(f"{ONE}\n{TWO}")
    await ring.reload()
    assert names(ring)[1:] == ["a", "b"]
    assert ring.meter_of(ring.callers[key_digest(b"a-key")]) is meter
    assert "3 API keys" in caplog.text


@pytest.mark.anyio
@pytest.mark.parametrize("broken", ["", "- {name: [", "- {nam: a}", None])
async def test_broken_file_leaves_the_keys_and_is_logged(
    file: Path, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    ring = KeyRing(ServerArgs(api_key_file=str(file)))
    file.unlink() if broken is None else file.write_text(broken)
    await ring.reload()
    assert names(ring) == ["a"]
    assert "the API keys stay as they are: " in caplog.text
    assert str(file) in caplog.text


@pytest.mark.anyio
async def test_requests_make_the_ring_look_at_its_file_now_and_then(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def look() -> None:
        ring.look()
        if ring._looking is not None:
            await ring._looking

    ring = KeyRing(ServerArgs(api_key_file=str(file)))
    await look()
    (file.parent / "new").write_text(TWO)
    os.replace(file.parent / "new", file)
    await look()
    assert names(ring) == ["a"], "it looks once in a second"
    monkeypatch.setattr(key_ring, "_LOOK_INTERVAL_S", 0.0)
    ring._next_look = 0.0
    await look()
    assert names(ring) == ["b"]
    file.write_text("- {")
    await look()
    await look()
    assert caplog.text.count("stay as they are") == 1, "a file is read once for each change"
