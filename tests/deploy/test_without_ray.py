"""The application of Ray Serve where there is no Ray."""

from __future__ import annotations

import importlib
import sys

import pytest

from octavo.errors import ConfigError


def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "octavo.deploy.ray_serve", raising=False)
    with pytest.raises(ConfigError, match=r"Ray Serve is not installed; pip install 'octavo\[ray\]'"):
        importlib.import_module("octavo.deploy.ray_serve")
