"""What the routes of generated text share."""

from __future__ import annotations

import pytest

from octavo.errors import ContextTooLong
from octavo.server.generation import named_by_the_client


def test_an_error_names_the_field_that_was_sent_wherever_its_message_does() -> None:
    names = {"max_tokens": "max_completion_tokens", "prompt": "messages"}
    with pytest.raises(ContextTooLong) as caught, named_by_the_client(names):
        raise ContextTooLong("the prompt and max_tokens of 9 do not fit; set max_tokens to 5", field="max_tokens")
    assert caught.value.field == "max_completion_tokens"
    assert str(caught.value) == ("the prompt and max_completion_tokens of 9 do not fit; set max_completion_tokens to 5")
