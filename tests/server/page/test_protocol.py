"""The modules of the page that need no document, run by node."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="there is no node on this machine")
def test_modules_of_the_page_do_what_their_tests_say() -> None:
    assert NODE is not None
    tests = sorted(str(file) for file in FOLDER.glob("*.test.mjs"))
    assert tests
    done = subprocess.run([NODE, "--test", *tests], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
