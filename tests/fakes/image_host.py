"""A host of images on this machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from tests.fakes.http_server import serving

IMAGE = b"an image"


class ImageHost:
    """Counts its requests. `/image`, `/large` (`size` bytes), `/silent` (until it ends), `/to?URL` redirects; other
    paths are not found."""

    def __init__(self, size: int) -> None:
        self.size, self.paths, self.ends = size, list[str](), threading.Event()
        host = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                host.paths.append(self.path)
                kind, _, target = self.path.partition("?")
                if kind == "/silent":
                    host.ends.wait(100)
                elif kind == "/to":
                    self.send_response(302)
                    self.send_header("Location", target)
                    self.end_headers()
                else:
                    self.send_response(200 if kind in ("/image", "/large") else 404)
                    self.end_headers()
                    for _ in range(1 if kind == "/image" else host.size >> 16):
                        self.wfile.write(IMAGE if kind == "/image" else bytes(1 << 16))

        self.handler, self.url = Handler, ""


@contextmanager
def image_host(size: int = 0) -> Iterator[ImageHost]:
    """Run a host until the block ends. size: bytes of `/large`."""
    host = ImageHost(size)
    with serving(host.handler) as port:
        host.url = f"http://127.0.0.1:{port}"
        try:
            yield host
        finally:
            host.ends.set()
