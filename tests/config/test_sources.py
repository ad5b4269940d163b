"""Where arguments come from, and who wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config.args import EngineArgs, ServerArgs
from octavo.config.sources import engine_args, gather
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
        ("- a\n- b", "octavo.yaml holds list, expected keys such as max_num_seqs: 64"),
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


def test_keywords_of_llm_win_over_variables_and_are_checked_by_name() -> None:
    environ = {"OCTAVO_SEED": "1", "OCTAVO_OP_OVERRIDES": "rms_norm=reference"}
    args = engine_args({"seed": 2}, environ)
    assert (args.seed, args.op_overrides) == (2, {"rms_norm": "reference"})
    with pytest.raises(ConfigError, match="is not an argument of LLM; did you mean block_size"):
        engine_args({"blocksize": 2}, {})


def test_llm_hears_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.llm import LLM

    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQS", "0")
    with pytest.raises(ConfigError, match="^OCTAVO_MAX_NUM_SEQS: max_num_seqs is 0"):
        LLM()
