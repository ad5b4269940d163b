"""Disaggregated prefill: which arguments go together."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.config.args import EngineArgs
from octavo.config.transfer_args import transfer_config
from octavo.errors import ConfigError


def test_section_has_what_was_given() -> None:
    config = transfer_config(EngineArgs(prefill=1, decode=2, kv_disk="/tmp/kv", kv_disk_size="1GiB"))
    assert (config.prefill, config.decode, config.is_split) == (1, 2, True)
    assert (config.kv_disk, config.kv_disk_size, config.role) == ("/tmp/kv", 1 << 30, None)
    assert not transfer_config(EngineArgs(kv_host_size=1)).is_split


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prefill": 1}, "prefill is 1, but decode is 0"),
        ({"decode": 2}, "decode is 2, but prefill is 0"),
        ({"prefill": 1, "decode": 1, "enable_prefix_caching": False}, "prefill is 1, but enable_prefix_caching is off"),
        ({"kv_disk": "/tmp/kv", "enable_prefix_caching": False}, "kv_disk is /tmp/kv, but enable_prefix_caching"),
        ({"kv_host_size": 1, "record_trace": "/tmp/x"}, "kv_host_size is 1, but record_trace is set"),
        ({"prefill": 1, "decode": 1, "data_parallel_size": 2}, "prefill is 1, but data_parallel_size is 2"),
        ({"role": "decode", "data_parallel_size": 2}, "role is decode, but data_parallel_size is 2"),
        ({"role": "decode", "prefill": 1, "decode": 1}, "role is decode, but prefill is 1"),
        ({"role": "prefill"}, "role is prefill, but cluster_secret_file is not set"),
        ({"prefill": 1, "decode": 1, "nnodes": 2}, "prefill is 1, but nnodes is 2"),
        ({"kv_disk_size": 1 << 30}, "kv_disk_size is 1073741824, but kv_disk is not set"),
        ({"prefill": 1, "decode": 1, "executor": "ray"}, "prefill is 1, but executor is ray"),
    ],
)
def test_arguments_that_contradict_each_other_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        transfer_config(EngineArgs(**given))
