"""The names that requests may give as their model: those of the model itself, and adapters."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import OrderedDict
from functools import partial
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from octavo.core.adapter import LoRARequest, checked_adapter_name, files_of
from octavo.errors import ConfigError, InvalidRequest
from octavo.server.errors import ApiError

if TYPE_CHECKING:
    from octavo.async_llm import AsyncLLM
    from octavo.config.schema import EngineConfig

MOST_ADAPTERS: Final = 4096
"""Most adapters that a server knows by name; beyond it the least recently used ones from the folder are forgotten."""
_MOST_LISTED: Final = 20


class ServedModels:
    """The names of the model, and the adapters: those that were loaded by name, and those found in a folder.

    A loaded adapter keeps the content that it had when it was loaded; one from the folder has its current content. Use
    it on the event loop.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        """Raises ConfigError if the folder of adapters is no folder."""
        config: EngineConfig = llm.config
        self.base = config.model.served_model_names
        self._llm = llm
        self._modules = config.lora.lora_modules
        self._folder: Path | None = None
        if (folder := config.lora.lora_resolver_cache_dir) is not None:
            self._folder = Path(expanduser(folder)).resolve()
            if not self._folder.is_dir():
                raise ConfigError(f"lora_resolver_cache_dir is {folder!r}, which is no folder")
        self._loaded: dict[str, LoRARequest] = {}
        self._found: OrderedDict[str, LoRARequest] = OrderedDict()
        self._busy: dict[str, asyncio.Task[LoRARequest]] = {}
        self._numbers = itertools.count(1)

    async def load_modules(self) -> None:
        """Load the adapters of lora_modules. Raises ConfigError."""
        for text in self._modules:
            module = _module(text)
            if (parent := module.base_model_name) is not None and parent not in self.base:
                served = ", ".join(self.base)
                raise ConfigError(f"lora_modules: {module.name} is of the model {parent}, served is {served}")
            try:
                await self._load(module.name, module.path)
            except InvalidRequest as error:
                raise ConfigError(f"lora_modules: {error}") from error

    @property
    def adapters(self) -> list[LoRARequest]:
        return [*self._loaded.values(), *self._found.values()]

    def name(self, asked: str | None) -> str:
        """Return the name by which a client asks for the model; the first one where it gives none. Raises ApiError 404
        for a name that is not served; a name that may be in the folder is looked up later, by `adapter`."""
        if not asked:
            return self.base[0]
        if asked in self.base or asked in self._loaded or (self._folder is not None and _may_be_below(asked)):
            return asked
        raise self._unknown(asked)

    async def adapter(self, asked: str | None) -> LoRARequest | None:
        """Return the adapter that a name stands for, None for the model itself. Raises ApiError 404."""
        name = self.name(asked)
        if name in self.base:
            return None
        if (known := self._loaded.get(name)) is not None:
            return known
        # concurrent requests for one name read its files once
        task = self._busy.get(name)
        if task is None:
            task = self._busy[name] = asyncio.create_task(self._find(name))
            task.add_done_callback(partial(self._end, name))
        return await asyncio.shield(task)

    async def load(self, name: str, path: str, *, in_place: bool) -> LoRARequest:
        """Load an adapter whose folder is below the allowed one. in_place: it may replace an adapter of the same name.
        Raises InvalidRequest or ApiError."""
        checked_adapter_name(name, "lora_name")
        if self._folder is None:
            raise InvalidRequest(
                "the server has no folder of adapters; start it with --lora-resolver-cache-dir FOLDER",
                field="lora_path",
            )
        folder = await asyncio.to_thread(_inside, self._folder, path)
        if folder is None:
            raise InvalidRequest(
                f"lora_path is {path[:200]!r}, which is not the folder of an adapter inside that of "
                "--lora-resolver-cache-dir",
                field="lora_path",
            )
        return await self._load(name, str(folder), in_place=in_place)

    async def _load(self, name: str, path: str, *, in_place: bool = False) -> LoRARequest:
        checked_adapter_name(name, "lora_name")
        if name in self.base:
            raise InvalidRequest(f"lora_name is {name}, a name of the model itself; give another", field="lora_name")
        if name in self._busy:
            raise _being_loaded(name)
        if name in self._loaded and not in_place:
            raise InvalidRequest(
                f"the adapter {name} is loaded already; unload it, or send load_inplace", field="lora_name"
            )
        if len(self._loaded) >= MOST_ADAPTERS and name not in self._loaded:
            raise InvalidRequest(f"{MOST_ADAPTERS:,} adapters are loaded; unload some", field="lora_name")
        asked = LoRARequest(name, next(self._numbers), path)
        task = self._busy[name] = asyncio.create_task(self._llm.read_adapter(asked))
        task.add_done_callback(partial(self._end, name))
        adapter = await task
        self._found.pop(name, None)
        self._loaded[name] = adapter
        return adapter

    def unload(self, name: str) -> None:
        """Forget an adapter; requests that use it go on. Raises ApiError 404, and 409 while an adapter of this name is
        being loaded."""
        if name in self._busy:
            raise _being_loaded(name)
        if self._loaded.pop(name, None) is None and self._found.pop(name, None) is None:
            raise self._unknown(name)

    async def _find(self, name: str) -> LoRARequest:
        """Return the adapter of this name in the folder, with the content that it has now. Raises ApiError 404."""
        assert self._folder is not None, "only names that may be below a folder are looked for"
        folder = await asyncio.to_thread(_inside, self._folder, name)
        if folder is None:
            self._found.pop(name, None)
            raise self._unknown(name)
        known = self._found.get(name)
        number = next(self._numbers) if known is None else known.lora_int_id
        adapter = await self._llm.resolved(LoRARequest(name, number, str(folder)))
        self._found[name] = adapter
        self._found.move_to_end(name)
        if len(self._found) > MOST_ADAPTERS:
            self._found.popitem(last=False)
        return adapter

    def _end(self, name: str, task: asyncio.Task[LoRARequest]) -> None:
        del self._busy[name]
        if not task.cancelled():
            task.exception()  # the waiting requests raise it, and there may be none left

    def _unknown(self, asked: str) -> ApiError:
        served = [*self.base, *(each.lora_name for each in self.adapters)]
        more = "" if len(served) <= _MOST_LISTED else f", and {len(served) - _MOST_LISTED} more"
        return ApiError(
            404,
            f"the model {asked[:200]!r} is not served here; served: {', '.join(served[:_MOST_LISTED])}{more}",
            param="model",
            code="model_not_found",
        )


def _being_loaded(name: str) -> ApiError:
    return ApiError(409, f"the adapter {name} is being loaded", param="lora_name", code="adapter_busy")


class _Module(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1)]
    path: Annotated[str, msgspec.Meta(min_length=1)]
    base_model_name: str | None = None


def _module(text: str) -> _Module:
    """Return an entry of lora_modules: name=path or a JSON object. Raises ConfigError."""
    expected = f"lora_modules is {text[:200]!r}, expected name=path, or an object with name and path"
    if not text.lstrip().startswith("{"):
        name, _, path = text.partition("=")
        if not name or not path:
            raise ConfigError(expected)
        return _Module(name, path)
    try:
        return msgspec.json.decode(text, type=_Module)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{expected}: {error}") from error


def _may_be_below(name: str) -> bool:
    """Return whether a name is valid for an adapter, and as a path leads only downwards and to nothing hidden."""
    try:
        checked_adapter_name(name, "model")
    except InvalidRequest:
        return False
    return "\\" not in name and not any(part.startswith(".") or not part for part in name.split("/"))


def _inside(folder: Path, path: str) -> Path | None:
    """Return the folder or the file of an adapter; None if it does not exist, or one of its files, links followed, is
    outside of `folder`. Relative paths are relative to `folder`."""
    if "\0" in path or len(path) > 4096:
        return None
    found = folder / path
    for each in (found, *files_of(found).values()):
        real = os.path.realpath(each)
        if not Path(real).is_relative_to(folder) or not os.path.exists(real):
            return None
    return found
