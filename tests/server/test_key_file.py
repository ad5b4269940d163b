"""From keys to callers, also while the server runs."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from octavo.config.args import EngineArgs
from octavo.config.server_args import ServerArgs
from octavo.errors import ConfigError
from octavo.server import key_file
from octavo.server.key_file import KeyRing, check_tenant_weights, describe, read_callers
from octavo.server.keys import ALL_RIGHTS, Caller, Right, key_digest
from octavo.server.serving import serve


def callers(tmp_path: Path, text: str = "", **args: object) -> dict[str, Caller]:
    """Callers by their keys, which end in -secret."""
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    found = read_callers(ServerArgs(api_key_file=str(path) if text else None, **args))  # type: ignore[arg-type]
    known = [f"{name}-secret" for name in ("a", "b", "c", "d", "e")]
    named = {key[0]: found[key_digest(key.encode())] for key in known if key_digest(key.encode()) in found}
    assert len(named) == len(found)
    return named


def test_an_entry_gives_a_key_its_name_and_rights(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"b-secret").hexdigest().upper()
    text = f"""
- {{name: alice, key: a-secret}}
- {{name: bob@example.com, sha256: "{digest}", rights: [cache, observe]}}
- {{key: c-secret, rights: all, group:}}
- {{name: "5", key: d-secret, rights: observe}}
"""
    found = callers(tmp_path, text, api_key=("e-secret", "e-secret"))
    assert [found[key].rights for key in "abcde"] == [
        set(),
        {Right.CACHE, Right.OBSERVE},
        ALL_RIGHTS,
        {Right.OBSERVE},
        set(),
    ]
    assert [found[key].tenant for key in "abd"] == ["alice", "bob@example.com", "5"]
    assert len({caller.cache_namespace for caller in found.values()}) == 5


def test_what_is_derived_is_of_the_key_alone_and_for_ever(tmp_path: Path) -> None:
    alone = callers(tmp_path, api_key=("a-secret",))["a"]
    assert alone.tenant == "key-237710beca00"
    assert (alone.cache_namespace or "")[:16] == "2e13ab6f0902f09d"
    assert callers(tmp_path, api_key=("b-secret", "a-secret"))["a"] == alone
    assert callers(tmp_path, "- key: b-secret\n- key: a-secret", api_key=("c-secret",))["a"] == alone
    digest = hashlib.sha256(b"a-secret").hexdigest()
    assert callers(tmp_path, f'- sha256: "{digest}"')["a"] == alone
    named = callers(tmp_path, "- {name: alice, key: a-secret, rights: all}")["a"]
    assert named.cache_namespace == alone.cache_namespace
    assert digest not in (alone.cache_namespace or "") + (alone.tenant or "")


def test_keys_of_a_group_share_a_namespace_that_takes_all_of_them_to_make(tmp_path: Path) -> None:
    a, b, c = (f"- {{key: {name}-secret, group: {group}}}\n" for name, group in (("a", "g"), ("b", "g"), ("c", "h")))
    found = callers(tmp_path, a + b + c, api_key=("d-secret",))
    assert found["a"].cache_namespace == found["b"].cache_namespace
    assert len({caller.cache_namespace for caller in found.values()}) == 3
    assert len({caller.tenant for caller in found.values()}) == 4
    assert callers(tmp_path, c + b + a)["a"] == found["a"]
    others = [a, a + c, (a + b).replace(": g}", ": i}")]
    assert found["a"].cache_namespace not in [callers(tmp_path, text)["a"].cache_namespace for text in others]


def test_keys_of_one_name_are_one_tenant_so_that_a_key_can_be_replaced(tmp_path: Path) -> None:
    found = callers(tmp_path, "- {name: a, key: a-secret}\n- {name: a, key: b-secret}")
    assert [found[key].tenant for key in "ab"] == ["a", "a"]
    assert found["a"].cache_namespace != found["b"].cache_namespace


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: hush-1", "the API key file .*keys.yaml holds no list; write an entry for each key"),
        ("# none", "keys.yaml holds no entries"),
        ("[]", "keys.yaml holds no entries"),
        ("- hush-1", "keys.yaml, entry 1 has no fields"),
        ("- {key: hush-1}\n- {name: bob}", r"keys.yaml, entry 2 \(bob\) has neither key and sha256; give one of them"),
        ("- {key: hush-1, sha256: hush-2}", "entry 1 has both of key and sha256"),
        ("- {key: hush-1, nmae: bob}", r"entry 1 has nmae, which is none of name, key, sha256, .*did you mean name\?"),
        ("- {name: bob, hush-1: all}", "entry 1 has a field, which is none of name, key, sha256, group, rights"),
        ("- {key: 12345678}", "entry 1: key must be text of visible ASCII characters .*number stands in quotes"),
        ("- {key: hush 1}", "entry 1: key must be text of visible ASCII characters"),
        ("- {key: 'hush-1\n\n'}", "entry 1: key must be text of visible ASCII characters"),
        ("- {key: ''}", "entry 1: key must be text of visible ASCII characters"),
        ("- {sha256: hush-1}", r"entry 1: sha256 must be 64 hexadecimal digits .* printf %s \"\$KEY\" \| sha256sum"),
        ("- {key: hush-1, name: 'a,b'}", "entry 1: name must be 1 to 64 letters, digits and characters of"),
        ("- {key: hush-1, name: 7}", "entry 1: name must be"),
        ("- {key: hush-1, group: [a]}", "entry 1: group must be"),
        ("- {key: hush-1, rights: [cahce]}", r"entry 1: rights has a word .*; write all, or .*; did you mean cache\?"),
        ("- {key: hush-1, rights: [[hush-2]]}", "entry 1: rights has a word that is no right; write all, or a list"),
        (
            "- {key: hush-1}\n- {name: b, key: hush-1}",
            r"entry 2 \(b\) has the same key as .*entry 1; give each key once",
        ),
        ("- {key: given-hush}", "keys.yaml, entry 1 has the same key as --api-key; give each key once"),
        ("- {key: hush-1", "keys.yaml is not YAML: .*line 1"),
        ("- {key: !hush-1 x}", "keys.yaml is not YAML: could not determine a constructor for the tag …, line 1"),
        ("- {key: 2024-13-45}", "keys.yaml has a value that is no number or date, .*put texts into quotes"),
        ("- {key: !!int 'hush-1'}", "keys.yaml has a value that is no number or date"),
        ("- {key: !!timestamp 'hush-1'}", "keys.yaml has a value that is no number or date"),
        ("[" * 5000, "keys.yaml has a value .* or nests too deeply"),
        ("- {key: *hush-1}", "keys.yaml is not YAML: found undefined alias …, line 1, column 9"),
    ],
)
def test_an_error_in_a_key_file_names_entry_and_remedy_but_no_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_callers(ServerArgs(api_key=("given-hush",), api_key_file=str(path)))
    assert "hush" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_every_user_can_read_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("- key: a-secret")
    for mode, warnings in ((0o600, 0), (0o640, 0), (0o644, 1)):
        caplog.clear()
        path.chmod(mode)
        assert read_callers(ServerArgs(api_key_file=str(path)))
        assert len(caplog.records) == warnings
    assert caplog.messages[0].endswith(f"can read the API key file {path}; chmod 600 {path}")


def test_a_missing_file_ends_the_server_before_a_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the API key file .*nowhere.yaml cannot be read: No such file"):
        serve(EngineArgs(model="/nowhere"), ServerArgs(api_key_file=str(tmp_path / "nowhere.yaml")))
    (tmp_path / "latin").write_bytes(b"- {key: \xff}")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        read_callers(ServerArgs(api_key_file=str(tmp_path / "latin")))


def test_a_weight_for_no_key_is_an_error_with_the_names(tmp_path: Path) -> None:
    found = read_callers(ServerArgs(api_key=("a-secret",)))
    (name,) = [caller.tenant or "" for caller in found.values()]
    check_tenant_weights([name], found)
    check_tenant_weights(["anybody"], {})
    with pytest.raises(ConfigError, match=f"tenant_weights has key-1, which is no API key's name.*there are {name}"):
        check_tenant_weights(["key-1"], found)
    with pytest.raises(ConfigError, match="tenant_weights has key-1"):
        serve(EngineArgs(model="/nowhere", tenant_weights={"key-1": "2"}), ServerArgs(api_key=("a-secret",)))


def test_the_log_tells_names_and_rights(tmp_path: Path) -> None:
    (tmp_path / "keys.yaml").write_text("- {name: alice, key: a-secret}\n- {name: op, key: b-secret, rights: all}")
    assert describe(read_callers(ServerArgs(api_key_file=str(tmp_path / "keys.yaml")))) == (
        "2 API keys: alice, op (cache, kv-events, observe, operate)"
    )
    many = read_callers(ServerArgs(api_key=tuple(f"{number}-secret" for number in range(30))))
    assert describe(many).startswith("30 API keys: key-")
    assert describe(many).endswith(" and 10 more")
    assert "secret" not in describe(many)


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
    monkeypatch.setattr(key_file, "_LOOK_INTERVAL_S", 0.0)
    ring._next_look = 0.0
    await look()
    assert names(ring) == ["b"]
    file.write_text("- {")
    await look()
    await look()
    assert caplog.text.count("stay as they are") == 1, "a file is read once for each change"
