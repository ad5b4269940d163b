"""Which URLs are read, and that no other host, address or file is."""

from __future__ import annotations

import base64
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from octavo.config.args import EngineArgs
from octavo.errors import InvalidRequest
from octavo.multimodal import media_urls
from octavo.multimodal.images import MOST_BYTES
from octavo.multimodal.media_urls import MediaUrls, MustReadElsewhere
from tests.fakes.image_host import IMAGE, image_host

URL = "data:image/png;base64," + base64.b64encode(b"abc").decode()


def urls(*hosts: str, folder: str = "") -> MediaUrls:
    return MediaUrls(EngineArgs(allowed_media_domains=hosts, allowed_local_media_path=folder))


def refusal(of: MediaUrls, url: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        of.read(url, "the url")
    assert caught.value.field == "the url"
    return str(caught.value)


def test_a_data_url_is_decoded() -> None:
    assert urls().read(URL, "the url") == b"abc"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1/x.png", "begins with 'http'.* --allowed-media-domains"),
        ("HTTPS://example.com/x.png", "begins with 'https'.* --allowed-media-domains"),
        ("file:///etc/passwd", "begins with 'file'.* --allowed-local-media-path"),
        ("gopher://x", "begins with 'gopher', which is not read here"),
        ("data:image/png,abc", "without ;base64"),
        ("data:image/png;base64,a!b", "is no base64"),
        ("data:image/png;base64," + "A" * (1 << 25), "more than a file of"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_without_arguments_nothing_is_fetched_or_opened(url: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        urls().read(url, "the url")


def test_an_allowed_host_is_asked_and_redirects_are_followed() -> None:
    with image_host() as host:
        allowed = urls("127.0.0.1")
        assert allowed.read(f"{host.url}/image", "the url") == IMAGE
        assert allowed.read(f"{host.url}/to?/to?/image", "the url") == IMAGE
        assert host.paths == ["/image", "/to?/to?/image", "/to?/image", "/image"]
        assert "host returned 404" in refusal(allowed, f"{host.url}/other")
        assert "redirected more than 3 times" in refusal(allowed, f"{host.url}/to?/to?/to?/to?/image")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("http://localhost:{port}/image", "names the host 'localhost', which is none of"),
        ("http://a:b@127.0.0.1:{port}/image", "no plain http: or https: URL"),
        ("file:///etc/passwd", "no plain http: or https: URL"),
        ("http://127.0.0.1:99999/", "is no URL"),
        ("http://[::1/", "is no URL"),
    ],
)
def test_neither_a_url_nor_a_redirect_leads_elsewhere(target: str, message: str) -> None:
    with image_host() as host:
        target = target.replace("{port}", host.url.rpartition(":")[2])
        assert message in refusal(urls("127.0.0.1"), f"{host.url}/to?{target}")
        assert host.paths == [f"/to?{target}"]


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1"),
        *("::1", "fd00::1", "fe80::1%eth0", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"),
    ],
)
def test_a_name_with_a_private_address_is_refused_unless_the_address_is_allowed(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, 0, 0, "", (each, port)) for each in ("8.8.8.8", address)]

    def connect(*_: Any) -> None:
        raise AssertionError("no connection was expected")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "create_connection", connect)
    assert "private address" in refusal(urls("images.example"), "http://images.example/x")


def test_the_address_that_was_checked_is_the_one_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that has another address at its second look-up leads nowhere else."""
    asked: list[Any] = []

    def connect(address: Any, timeout: float) -> None:
        asked.append(address)
        raise ConnectionRefusedError("nobody is there")

    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, **_: [(0, 0, 0, "", ("8.8.8.8", port))])
    monkeypatch.setattr(socket, "create_connection", connect)
    assert "cannot be fetched (ConnectionRefusedError" in refusal(urls("images.example"), "https://images.example/x")
    assert asked == [("8.8.8.8", 443)]


def test_size_and_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_urls, "FETCH_S", 60.0)
    with image_host(MOST_BYTES + (1 << 16)) as host:
        assert "has more than 20,971,520 bytes" in refusal(urls("127.0.0.1"), f"{host.url}/large")
        monkeypatch.setattr(media_urls, "FETCH_S", 0.3)
        assert "was not fetched within 0.3 s" in refusal(urls("127.0.0.1"), f"{host.url}/silent")


def test_a_process_that_others_wait_for_fetches_nothing() -> None:
    with image_host() as host:
        allowed = urls("127.0.0.1")
        allowed.waits_for_hosts = False
        with pytest.raises(MustReadElsewhere) as caught:
            allowed.read(f"{host.url}/image", "the url")
        assert caught.value.fetches
        assert allowed.read(URL, "the url") == b"abc"
        allowed.reads_images = False
        with pytest.raises(MustReadElsewhere) as caught:
            allowed.read(URL, "the url")
        assert not caught.value.fetches
        allowed.reads_images = True
        assert "which is none of" in refusal(allowed, "http://example.com/")
        assert host.paths == []


def test_files_of_the_folder_are_read_and_no_others(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    (folder / "below").mkdir(parents=True)
    (folder / "below" / "an image.png").write_bytes(IMAGE)
    (tmp_path / "secret").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(folder / "pipe")
    with (folder / "large").open("wb") as file:
        file.truncate(MOST_BYTES + 1)
    allowed = urls(folder=str(folder))
    assert allowed.read(f"file://{folder}/below/an%20image.png", "the url") == IMAGE
    assert allowed.read(f"file://localhost{folder}/below/../below/an%20image.png", "the url") == IMAGE
    for url in (f"file://{tmp_path}/secret", f"file://{folder}/../secret", f"file://{folder}/link"):
        assert "is outside of the folder" in refusal(allowed, url)
    assert "is outside of the folder" in refusal(allowed, f"file://other{folder}/large")
    assert "is no regular file" in refusal(allowed, f"file://{folder}/pipe")
    assert "cannot be read (No such file" in refusal(allowed, f"file://{folder}/none")
    assert "is no path" in refusal(allowed, f"file://{folder}/%00")
    assert "has more than" in refusal(allowed, f"file://{folder}/large")
