"""`GET /` for browsers and `GET /page/{name}`: the page, from files of the package in `server/page/`.

The files have relative URLs only, so that they work below any path, and are open even if there are API keys: the page
gets its data from the other endpoints, with the key that it asks the user for.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.context import ServerContext
from octavo.server.errors import ApiError

_FOLDER: Final = Path(__file__).parents[1] / "page"
_MEDIA_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
FILES: Final = tuple(sorted(path.name for path in _FOLDER.iterdir() if path.suffix in (".js", ".css", ".svg")))
"""What `/page/` has: everything in the folder but `index.html`."""
_HEADERS: Final = {
    # a stored copy is used only once the server has confirmed it: an upgrade never mixes two versions
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@functools.cache
def _read(name: str) -> tuple[bytes, dict[str, str]]:
    path = _FOLDER / name
    body = path.read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    return body, {**_HEADERS, "Content-Type": _MEDIA_TYPES[path.suffix], "ETag": tag}


def front(request: Request) -> Response | None:
    """Return the page to a browser, whose header `Accept` names HTML; None to other clients."""
    if "text/html" not in request.headers.get("accept", ""):
        return None
    path = request.scope["path"]  # the page's relative URLs need a URL that ends with a slash
    if not path.endswith("/"):
        return Response(status_code=307, headers={"Location": f"{path.rpartition('/')[2]}/", "Vary": "Accept"})
    response = _response("index.html", request)
    response.headers["Vary"] = "Accept"
    return response


async def file(context: ServerContext, request: Request) -> Response:
    """Return a file of the page. Raises ApiError 404."""
    name = request.path_params["name"]
    if name not in FILES:
        raise ApiError(404, f"the page has no file {name}", code="unknown_url")
    return _response(name, request)


def _response(name: str, request: Request) -> Response:
    body, headers = _read(name)
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if headers["ETag"] in known:
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers)
