"""Where arguments come from, and who wins."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from octavo.config.args import EngineArgs
from octavo.config.server_args import ServerArgs
from octavo.config.sources import engine_args, gather, user_directory
from octavo.errors import ConfigError


def yaml_file(directory: Path, text: str) -> str:
    path = directory / "octavo.yaml"
    path.write_text(text)
    return str(path)


def test_flag_wins_over_variable_over_file_over_default(tmp_path: Path) -> None:
    config_file = yaml_file(tmp_path, "max_num_seqs: 1\nblock-size: 2\nseed: 3\n")
    environ = {"OCTAVO_MAX_NUM_SEQS": "10", "OCTAVO_BLOCK_SIZE": "20"}
    args = gather(EngineArgs, {"max_num_seqs": 100}, config_file=config_file, environ=environ)
    assert (args.max_num_seqs, args.block_size, args.seed, args.max_num_batched_tokens) == (100, 20, 3, 2048)


def test_one_file_serves_engine_and_server(tmp_path: Path) -> None:
    config_file = yaml_file(tmp_path, "port: 9000\nmax_num_seqs: 7\napi_key: [a, b]\n")
    assert gather(ServerArgs, {}, config_file=config_file, environ={}).port == 9000
    assert gather(ServerArgs, {}, config_file=config_file, environ={}).api_key == ("a", "b")
    assert gather(EngineArgs, {}, config_file=config_file, environ={}).max_num_seqs == 7


def test_file_is_found_through_its_variable(tmp_path: Path) -> None:
    environ = {"OCTAVO_CONFIG": yaml_file(tmp_path, "seed: 5")}
    assert gather(EngineArgs, {}, environ=environ).seed == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seq: 3", r"octavo.yaml: max_num_seq is not an argument; did you mean max_num_seqs\?"),
        ("max_num_seqs: many", "octavo.yaml: max_num_seqs is 'many', expected a whole number"),
        ("max_num_seqs: -1", "octavo.yaml: max_num_seqs is -1, must be at least 1"),
        ("hello", "octavo.yaml holds a single value, expected keys such as max_num_seqs: 64"),
        ("- a\n- b", "octavo.yaml holds a list, expected keys such as max_num_seqs: 64"),
        ("a: [", "octavo.yaml is not YAML: .*line 1"),
        ("block_size: 1\nblock-size: 2", "block-size is there twice"),
    ],
)
def test_a_wrong_file_is_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        gather(EngineArgs, {}, config_file=yaml_file(tmp_path, text), environ={})
    assert "\n" not in str(caught.value)


def test_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert gather(EngineArgs, {}, config_file=yaml_file(tmp_path, ""), environ={}) == EngineArgs()


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*nowhere.yaml: No such file"):
        gather(EngineArgs, {}, config_file=str(tmp_path / "nowhere.yaml"), environ={})


def test_unknown_variable_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"sets OCTAVO_MAX_SEQS, .* did you mean OCTAVO_MAX_NUM_SEQS\?"):
        gather(EngineArgs, {}, environ={"OCTAVO_MAX_SEQS": "4"})


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="^OCTAVO_BLOCK_SIZE: block_size is 0, must be at least 1$"):
        gather(EngineArgs, {}, environ={"OCTAVO_BLOCK_SIZE": "0"})


def test_a_key_that_is_not_filled_in_is_refused() -> None:
    for text in ("", " , "):
        with pytest.raises(ConfigError, match="OCTAVO_API_KEY is set and empty; give a key, or unset it"):
            gather(ServerArgs, {}, environ={"OCTAVO_API_KEY": text})
    for key in ("", " "):
        with pytest.raises(ConfigError, match="admin_api_key is blank, or no text, expected"):
            ServerArgs(admin_api_key=(key,))


def test_keywords_of_llm_win_over_variables_and_are_checked_by_name() -> None:
    environ = {"OCTAVO_SEED": "1", "OCTAVO_OP_OVERRIDES": "rms_norm=reference"}
    args = engine_args({"seed": 2}, environ)
    assert (args.seed, args.op_overrides) == (2, {"rms_norm": "reference"})
    with pytest.raises(ConfigError, match="is not an argument of LLM; did you mean block_size"):
        engine_args({"blocksize": 2}, {})


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_CACHE_HOME": "/cache", "HOME": "/home/me"}, "/cache/octavo"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/me"}, "/home/me/.cache/octavo"),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/octavo"),
        ({}, None),
    ],
)
def test_the_cache_folder_is_the_users(environ: dict[str, str], expected: str | None) -> None:
    found = user_directory("cache", environ)
    assert (found and str(found)) == expected


def test_llm_hears_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.llm import LLM

    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQS", "0")
    with pytest.raises(ConfigError, match="^OCTAVO_MAX_NUM_SEQS: max_num_seqs is 0"):
        LLM()


SERVICE_LINKS = {
    "OCTAVO_PORT": "tcp://10.96.7.1:8000",
    "OCTAVO_SERVICE_HOST": "10.96.7.1",
    "OCTAVO_SERVICE_PORT": "8000",
    "OCTAVO_SERVICE_PORT_HTTP": "8000",
    "OCTAVO_PORT_8000_TCP": "tcp://10.96.7.1:8000",
    "OCTAVO_PORT_8000_TCP_PROTO": "tcp",
    "OCTAVO_PORT_8000_TCP_PORT": "8000",
    "OCTAVO_PORT_8000_TCP_ADDR": "10.96.7.1",
    "OCTAVO_GPU_PORT": "udp://10.96.7.2:53",
    "OCTAVO_GPU_SERVICE_HOST": "10.96.7.2",
    "OCTAVO_GPU_PORT_53_UDP_ADDR": "10.96.7.2",
}


def test_variables_of_kubernetes_for_a_service_are_ignored_with_one_note(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "octavo")
    environ = SERVICE_LINKS | {"OCTAVO_BLOCK_SIZE": "8"}
    assert gather(EngineArgs, {}, environ=environ) == EngineArgs(block_size=8)
    assert gather(ServerArgs, {}, environ=environ) == ServerArgs()
    (note,) = caplog.messages
    assert f"ignored {', '.join(sorted(SERVICE_LINKS))}, which Kubernetes sets" in note
    assert "enableServiceLinks: false" in note


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("OCTAVO_PORT", "tcp:8000", "OCTAVO_PORT='tcp:8000' is not a whole number"),
        ("OCTAVO_PORTS", "tcp://10.0.0.1:8000", "OCTAVO_PORTS, which octavo does not know"),
        ("OCTAVO_PORT_HTTP_TCP", "tcp://10.0.0.1:8000", "OCTAVO_PORT_HTTP_TCP, which octavo does not know"),
        ("OCTAVO_SERVICE_HOSTS", "10.0.0.1", "OCTAVO_SERVICE_HOSTS, which octavo does not know"),
    ],
)
def test_other_variables_are_no_links(variable: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gather(EngineArgs, {}, environ={variable: value})
    assert gather(ServerArgs, {}, environ={"OCTAVO_PORT": "9000"}).port == 9000


@pytest.mark.parametrize(
    "text", ["api_key: [hush-1, 5]", "api_key: [hush-1, '']", "api_key: {hush-1: a}", "api_key: [hush-1"]
)
def test_errors_show_no_key(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"octavo\.yaml") as caught:
        gather(ServerArgs, {}, config_file=yaml_file(tmp_path, text), environ={})
    assert "hush" not in str(caught.value)
