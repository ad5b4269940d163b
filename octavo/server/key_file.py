"""Reads the keys of --api-key, --admin-api-key and --api-key-file, and again on demand or when the file has changed.

Values derived from keys depend on the keys alone, not on their position, so that a restart does not change them. No
message shows a key.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import stat
import time
from collections.abc import Iterable, Mapping
from os.path import expanduser
from pathlib import Path
from typing import Any, Final, NamedTuple

from octavo.config.server_args import ServerArgs
from octavo.config.sources import file_stamp, yaml_problem
from octavo.errors import ConfigError, suggestion
from octavo.server.keys import ALL_RIGHTS, Caller, Callers, Right, key_digest
from octavo.server.rate_limits import Meter, RateLimits

_NAME: Final = (
    re.compile(r"[A-Za-z0-9._@+:/-]{1,64}"),
    "1 to 64 letters, digits and characters of ._@+:/- (a number stands in quotes)",
)
_TEXTS: Final = {
    "name": _NAME,
    "group": _NAME,
    "key": (re.compile(r"[!-~]+"), "text of visible ASCII characters without spaces (a number stands in quotes)"),
    "sha256": (
        re.compile(r"[0-9a-fA-F]{64}"),
        '64 hexadecimal digits in quotes; make them with printf %s "$KEY" | sha256sum',
    ),
}
"""For each text field of an entry: its pattern, and a description of it for errors."""

_LIMITS: Final = RateLimits.__struct_fields__
_FIELDS: Final = ("name", "key", "sha256", "group", "rights", *_LIMITS)
_MOST_NAMED: Final = 20
_MOST_PER_MINUTE: Final = 10**12

_LOOK_INTERVAL_S: Final = 1.0
"""Seconds between two checks of the file. Requests cause them: an idle server makes none."""

logger = logging.getLogger(__name__)


class _Entry(NamedTuple):
    """A key: where it was given, its digest, and the other fields of its entry."""

    where: str
    digest: bytes
    rights: frozenset[Right] = frozenset()
    name: str | None = None
    group: str | None = None
    limits: RateLimits | None = None


def read_callers(args: ServerArgs) -> dict[bytes, Caller]:
    """Return callers by the digests of their keys, none when no keys were given.

    Raises ConfigError that names file, entry and remedy.
    """
    entries = [_Entry("--api-key", key_digest(key.encode())) for key in dict.fromkeys(args.api_key)]
    entries += [
        _Entry("--admin-api-key", key_digest(key.encode()), ALL_RIGHTS) for key in dict.fromkeys(args.admin_api_key)
    ]
    if args.api_key_file is not None:
        entries += _read_file(args.api_key_file)
    by_digest: dict[bytes, _Entry] = {}
    by_name: dict[str, _Entry] = {}
    groups: dict[str, list[bytes]] = {}
    for entry in entries:
        if (other := by_digest.setdefault(entry.digest, entry)) is not entry:
            raise ConfigError(f"{entry.where} has the same key as {other.where}; give each key once")
        if entry.name and (other := by_name.setdefault(entry.name, entry)).limits != entry.limits:
            raise ConfigError(f"{entry.where} has other limits than {other.where}; give the keys of a name the same")
        if entry.group is not None:
            groups.setdefault(entry.group, []).append(entry.digest)
    return {
        entry.digest: Caller(
            entry.name or f"key-{_derived(entry.digest, 'tenant')[:12]}",
            _derived(entry.digest, "cache namespace")
            if entry.group is None
            else _derived(b"".join(sorted(groups[entry.group])), f"cache namespace of group {entry.group}"),
            entry.rights,
            entry.limits,
        )
        for entry in entries
    }


def check_tenant_weights(names: Iterable[str], callers: Mapping[bytes, Caller]) -> None:
    """Raise ConfigError when one of these names of `tenant_weights` is no API key's."""
    known = {caller.tenant or "" for caller in callers.values()}
    for name in names:
        if known and name not in known:
            raise ConfigError(
                f"tenant_weights has {name}, which is no API key's name; there are {_listed(sorted(known))}; "
                f"--api-key-file gives keys names{suggestion(name, known)}"
            )


def describe(callers: Mapping[bytes, Caller]) -> str:
    """Return one line for the log with the keys' names and rights."""
    words = []
    for caller in callers.values():
        rights = f" ({', '.join(sorted(caller.rights))})" if caller.rights else ""
        words.append(f"{caller.tenant}{rights}")
    return f"{len(words)} API key{'' if len(words) == 1 else 's'}: {_listed(words)}"


def _derived(secret: bytes, purpose: str) -> str:
    return hmac.digest(secret, b"octavo " + purpose.encode(), "sha256").hex()


def _listed(words: list[str]) -> str:
    more = f" and {len(words) - _MOST_NAMED} more" if len(words) > _MOST_NAMED else ""
    return ", ".join(words[:_MOST_NAMED]) + more


def _read_file(path: str) -> list[_Entry]:
    import yaml

    file = Path(expanduser(path))
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        if file.stat().st_mode & stat.S_IROTH:
            logger.warning("every user of this machine can read the API key file %s; chmod 600 %s", path, path)
    except OSError as error:
        raise ConfigError(f"the API key file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the API key file {path} is not UTF-8 text") from error
    except yaml.YAMLError as error:
        # the parser's message quotes the line, which may contain a key
        raise ConfigError(f"the API key file {path} is not YAML: {yaml_problem(error)}") from None
    except (ValueError, AttributeError, RecursionError):
        # a scalar that its type does not allow, such as a date 2024-13-45: this message quotes it, too
        raise ConfigError(
            f"the API key file {path} has a value that is no number or date, or nests too deeply; put texts into quotes"
        ) from None
    if not isinstance(content, list) or not content:
        what = "no entries" if content is None or content == [] else "no list"
        raise ConfigError(
            f"the API key file {path} holds {what}; write an entry for each key, such as - {{name: alice, key: …}}"
        )
    return [_read_entry(f"{path}, entry {number}", fields) for number, fields in enumerate(content, 1)]


def _read_entry(where: str, fields: Any) -> _Entry:
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} has no fields; write - {{name: alice, key: …}}")
    for field in fields:
        if field not in _FIELDS:
            # an unknown name that resembles no field may be a key
            meant = suggestion(str(field), _FIELDS)
            shown = str(field) if meant else "a field"
            raise ConfigError(f"{where} has {shown}, which is none of {', '.join(_FIELDS)}{meant}")
    _check_texts(where, fields, "name", "group")
    given: dict[str, Any] = {field: fields.get(field) for field in _FIELDS}
    name, key, sha256 = given["name"], given["key"], given["sha256"]
    where = f"{where} ({name})" if name else where
    if (key is None) == (sha256 is None):
        raise ConfigError(f"{where} has {'neither' if key is None else 'both of'} key and sha256; give one of them")
    _check_texts(where, fields, "key", "sha256")
    digest = bytes.fromhex(sha256) if key is None else key_digest(key.encode())
    return _Entry(where, digest, _rights(where, given["rights"] or []), name, given["group"], _limits(where, given))


def _check_texts(where: str, fields: Mapping[str, Any], *names: str) -> None:
    for name in names:
        pattern, expected = _TEXTS[name]
        value = fields.get(name)
        if value is not None and not (isinstance(value, str) and pattern.fullmatch(value)):
            raise ConfigError(f"{where}: {name} must be {expected}")


def _limits(where: str, given: Mapping[str, Any]) -> RateLimits | None:
    limits = {name: given[name] for name in _LIMITS if given[name] is not None}
    for name, value in limits.items():
        if type(value) is not int or not 1 <= value <= _MOST_PER_MINUTE:
            raise ConfigError(f"{where}: {name} must be a whole number from 1 to {_MOST_PER_MINUTE:,}")
    return RateLimits(**limits) if limits else None


def _rights(where: str, value: Any) -> frozenset[Right]:
    if value == "all":
        return ALL_RIGHTS
    known = [right.value for right in Right]
    words = value if isinstance(value, list) else [value]
    for word in words:
        if word not in known:
            raise ConfigError(
                f"{where}: rights has a word that is no right; write all, or a list of {' and '.join(known)}"
                f"{suggestion(str(word), known)}"
            )
    return frozenset(map(Right, words))


class KeyRing:
    """The callers by the digests of their keys, and what their keys have used of their limits.

    callers: what `read_callers(args)` returned, if the keys were read before. Raises ConfigError for wrong keys.
    """

    def __init__(self, args: ServerArgs, callers: Callers | None = None) -> None:
        self._args = args
        self._file = None if args.api_key_file is None else Path(expanduser(args.api_key_file))
        self._seen = file_stamp(self._file)
        self._next_look = 0.0
        self._looking: asyncio.Task[None] | None = None
        self._meters: dict[str, Meter] = {}
        self._use(read_callers(args) if callers is None else callers)

    def meter_of(self, caller: Caller) -> Meter | None:
        """Return the meter that enforces the rate limits of the caller's key; None if it has none."""
        return self._meters.get(caller.tenant or "")

    def look(self) -> None:
        """If the last check is long enough ago, check off the event loop whether the file has changed, and read it
        again if so."""
        if self._file is not None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + _LOOK_INTERVAL_S
            self._looking = asyncio.get_running_loop().create_task(self._look())

    async def reload(self) -> None:
        """Read the keys again. After an error, which is logged, the current keys stay in force."""
        try:
            self._seen = await asyncio.to_thread(file_stamp, self._file)
            callers = await asyncio.to_thread(read_callers, self._args)
        except ConfigError as error:
            logger.error("the API keys stay as they are: %s", error)
            return
        self._use(callers)

    async def _look(self) -> None:
        if await asyncio.to_thread(file_stamp, self._file) != self._seen:
            await self.reload()

    def _use(self, callers: Callers) -> None:
        limits = {each.tenant: each.limits for each in callers.values() if each.limits is not None and each.tenant}
        meters: dict[str, Meter] = {}
        for name, limit in limits.items():
            meters[name] = self._meters.get(name) or Meter(name, limit)
            meters[name].set_limits(limit)
        self._meters = meters
        self.callers = callers
        if callers:
            logger.info("%s", describe(callers))
