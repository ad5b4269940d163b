"""Names of models: the model's own, adapters that were loaded, and adapters in a folder."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from octavo.async_llm import AsyncLLM
from octavo.config.schema import LoRAConfig
from octavo.errors import ConfigError, InvalidRequest
from octavo.server import served_models
from octavo.server.errors import ApiError
from octavo.server.served_models import ServedModels
from tests.fakes.adapters import adapter_folder
from tests.server.fake_llm import FakeAsyncLLM

pytestmark = pytest.mark.anyio


async def served(folder: Path | None = None, modules: tuple[str, ...] = ()) -> tuple[ServedModels, FakeAsyncLLM]:
    """Return the names of a model called letters or alias, and its engine."""
    llm = FakeAsyncLLM(
        lora=LoRAConfig(lora_modules=modules, lora_resolver_cache_dir=None if folder is None else str(folder))
    )
    models = ServedModels(cast(AsyncLLM, llm))
    await models.load_modules()
    return models, llm


async def test_modules_are_loaded_by_name_and_path_or_as_objects(tmp_path: Path) -> None:
    path = adapter_folder(tmp_path / "a")
    texts = (f"one={path}", f'{{"name": "two", "path": "{path}", "base_model_name": "alias"}}')
    models, _ = await served(modules=texts)
    assert [(each.lora_name, each.lora_int_id) for each in models.adapters] == [("one", 1), ("two", 2)]


@pytest.mark.parametrize(
    "text",
    [
        *("one", "=path", "one=", "{", "{}", '{"name": 1, "path": "x"}', '{"name": "a", "path": "x", "b": 1}'),
        *("one=/nowhere", "letters=PATH", "a b=PATH", '{"name": "a", "path": "PATH", "base_model_name": "other"}'),
        "{" * 100000,
    ],
)
async def test_a_wrong_module_stops_the_server_with_its_reason(tmp_path: Path, text: str) -> None:
    path = adapter_folder(tmp_path / "a")
    with pytest.raises(ConfigError, match="lora_modules"):
        await served(modules=(text.replace("PATH", str(path)),))


async def test_a_name_is_of_the_model_or_of_an_adapter_and_others_are_refused(tmp_path: Path) -> None:
    models, _ = await served(modules=(f"one={adapter_folder(tmp_path / 'a')}",))
    assert [models.name(each) for each in (None, "", "alias", "one")] == ["letters", "letters", "alias", "one"]
    assert [await models.adapter(each) for each in (None, "letters")] == [None, None]
    found = await models.adapter("one")
    assert found is not None
    assert len(found.digest) == 64
    with pytest.raises(ApiError, match="'two' is not served here; served: letters, alias, one$") as refused:
        models.name("two")
    assert refused.value.status == 404


class TestFolder:
    async def test_an_adapter_below_the_folder_is_found_when_it_is_asked_for(self, tmp_path: Path) -> None:
        for name in ("new", "owner/new"):
            adapter_folder(tmp_path / name)
        models, _ = await served(tmp_path)
        assert not models.adapters
        for name in ("new", "owner/new"):
            found = await models.adapter(name)
            assert found is not None
            assert found.lora_path == str(tmp_path / name)
        assert len(models.adapters) == 2
        with pytest.raises(ApiError, match="'newer' is not served here"):
            await models.adapter("newer")

    async def test_its_content_is_that_of_now_and_it_is_unknown_once_it_has_gone(self, tmp_path: Path) -> None:
        adapter_folder(tmp_path / "a")
        models, _ = await served(tmp_path)
        before, again = await models.adapter("a"), await models.adapter("a")
        adapter_folder(tmp_path / "a", b"other")
        after = await models.adapter("a")
        assert before is not None
        assert before == again
        assert after is not None
        assert after.key != before.key
        assert after.lora_int_id == before.lora_int_id
        (tmp_path / "a" / "adapter_config.json").unlink()
        with pytest.raises(ApiError, match="not served"):
            await models.adapter("a")
        assert not models.adapters

    @pytest.mark.parametrize(
        "name",
        [
            *(
                "../outside",
                "..",
                ".",
                ".hidden",
                "a/../../outside",
                "a//b",
                "/etc",
                "a\\b",
                "a\0b",
                "a\nb",
                "a b",
                "~",
            ),
            *("a/.hidden", "x" * 300, "a/" * 120 + "b", "\ud800", "link", "file-link", "outside"),
        ],
    )
    async def test_names_lead_nowhere_else(self, tmp_path: Path, name: str) -> None:
        folder, outside = tmp_path / "adapters", adapter_folder(tmp_path / "outside")
        adapter_folder(folder / ".hidden")
        (folder / "link").symlink_to(outside)
        (adapter_folder(folder / "file-link") / "adapter_model.safetensors").unlink()
        (folder / "file-link" / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
        models, _ = await served(folder)
        with pytest.raises(ApiError) as refused:
            await models.adapter(name)
        assert refused.value.status == 404

    async def test_links_within_the_folder_are_followed(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(adapter_folder(tmp_path / "a"))
        models, _ = await served(tmp_path)
        assert await models.adapter("link") is not None

    async def test_requests_of_one_name_read_files_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        adapter_folder(tmp_path / "a")
        models, llm = await served(tmp_path)
        resolve, count = llm.resolved, 0

        async def counted(adapter: Any) -> Any:
            nonlocal count
            count += 1
            return await resolve(adapter)

        monkeypatch.setattr(llm, "resolved", counted)
        asked = [asyncio.create_task(models.adapter("a")) for _ in range(9)]
        asked.pop().cancel()
        assert len(set(await asyncio.gather(*asked))) == 1
        assert count == 1

    async def test_what_is_known_is_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(served_models, "MOST_ADAPTERS", 2)
        for number in range(3):
            adapter_folder(tmp_path / f"{number}")
        models, _ = await served(tmp_path)
        for number in (0, 1, 0, 2):
            await models.adapter(f"{number}")
        assert [each.lora_name for each in models.adapters] == ["0", "2"]
        await models.load("more", "0", in_place=False)
        await models.load("most", "0", in_place=False)
        with pytest.raises(InvalidRequest, match="2 adapters are loaded; unload some"):
            await models.load("x", "0", in_place=False)

    async def test_a_folder_that_is_none_stops_the_server(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="lora_resolver_cache_dir .* no folder"):
            await served(tmp_path / "absent")


class TestLoading:
    @pytest.mark.parametrize(
        "path", ["../outside", "/etc", "link", "", "a\0b", "a" * 5000, "absent", "/proc/self/root"]
    )
    async def test_only_folders_below_the_allowed_one_are_loaded(self, tmp_path: Path, path: str) -> None:
        folder, outside = tmp_path / "adapters", adapter_folder(tmp_path / "outside")
        folder.mkdir()
        (folder / "link").symlink_to(outside)
        models, _ = await served(folder)
        with pytest.raises(InvalidRequest) as refused:
            await models.load("new", path, in_place=False)
        assert refused.value.field == "lora_path"

    async def test_a_path_is_relative_to_the_folder_or_absolute(self, tmp_path: Path) -> None:
        adapter_folder(tmp_path / "a")
        models, _ = await served(tmp_path)
        for name, path in (("one", "a"), ("two", str(tmp_path / "a"))):
            assert (await models.load(name, path, in_place=False)).lora_name == name

    async def test_a_name_is_loaded_once_unless_it_replaces_itself(self, tmp_path: Path) -> None:
        adapter_folder(tmp_path / "a")
        models, _ = await served(tmp_path)
        before = await models.load("new", "a", in_place=False)
        with pytest.raises(InvalidRequest, match="loaded already"):
            await models.load("new", "a", in_place=False)
        adapter_folder(tmp_path / "a", b"other")
        assert await models.adapter("new") == before  # what was loaded stays until it is loaded again
        after = await models.load("new", "a", in_place=True)
        assert after.key != before.key
        assert await models.adapter("new") == after

    async def test_of_two_loads_of_one_name_one_is_refused_and_unloading_finds_none(self, tmp_path: Path) -> None:
        adapter_folder(tmp_path / "a")
        models, llm = await served(tmp_path)
        llm.holds_adapters = True
        first = asyncio.create_task(models.load("new", "a", in_place=False))
        while not models._busy:
            await asyncio.sleep(0)
        with pytest.raises(ApiError, match="is being loaded") as refused:
            await models.load("new", "a", in_place=True)
        assert refused.value.status == 409
        with pytest.raises(ApiError):
            models.unload("new")
        llm.holds_adapters = False
        await first
        models.unload("new")
        assert not models.adapters

    async def test_of_loads_that_begin_together_one_is_kept(self, tmp_path: Path) -> None:
        adapter_folder(tmp_path / "a")
        models, _ = await served(tmp_path)
        inside, waiting = served_models._inside, threading.Event()

        def slowly(folder: Path, path: str) -> Path | None:
            if path == "./a":
                waiting.wait(100)  # the other one ends meanwhile
            return inside(folder, path)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(served_models, "_inside", slowly)
            loads = asyncio.create_task(models.load("new", "./a", in_place=False))
            await asyncio.sleep(0)
            first = await models.load("new", "a", in_place=False)
            waiting.set()
            with pytest.raises(InvalidRequest, match="loaded already"):
                await loads
        assert models.adapters == [first]

    async def test_a_failed_load_leaves_the_name_free_and_what_was_loaded_in_place(self, tmp_path: Path) -> None:
        adapter_folder(tmp_path / "a")
        models, llm = await served(tmp_path)
        before = await models.load("new", "a", in_place=False)
        llm.adapter_error = "it belongs to another model"
        with pytest.raises(InvalidRequest, match="another model"):
            await models.load("new", "a", in_place=True)
        assert await models.adapter("new") == before

    @pytest.mark.parametrize("name", ["letters", "alias", "", "a b", "a\n", "x@y", "\u202e x"])
    async def test_names_of_the_model_and_no_names_are_refused(self, tmp_path: Path, name: str) -> None:
        adapter_folder(tmp_path / "a")
        models, _ = await served(tmp_path)
        with pytest.raises(InvalidRequest) as refused:
            await models.load(name, "a", in_place=False)
        assert refused.value.field == "lora_name"

    async def test_a_pipe_among_the_files_does_not_hold_the_server(self, tmp_path: Path) -> None:
        (adapter_folder(tmp_path / "a") / "adapter_model.safetensors").unlink()
        os.mkfifo(tmp_path / "a" / "adapter_model.safetensors")
        models, _ = await served(tmp_path)
        with pytest.raises(InvalidRequest, match="no regular file"):
            await models.load("new", "a", in_place=False)


async def test_files_of_llama_cpp_are_adapters_by_their_names(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    models, _ = await served(tmp_path)
    found = await models.adapter("a.gguf")
    assert found is not None
    assert (found.lora_name, found.lora_path, len(found.digest)) == ("a.gguf", str(tmp_path / "a.gguf"), 64)
    (tmp_path / "a.gguf").write_bytes(b"GGUF ")
    changed = await models.adapter("a.gguf")
    assert changed is not None
    assert changed.digest != found.digest
    with pytest.raises(ApiError, match="is not served here"):
        await models.adapter("b.gguf")
