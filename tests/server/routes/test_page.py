"""The page's files: who gets them, with which headers, and below which paths."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import octavo.server
from octavo.server.routes.page import FILES
from tests.server.conftest import Served
from tests.server.raw import ask

HTML = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
FOLDER = Path(octavo.server.__file__).parent / "page"


def test_a_browser_gets_the_page_and_others_the_index(server: Served) -> None:
    page = ask(server.url, "/", headers=HTML)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["vary"] == "Accept"
    assert page.body.startswith(b"<!doctype html>")
    for accept in ({}, {"Accept": "*/*"}, {"Accept": "application/json"}):
        assert ask(server.url, "/", headers=accept).json["name"] == "octavo"


def test_the_page_is_closed_to_scripts_from_elsewhere_and_to_frames(server: Served) -> None:
    for path in ("/", "/page/app.js"):
        headers = ask(server.url, path, headers=HTML).headers
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_a_file_that_a_browser_has_is_not_sent_again(server: Served) -> None:
    first = ask(server.url, "/page/style.css")
    assert first.headers["content-type"] == "text/css; charset=utf-8"
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}'):
        again = ask(server.url, "/page/style.css", headers={"If-None-Match": known})
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag)
    assert ask(server.url, "/page/style.css", headers={"If-None-Match": '"other"'}).body == first.body


def test_every_file_is_served_and_no_other(server: Served) -> None:
    assert {*FILES, "index.html"} == {file.name for file in FOLDER.iterdir()}
    for name in FILES:
        assert ask(server.url, f"/page/{name}").body == (FOLDER / name).read_bytes()
    for name in ("index.html", "../app.py", "..%2fapp.py", "app.js/", "%00", "APP.JS"):
        assert ask(server.url, f"/page/{name}").status == 404, name


def test_the_page_is_open_where_there_are_keys_and_what_it_shows_is_not(start_server: Callable[..., Served]) -> None:
    server = start_server(api_key=("secret",))
    for path in ("/", "/page/app.js", "/openapi.json"):
        assert ask(server.url, path, headers=HTML).status == 200, path
    for path in ("/page/", "/page/none.js", "/v1/models"):
        assert ask(server.url, path, headers=HTML).status == 401, path


@pytest.mark.parametrize("prefix", ["", "/llm", "/a/b"])
def test_the_page_works_below_a_path(start_server: Callable[..., Served], prefix: str) -> None:
    server = start_server(root_path=prefix)
    page = ask(server.url, f"{prefix}/", headers=HTML)
    assert page.status == 200
    assert ask(server.url, "/", headers=HTML).status == 200  # a proxy has stripped the prefix
    for link in re.findall(rb'(?:src|href)="([^"#][^"]*)"', page.body):
        assert not link.startswith(b"/")
        assert ask(server.url, f"{prefix}/{link.decode()}").status == 200
    if prefix:
        moved = ask(server.url, prefix, headers=HTML)
        assert (moved.status, moved.headers["location"]) == (307, f"{prefix.rpartition('/')[2]}/")


def test_the_page_names_no_other_server() -> None:
    for file in FOLDER.iterdir():
        addresses = set(re.findall(r"https?://[^\s\"')]+", file.read_text()))
        assert addresses <= {"http://www.w3.org/2000/svg"}, file.name


def test_the_page_never_makes_html_of_text() -> None:
    for file in FOLDER.glob("*.js"):
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", file.read_text()), file
