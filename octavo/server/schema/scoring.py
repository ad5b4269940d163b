"""The body of `POST /generative_scoring`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from msgspec import Meta, structs

from octavo.core.prompt import Prompt
from octavo.core.request_limits import MAX_REQUEST_TOKENS
from octavo.engine.input.input_processor import InputProcessor
from octavo.errors import InvalidRequest
from octavo.server.decode import EngineBody, RequestBody, TokenId
from octavo.server.schema.bodies import PromptBody
from octavo.server.schema.common import checked_texts

if TYPE_CHECKING:
    from octavo.server.preparing import Preparer


class GenerativeScoringRequest(EngineBody, PromptBody, kw_only=True, forbid_unknown_fields=True):
    """A query and items, each of which is scored by how probable it is that one of some tokens follows.

    query, items: texts, or token ids. label_token_ids: the tokens; the score is that of the first one. apply_softmax:
    the tokens alone share the probability, instead of the whole vocabulary. item_first: an item stands before the
    query, not behind it. add_special_tokens: a start token stands before both.
    """

    texts_field: ClassVar[str] = "items"

    query: str | list[TokenId]
    items: list[str | list[TokenId]]
    label_token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    apply_softmax: bool = True
    item_first: bool = False
    add_special_tokens: bool = True

    def check(self) -> None:
        """Raise InvalidRequest for fields that are too long, and for items of several kinds."""
        RequestBody.check(self)
        checked_texts("items", self.items, "text or token ids")
        if len({type(each) for each in self.items}) > 1:
            raise InvalidRequest("items mixes kinds; it is a list of texts, or of lists of token ids", field="items")

    def prompts(self, preparer: Preparer) -> list[Prompt]:
        """Return the prompt of each item. Raises InvalidRequest for a model that makes vectors, for a text that no
        context holds, and for too many tokens together."""
        tools = preparer.tools
        tools.vectors.refuse_text()
        query = self._tokens(tools, self.query, "query", is_first=not self.item_first)
        items = [self._tokens(tools, each, "items", is_first=self.item_first) for each in self.items]
        num_tokens = len(query) * len(items) + sum(map(len, items))
        if num_tokens > MAX_REQUEST_TOKENS:
            raise InvalidRequest(
                f"the query and each of the items have {num_tokens:,} tokens together, must have at most "
                f"{MAX_REQUEST_TOKENS:,}; send several requests",
                field="items",
            )
        return [Prompt(token_ids=each + query if self.item_first else query + each) for each in items]

    def without_text(self) -> Self:
        return structs.replace(self, query="", items=[])

    def _tokens(self, tools: InputProcessor, given: str | list[int], field: str, *, is_first: bool) -> list[int]:
        if not isinstance(given, str):
            return given
        tools.check_text_length(given, field)
        return tools.tokenizer.encode(given, self.add_special_tokens and is_first)
