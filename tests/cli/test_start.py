"""What commands do before a model is there."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from octavo.cli.main import EXIT_INTERRUPTED
from octavo.cli.start import ends_at_interrupt
from tests.cli.conftest import Command


def test_interrupt_while_loading_cannot_be_lost() -> None:
    code = (
        "import signal; from octavo.cli.start import ends_at_interrupt\n"
        "with ends_at_interrupt():\n"
        "    try: signal.raise_signal(signal.SIGINT)\n"
        "    except KeyboardInterrupt: pass"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGINT


def test_a_command_imports_only_the_used_parts_of_torch_and_exempts_them_from_garbage_collection() -> None:
    code = (
        "import gc, sys; from octavo.cli.start import load; from octavo.config.args import EngineArgs\n"
        "engine = load(EngineArgs(model='octavo-tiny', num_gpu_blocks_override=16))\n"
        "assert 'torch' in sys.modules and 'torch._meta_registrations' not in sys.modules\n"
        "assert gc.get_freeze_count() > 100_000"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_interrupt_after_loading_is_an_exception_again() -> None:
    with ends_at_interrupt():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_interrupt_is_exit_code_130_and_a_new_line(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    def explain() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.cli.explain.explain", explain)
    assert command("explain", code=EXIT_INTERRUPTED).err == "\n"
