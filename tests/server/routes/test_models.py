"""`/v1/models`, and adapters as models of requests."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo.config.schema import LoRAConfig
from octavo.config.server_args import ServerArgs
from octavo.errors import ConfigError
from tests.fakes.adapters import adapter_folder
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


def test_models_have_the_fields_of_anthropics_api(server: Served) -> None:
    listed = ask(server.url, "/v1/models").json
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("letters", "alias", False)
    model = listed["data"][0]
    assert (model["type"], model["display_name"]) == ("model", "letters")
    assert datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]


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


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
Start = Callable[..., Served]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    adapter_folder(tmp_path / "a")
    return tmp_path


def test_an_adapter_is_loaded_listed_used_in_every_api_and_unloaded(start_server: Start, folder: Path) -> None:
    server = start_server(LoRAConfig(lora_resolver_cache_dir=str(folder)), allow_runtime_lora_updating=True)
    loaded = ask(server.url, LOAD, {"lora_name": "new", "lora_path": str(folder / "a")})
    assert (loaded.status, loaded.json["lora_name"], len(loaded.json["digest"])) == (200, "new", 64)
    listed = {each["id"]: each for each in ask(server.url, "/v1/models").json["data"]}
    assert listed.keys() == {"letters", "alias", "new"}
    assert (listed["new"]["parent"], listed["new"]["root"]) == ("letters", str(folder / "a"))
    assert (listed["letters"]["parent"], listed["letters"]["root"]) == (None, "letters")
    assert ask(server.url, "/v1/models/new").json == listed["new"]
    messages = [{"role": "user", "content": "hi"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": messages, "max_tokens": 3}),
    ):
        answer = ask(server.url, path, {"model": "new", **body})
        assert (answer.status, answer.json["model"]) == (200, "new")
        assert server.llm.requests[-1][3]["lora_request"].lora_name == "new"
        ask(server.url, path, {"model": "letters", **body})
        assert server.llm.requests[-1][3]["lora_request"] is None
    for path, body in (("/tokenize", {"prompt": "hi"}), ("/pin_prefix", {"prompt": "abcd", "ttl_s": 9})):
        assert ask(server.url, path, {"model": "new", **body}).status == 200
        assert ask(server.url, path, {"model": "other", **body}).status == 404
    assert ask(server.url, UNLOAD, {"lora_name": "new"}).json == {"lora_name": "new", "unloaded": True}
    for path, body in ((UNLOAD, {"lora_name": "new"}), ("/v1/completions", {"model": "new", "prompt": "hi"})):
        assert ask(server.url, path, body).status == 404
    assert ask(server.url, "/v1/models/new").status == 404


def test_a_stream_for_an_absent_adapter_is_refused_with_its_status(start_server: Start, folder: Path) -> None:
    server = start_server(LoRAConfig(lora_resolver_cache_dir=str(folder)))
    body = {"prompt": "hi", "stream": True, "max_tokens": 2}
    assert ask(server.url, "/v1/completions", {"model": "b", **body}).status == 404
    assert ask(server.url, "/v1/completions", {"model": "a", **body}).status == 200
    assert server.llm.requests[-1][3]["lora_request"].lora_path == str(folder / "a")


def test_loading_needs_the_setting_and_the_right_and_json(start_server: Start, folder: Path, tmp_path: Path) -> None:
    lora, body = LoRAConfig(lora_resolver_cache_dir=str(folder)), {"lora_name": "new", "lora_path": "a"}
    fixed = start_server(lora)
    assert [ask(fixed.url, path, body).status for path in (LOAD, UNLOAD)] == [403, 403]
    keys = {"api_key": ("plain",), "admin_api_key": ("admin",)}
    server = start_server(lora, allow_runtime_lora_updating=True, **keys)

    def status(key: str, body: dict[str, Any], **headers: str) -> int:
        return ask(server.url, LOAD, body, headers={"Authorization": f"Bearer {key}", **headers}).status

    assert status("plain", body) == 403
    assert status("wrong", body) == 401
    assert status("admin", body, **{"Content-Type": "text/plain"}) == 415
    assert status("admin", body | {"lora_name": "letters"}) == 400
    assert status("admin", body | {"lora_path": "../"}) == 400
    assert status("admin", body | {"lora_path": 3}) == 400
    assert status("admin", body) == 200
    assert status("admin", body) == 400
    roots = {
        key: ask(server.url, "/v1/models/new", headers={"Authorization": f"Bearer {key}"}).json["root"]
        for key in ("plain", "admin")
    }
    assert roots == {"plain": "new", "admin": str(folder / "a")}


def test_an_error_of_the_engine_about_an_adapter_is_the_answer(start_server: Start, folder: Path) -> None:
    server = start_server(LoRAConfig(lora_resolver_cache_dir=str(folder)), allow_runtime_lora_updating=True)
    server.llm.adapter_error = "rank 64 is above max_lora_rank"
    answer = ask(server.url, LOAD, {"lora_name": "new", "lora_path": "a"})
    assert (answer.status, answer.json["error"]["param"]) == (400, "lora_path")
    assert "max_lora_rank" in answer.json["error"]["message"]
    server.llm.adapter_error, server.llm.sleeps = None, True
    answer = ask(server.url, LOAD, {"lora_name": "new", "lora_path": "a"})
    assert (answer.status, answer.json["error"]["code"]) == (409, "asleep")


def test_several_api_servers_load_no_adapters_by_request() -> None:
    with pytest.raises(ConfigError, match="api_server_count"):
        ServerArgs(allow_runtime_lora_updating=True, api_server_count=2)
