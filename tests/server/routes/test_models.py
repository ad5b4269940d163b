"""`/v1/models`."""

from __future__ import annotations

import openai
import pytest

from tests.server.conftest import Served
from tests.server.raw import ask


def test_every_served_name_is_listed(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["letters", "alias"]
    assert {model.object for model in models} == {"model"}
    assert client.models.retrieve("alias").id == "alias"


def test_model_tells_its_context(server: Served) -> None:
    model = ask(server.url, "/v1/models/letters").json
    assert (model["max_model_len"], model["reads_images"]) == (256, True)


def test_answer_carries_the_name_that_was_asked_for(client: openai.OpenAI) -> None:
    assert client.completions.create(model="alias", prompt="a", max_tokens=1).model == "alias"


def test_unknown_model_is_not_found_and_the_served_ones_are_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="gpt-5", prompt="a")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    assert "letters, alias" in str(caught.value)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/gpt-5")


def test_no_name_is_no_model(server: Served) -> None:
    assert ask(server.url, "/v1/models/").status == 404


def test_model_may_be_left_out(server: Served) -> None:
    assert ask(server.url, "/v1/completions", {"prompt": "a", "max_tokens": 1}).json["model"] == "letters"
