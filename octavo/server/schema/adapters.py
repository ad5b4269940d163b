"""The bodies of `POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`."""

from __future__ import annotations

from octavo.server.decode import RequestBody


class LoadAdapterRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/load_lora_adapter`: a name, a folder, and whether it may take the place of an adapter of this name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterRequest(RequestBody, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/unload_lora_adapter`: the name. lora_int_id is accepted from clients of vLLM, and not read."""

    lora_name: str
    lora_int_id: int | None = None
