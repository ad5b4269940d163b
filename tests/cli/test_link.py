"""The secret of engines and a proxy, and what they compare before they speak."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from octavo.cli.link import hello_of, with_secret
from octavo.cli.proxy import ProxyOptions
from octavo.cli.serve import serve
from octavo.config.args import EngineArgs
from octavo.config.resolve import configure
from octavo.core.process.authentication import read_secret
from octavo.errors import ConfigError


def test_processes_of_one_user_share_a_private_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, second = (with_secret(EngineArgs(), ["127.0.0.1", "::1", "localhost"]) for _ in range(2))
    assert first == second
    assert first.cluster_secret_file is not None
    assert len(read_secret(first.cluster_secret_file)) == 64
    assert Path(first.cluster_secret_file).stat().st_mode & 0o077 == 0
    assert [path.name for path in Path(first.cluster_secret_file).parent.iterdir()] == ["secret"]


def test_other_machines_need_a_secret_that_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("0.0.0.0", "10.0.0.2", "gpu7"):
        with pytest.raises(ConfigError, match=f"cluster_secret_file is not set, and {host} is not on this machine"):
            with_secret(EngineArgs(), ["127.0.0.1", host])
    given = EngineArgs(cluster_secret_file=str(tmp_path / "secret"))
    assert with_secret(given, ["gpu7"]) is given
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="secret cannot be made: Not a directory; give a file"):
        with_secret(EngineArgs(), ["127.0.0.1"])


def test_a_front_without_weights_and_a_core_of_one_model_fit() -> None:
    front = hello_of(configure(EngineArgs(load_format="dummy")).model)
    core = hello_of(configure(EngineArgs()).model, "decode")
    assert front.difference(core, "here", "there") is None


def test_a_proxy_without_an_engine_that_decodes_is_refused_unless_a_file_may_name_one() -> None:
    with pytest.raises(ConfigError, match="no decode engine is named; name one with --decode"):
        ProxyOptions(prefill=("127.0.0.1:9000",)).named()
    assert len(ProxyOptions(prefill=("127.0.0.1:9000",), engines="engines").named()) == 1


def test_an_engine_with_a_role_refuses_options_of_a_server_by_name() -> None:
    with pytest.raises(ConfigError, match="api_key is set, but role is decode: an engine with a role speaks no HTTP"):
        serve(role="decode", host="127.0.0.1", port=0, api_key=("key",))


def test_an_engine_with_a_role_is_not_started_where_it_cannot_be_reached() -> None:
    with pytest.raises(ConfigError, match="cluster_secret_file is not set, and 0.0.0.0 is not on this machine"):
        serve(role="decode", host="0.0.0.0", port=0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: another program uses this port"):
            serve(role="decode", host="127.0.0.1", port=port)
