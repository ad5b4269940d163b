"""From the messages of a request to a prompt."""

from __future__ import annotations

from octavo.core.prompt import Prompt
from octavo.errors import InvalidRequest
from octavo.server.context import ServerContext
from octavo.server.schema import ChatCompletionRequest, TokenizeRequest


def render(context: ServerContext, asked: ChatCompletionRequest | TokenizeRequest) -> Prompt:
    """The prompt that the messages become through the model's chat template. Raises InvalidRequest."""
    if asked.chat_template is not None and not context.args.trust_request_chat_template:
        raise InvalidRequest(
            "chat_template is a program, and this server runs none from requests; leave it out, or start the server "
            "with --trust-request-chat-template",
            field="chat_template",
            code="unsupported_parameter",
        )
    continues = bool(asked.continue_final_message)
    opens_turn = asked.add_generation_prompt if asked.add_generation_prompt is not None else not continues
    return context.llm.render_chat(
        [message.as_dict(f"messages[{index}]") for index, message in enumerate(asked.messages or [])],
        add_generation_prompt=opens_turn,
        continue_final_message=continues,
        chat_template=asked.chat_template,
        chat_template_kwargs=asked.chat_template_kwargs,
    )
