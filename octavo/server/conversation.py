"""From the messages of a request to a prompt."""

from __future__ import annotations

from octavo.core.prompt import Prompt
from octavo.errors import InvalidRequest
from octavo.server.context import ServerContext
from octavo.server.schema import ChatCompletionRequest, PrefixRequest, TokenizeRequest


def render(
    context: ServerContext, asked: ChatCompletionRequest | TokenizeRequest | PrefixRequest, *, opens_turn: bool = True
) -> Prompt:
    """The prompt that the messages become through the model's chat template. Raises InvalidRequest.

    `opens_turn`: a turn of the model is opened behind them, where the request does not say.
    """
    if asked.chat_template is not None and not context.args.trust_request_chat_template:
        raise InvalidRequest(
            "chat_template is a program, and this server runs none from requests; leave it out, or start the server "
            "with --trust-request-chat-template",
            field="chat_template",
            code="unsupported_parameter",
        )
    continues = bool(asked.continue_final_message)
    if asked.add_generation_prompt is not None:
        opens_turn = asked.add_generation_prompt
    else:
        opens_turn = opens_turn and not continues
    return context.llm.render_chat(
        [message.as_dict(f"messages[{index}]") for index, message in enumerate(asked.messages or [])],
        add_generation_prompt=opens_turn,
        continue_final_message=continues,
        chat_template=asked.chat_template,
        chat_template_kwargs=asked.chat_template_kwargs,
    )
