"""The responses of the endpoints that load and unload adapters."""

from __future__ import annotations

from msgspec import Struct


class AdapterLoaded(Struct, frozen=True):
    """Response of `POST /v1/load_lora_adapter`. digest: SHA-256 of the adapter's files in hexadecimal digits."""

    lora_name: str
    digest: str


class AdapterUnloaded(Struct, frozen=True):
    """Response of `POST /v1/unload_lora_adapter`."""

    lora_name: str
    unloaded: bool = True
