"""The bodies of requests about pairs: queries and documents, which are texts, or texts and images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Self

from msgspec import Meta, Struct, structs

from octavo.core.pooling import CLASSIFY
from octavo.core.prompt import Prompt
from octavo.core.request_limits import REQUEST_LIMITS, check_entries
from octavo.engine.input.input_processor import InputProcessor
from octavo.engine.input.listwise import list_prompt, lists_of
from octavo.engine.input.media_pairs import Content, media_pair, media_prompt
from octavo.engine.input.vector_input import matched
from octavo.errors import InvalidRequest
from octavo.server.decode import Int, Refused, RequestBody
from octavo.server.schema.chat import AudioPart, ImagePart, MediaPart, Message, TextPart, VideoPart
from octavo.server.schema.common import checked_texts
from octavo.server.schema.vectors import MOST, VectorRequest

if TYPE_CHECKING:
    from octavo.server.preparing import Preparer

_OF_PAIRS: Final = Refused("the template of pairs takes no values; leave it out", harmless=({},))


class Document(Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The text of a document or a query, or its parts: texts and images, as in a chat's message."""

    text: str | None = None
    content: Annotated[list[TextPart | ImagePart | VideoPart | AudioPart], Meta(min_length=1)] | None = None

    @property
    def alone(self) -> str:
        """Its text without its images."""
        return self.text or "\n".join(part.text for part in self.content or () if isinstance(part, TextPart))

    def message(self, field: str) -> Message:
        """Return the document as a message of a chat. Raises InvalidRequest, which names `field`."""
        if (self.text is None) == (self.content is None):
            raise InvalidRequest(f"{field} has text and content, or neither; give one", field=field)
        return Message(role="user", content=self.text if self.content is None else [*self.content])


Item = str | Document
Side = Item | list[Item]


class PairsRequest(VectorRequest, kw_only=True, forbid_unknown_fields=True):
    """The common fields of requests about pairs. max_tokens_per_query, max_tokens_per_doc: number of leading tokens
    that are kept of each first and each second text; 0 keeps all."""

    task = None
    lists_prompts = False

    instruction: str | None = None
    max_tokens_per_query: Annotated[int, Meta(ge=0, le=MOST)] | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=0, le=MOST)] | None = None
    chat_template_kwargs: Annotated[Any, _OF_PAIRS] = None

    @property
    def names_of_sides(self) -> tuple[str, str]:
        """The names of the fields with the first and the second texts of the pairs."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise InvalidRequest for fields that are too long, and for too many images."""
        first, second = (self._items(name) for name in self.names_of_sides)
        for field, item in (*first, *second):
            if isinstance(item, Document):
                item.message(field).check(field)
        # the images of one query may be read with each document
        num_media = sum(map(_num_media, second)) + sum(map(_num_media, first)) * (len(second) if len(first) == 1 else 1)
        check_entries(self.texts_field, num_media, REQUEST_LIMITS["messages[].content"].entries)
        RequestBody.check(self.without_media())

    def without_text(self) -> Self:
        return self.without_media()  # responses have documents, and count queries

    def without_media(self) -> Self:
        """Return the request with only the texts of documents that have images."""
        changes: dict[str, Any] = {}
        for name in self.names_of_sides:
            side = getattr(self, name)
            changes[name] = [_alone(each) for each in side] if isinstance(side, list) else _alone(side)
        return structs.replace(self, **changes)

    @property
    def may_take_long(self) -> bool:
        items = [item for name in self.names_of_sides for _, item in self._items(name)]
        return any(isinstance(each, Document) and each.content is not None for each in items)

    def _items(self, name: str) -> list[tuple[str, Item]]:
        """Return the entries of a field, each with its path in the request."""
        side: Side = getattr(self, name)
        return [(f"{name}[{n}]", each) for n, each in enumerate(side)] if isinstance(side, list) else [(name, side)]

    def sides(self) -> tuple[list[str], list[str]]:
        """Return the texts of the first and the second of each pair. Raises InvalidRequest."""
        first, second = ([_alone(item) for _, item in self._items(name)] for name in self.names_of_sides)
        return tuple(map(checked_texts, self.names_of_sides, (first, second)))  # type: ignore[return-value]

    def prompts(self, preparer: Preparer) -> list[Prompt]:
        """Return a prompt for each pair; for a model that makes vectors one for each query, then one for each
        document."""
        tools = preparer.tools
        makes_vectors = tools.vectors.checked(None).task != CLASSIFY
        self.sides()
        mosts = self.max_tokens_per_query, self.max_tokens_per_doc
        sides = [
            [(field, _first_tokens(tools, _content(item, field), most, field)) for field, item in self._items(name)]
            for name, most in zip(self.names_of_sides, mosts, strict=True)
        ]
        pairs = matched(*sides)
        if tools.vectors.ranks_lists:
            return self._lists(tools, *sides)
        if makes_vectors:
            return [
                write(content) if isinstance(content, str) else media_prompt(tools, content, field)
                for write, side in zip(tools.vectors.writers(), sides, strict=True)
                for field, content in side
            ]
        return [self._pair(tools, *pair) for pair in pairs]

    def _lists(self, tools: InputProcessor, *sides: list[tuple[str, Content]]) -> list[Prompt]:
        if self.truncate_prompt_tokens is not None:
            raise InvalidRequest(
                "truncate_prompt_tokens would cut off documents or the query; give max_tokens_per_doc and "
                "max_tokens_per_query",
                field="truncate_prompt_tokens",
            )
        for field, content in (*sides[0], *sides[1]):
            if not isinstance(content, str):
                raise InvalidRequest(f"{field} has images, and this model reads text alone; send text", field=field)
            tools.check_text_length(content, field)
        queries, documents = ([str(content) for _, content in side] for side in sides)
        return [list_prompt(tools, query, own, self.instruction) for query, own in lists_of(queries, documents)]

    def _pair(self, tools: InputProcessor, query: tuple[str, Content], document: tuple[str, Content]) -> Prompt:
        (query_field, first), (document_field, second) = query, document
        if isinstance(first, str) and isinstance(second, str):
            return tools.pair_prompt(first, second, self.instruction)
        return media_pair(tools, (first, second), self.instruction, (query_field, document_field))


def _alone(item: Item) -> str:
    return item if isinstance(item, str) else item.alone


def _num_media(item: tuple[str, Item]) -> int:
    content = item[1].content if isinstance(item[1], Document) else None
    return sum(isinstance(part, MediaPart) for part in content or ())


def _content(item: Item, field: str) -> Content:
    content: Content = item if isinstance(item, str) else item.message(field).as_dict(field)["content"]
    return content


class RerankRequest(PairsRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /rerank`: documents, to be ranked by relevance to a query."""

    id_prefix = "rerank-"
    texts_field = "documents"

    query: str | Document
    documents: Annotated[list[str | Document], Meta(min_length=1)]
    top_n: Int | None = None
    return_documents: bool | None = None

    def check(self) -> None:
        super().check()
        if self.top_n is not None and self.top_n < 0:
            raise InvalidRequest(f"top_n is {self.top_n}, must be at least 1, or 0 for all documents", field="top_n")

    @property
    def names_of_sides(self) -> tuple[str, str]:
        return "query", "documents"


_SIDES: Final = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


class ScoreRequest(PairsRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /score`: how well texts go together: one text with each of many, or two lists pair by pair."""

    id_prefix = "score-"

    text_1: str | Document | list[str | Document] | None = None
    text_2: str | Document | list[str | Document] | None = None
    queries: str | Document | list[str | Document] | None = None
    documents: str | Document | list[str | Document] | None = None
    items: str | Document | list[str | Document] | None = None
    data_1: str | Document | list[str | Document] | None = None
    data_2: str | Document | list[str | Document] | None = None

    label_token_ids: Annotated[Any, Refused("POST /generative_scoring scores by the tokens that follow")] = None

    @property
    def names_of_sides(self) -> tuple[str, str]:
        given = tuple(name for name in dict.fromkeys(sum(_SIDES, ())) if getattr(self, name) is not None)
        if given not in _SIDES:
            raise InvalidRequest("give text_1 and text_2, or queries and documents", field="text_1")
        return given

    @property
    def texts_field(self) -> str:  # type: ignore[override]  # it follows from the request
        return self.names_of_sides[1]


def _first_tokens(tools: InputProcessor, content: Content, most: int | None, field: str) -> Content:
    """Return a text, cut off behind its first tokens where it has more than `most`; 0 and None leave all as it is.
    Raises InvalidRequest for one with images."""
    if not most:
        return content
    if not isinstance(content, str):
        raise InvalidRequest(
            f"{field} has images, which max_tokens_per_query and max_tokens_per_doc cannot shorten", field=field
        )
    tokens = tools.tokenizer.encode(content, add_special_tokens=False)
    return content if len(tokens) <= most else tools.tokenizer.decode(tokens[:most], skip_special_tokens=False)
