"""NIXL is an extra. Where it is installed, the tests of all pipes run over it, too."""

from __future__ import annotations

import pytest
import torch

from octavo.errors import ConfigError, PipeError
from octavo.pipes.pipe import Listener, connect
from tests.pipes.ends import HAS_NIXL, SECRET, Ends, Running


@pytest.mark.skipif(HAS_NIXL, reason="is about installations without NIXL")
def test_without_nixl_both_ends_say_what_to_install() -> None:
    listener = Listener("nixl://127.0.0.1:0", SECRET)
    with pytest.raises(ConfigError, match="octavo\\[nixl\\]"):
        connect(listener.address, SECRET, deadline_s=5)
    with pytest.raises(PipeError, match="no process has connected"):
        listener.accept(wait_s=0.05)
    listener.close()


@pytest.mark.skipif(not HAS_NIXL, reason="needs NIXL, the extra nixl")
def test_a_send_returns_when_the_other_end_has_read_the_memory() -> None:
    """The ring goes with its owner."""
    ends = Ends("nixl")
    sent = torch.arange(200_000)
    send = Running(lambda: ends.near.send_tensor(sent))
    assert not send.is_done(0.05)
    received, _ = ends.far.recv_tensor()
    assert received is not None
    assert torch.equal(received, sent)
    send.result()
    ends.close()
