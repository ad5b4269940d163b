"""The example of the recipe on tools, as it stands there, on a server of octavo-tiny."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.builtin import model_directory
from tests.fakes.warm_server import WarmServer

RECIPE = Path(__file__).parents[2] / "docs" / "recipes" / "tools.md"


@pytest.fixture
def server(serve: Callable[..., WarmServer]) -> Iterator[WarmServer]:
    started = serve(model_directory())
    yield started
    assert started.stop() == 0


@pytest.mark.long
def test_the_recipe_runs_and_its_call_follows_the_schema(
    server: WarmServer, capsys: pytest.CaptureFixture[str]
) -> None:
    [example] = re.findall(r"```python\n(.*?)```", RECIPE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(example.replace("http://127.0.0.1:8000", server.url), names)
    assert names["call"].function.name == "get_weather"
    assert names["arguments"].keys() == {"city", "days"}
    assert names["arguments"]["days"] in (1, 2, 3)
    assert names["answer"].choices[0].message.content == capsys.readouterr().out.strip()
