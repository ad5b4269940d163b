"""A hub of models on a local port: the requests that `huggingface_hub.snapshot_download` makes, and a log of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from tests.fakes.http_server import serving

COMMIT = "c0ffee" * 6 + "beef"


@dataclass
class FakeHub:
    """`models` maps name to {path: content}; every model has the revisions `main` and COMMIT, `gated` ones refuse."""

    models: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    downloads: list[str] = field(default_factory=list)
    """Paths of the files that were sent, in order."""
    cut: str = ""
    """The file of which only half is sent, unless the rest is asked for."""
    address: str = ""


@contextmanager
def serve_hub(hub: FakeHub) -> Iterator[FakeHub]:
    """Serve `hub` on a free local port; its `address` is set meanwhile."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.answer(with_body=True)

        def do_HEAD(self) -> None:
            self.answer(with_body=False)

        def answer(self, *, with_body: bool) -> None:
            path = self.path.partition("?")[0].strip("/")
            if path.startswith("api/models/"):
                self.describe(path.removeprefix("api/models/"))
                return
            name, _, rest = path.partition("/resolve/")
            revision, _, file = rest.partition("/")
            content = self.find(name, revision)
            if content is None:
                return
            if file not in content:
                self.refuse(404, "EntryNotFound")
                return
            if with_body:
                hub.downloads.append(file)
            if with_body and file == hub.cut and (asked := self.headers.get("Range")):
                first = int(asked.removeprefix("bytes=").partition("-")[0])
                span = f"bytes {first}-{len(content[file]) - 1}/{len(content[file])}"
                self.reply(206, content[file][first:], {"Content-Range": span})
                return
            etag = f'"{hashlib.sha1(content[file]).hexdigest()}"'
            self.reply(200, content[file], {"ETag": etag, "X-Repo-Commit": COMMIT}, with_body=with_body)

        def describe(self, rest: str) -> None:
            """Answer `{name}/revision/{revision}` or `{name}/tree/{revision}`."""
            for kind in ("revision", "tree"):
                name, found, revision = rest.partition(f"/{kind}/")
                if not found:
                    continue
                content = self.find(name, revision)
                if content is None:
                    return
                files = [
                    {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for path, data in content.items()
                ]
                info = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": path} for path in content]}
                self.reply(200, json.dumps(files if kind == "tree" else info).encode(), {})
                return
            self.refuse(404, "RepoNotFound")

        def find(self, name: str, revision: str) -> dict[str, bytes] | None:
            """The files of a model, or None after an error was sent."""
            if name in hub.gated:
                self.refuse(403, "GatedRepo")
            elif name not in hub.models:
                self.refuse(404, "RepoNotFound")
            elif revision not in ("main", COMMIT):
                self.refuse(404, "RevisionNotFound")
            else:
                return hub.models[name]
            return None

        def refuse(self, status: int, code: str) -> None:
            self.reply(status, b"{}", {"X-Error-Code": code})

        def reply(self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool = True) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Type": "application/json"}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body and self.command != "HEAD":
                is_cut = bool(hub.cut) and status == 200 and self.path.endswith(hub.cut)
                self.wfile.write(body[: len(body) // 2] if is_cut else body)
                self.close_connection = is_cut

    with serving(Handler) as port:
        hub.address = f"http://127.0.0.1:{port}"
        yield hub
