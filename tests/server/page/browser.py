"""A headless Chromium, driven over the pipe of its DevTools protocol: no package and no port is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BINARY = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

_KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), "ArrowRight": (39, ""), "ArrowDown": (40, "")}


class Browser:
    """One tab. `errors`: what the page's console was told, refusals of its security policy among it."""

    def __init__(self, profile: Path) -> None:
        assert BINARY is not None
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
        flags += ["--disable-background-networking", "--disable-extensions", f"--user-data-dir={profile}"]
        flags += ["--disable-dev-shm-usage", "--disable-component-update", "about:blank"]
        # the protocol wants the descriptors 3 and 4
        script = f'exec 3<&{to_browser} 4>&{from_browser}; exec "$0" "$@"'
        command = ["bash", "-c", script, BINARY, *flags]
        self._process = subprocess.Popen(
            command, pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        attached = self.send("Target.attachToTarget", targetId=self._first_tab(), flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def _first_tab(self) -> str:
        """Return the id of the tab, which may come after the browser has begun to reply."""
        deadline = time.monotonic() + 100
        while True:
            for each in self.send("Target.getTargets")["targetInfos"]:
                if each["type"] == "page":
                    return str(each["targetId"])
            assert time.monotonic() < deadline, "the browser has no tab"
            time.sleep(0.05)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)
        os.close(self._in)
        os.close(self._out)

    def send(self, method: str, **parameters: Any) -> Any:
        """Send a command and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == self._number:
                assert "error" not in reply, f"{method}: {reply['error']}"
                return reply["result"]
            self._note(reply)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._in], [], [], 200)[0], "the browser does not reply"
            self._buffer += os.read(self._in, 1 << 16)
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"])[:400])

    def run(self, script: str) -> Any:
        """Return the value of an expression, awaited."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, timeout_s: float = 100) -> Any:
        """Return the value of an expression once it is true. It fails only after long, so that no timing counts."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"{script} did not become true; {self.errors}"
            time.sleep(0.02)
        return value

    def open(self, url: str) -> None:
        self.send("Page.navigate", url=url)
        self.wait("document.querySelector('nav [aria-current]') !== null")

    def size(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def at(self, selector: str, text: str = "") -> tuple[float, float]:
        """Return the middle of an element on the screen; of several the one that has this text."""
        found = self.wait(
            f"""(() => {{
              const all = [...document.querySelectorAll({json.dumps(selector)})];
              const one = all.find((each) => each.checkVisibility() && each.textContent.includes({json.dumps(text)}));
              one?.scrollIntoView({{block: "nearest"}});
              const box = one?.getBoundingClientRect();
              return box && [box.x + Math.min(box.width / 2, 60), box.y + box.height / 2];
            }})()"""
        )
        return found[0], found[1]

    def move(self, selector: str, text: str = "") -> None:
        x, y = self.at(selector, text)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str, text: str = "") -> None:
        x, y = self.at(selector, text)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def write(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code, text = _KEYS[key]
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))


StartServer = Callable[..., Any]
