"""The bodies of requests for vectors and scores, and the encoding of these in responses."""

from __future__ import annotations

import sys
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from msgspec import Meta, Raw, Struct, json, structs

from octavo.core.pooling import CLASSIFY, EMBED, PoolingParams
from octavo.core.prompt import Prompt
from octavo.errors import InvalidRequest
from octavo.server.decode import EngineBody, Int, Refused, RequestBody, TokenId
from octavo.server.schema.bodies import PromptBody
from octavo.server.schema.chat import Message
from octavo.server.schema.common import checked_texts, listed_prompts, prompt_of
from octavo.server.schema.tokens import AS_STORED
from octavo.server.usage import TokenCounts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from octavo.server.preparing import Preparer

Input = str | list[str | TokenId | list[TokenId]]
"""A text, token ids, or a list of either."""
MOST: Final = 2**63 - 1


BINARY: Final = ("bytes", "bytes_only")
"""Formats with a binary response: with a header that describes the arrays, and without it."""
BITS: Final = ("binary", "ubinary")
"""Formats of `/v2/embed` with a byte for each eight numbers."""
MOST_DESCRIBED: Final = 512
"""Most arrays that a header describes: clients refuse lines of more than 64 KiB."""
_SLICE: Final = 4096
"""Most numbers that are encoded in one call, during which the process does nothing else."""


class Encoding(Struct, frozen=True, kw_only=True):
    """How a request wants vectors. type: "float32", "float16" or "bfloat16". order: "native", "little" or "big". The
    formats of `BITS` have one bit of each number."""

    format: str = "float"
    type: str = "float32"
    order: str = "native"

    def value(self, array: NDArray[np.float32]) -> Raw | str:
        if self.format in BITS:
            return Raw(_numbers(_packed(array, self.format)))
        return b64encode(self.binary(array)).decode() if self.format == "base64" else Raw(_numbers(array))

    def binary(self, array: NDArray[np.float32]) -> bytes:
        import numpy as np

        if self.type == "bfloat16":
            bits = array.astype(np.float32).view(np.uint32)
            # rounded to the nearest, ties to even
            given: NDArray[Any] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        else:
            given = array.astype(np.dtype(self.type))
        is_swapped = self.order not in ("native", sys.byteorder)
        return (given.byteswap() if is_swapped else given).tobytes()

    def joined(self, arrays: Sequence[NDArray[np.float32]]) -> tuple[bytes, list[dict[str, Any]]]:
        """Return the bytes of all arrays, and for each its offsets, type and shape."""
        parts = [self.binary(array) for array in arrays]
        described, start = [], 0
        for index, (array, part) in enumerate(zip(arrays, parts, strict=True)):
            place = {"index": index, "start": start, "end": start + len(part), "shape": list(array.shape)}
            described.append(place | {"embed_dtype": self.type, "endianness": self.order})
            start += len(part)
        return b"".join(parts), described


def _packed(array: NDArray[np.float32], kind: str) -> NDArray[np.int16]:
    """Return a byte for each eight numbers of [size], the first number in its highest bit: 1 for a number from 0 on.
    Bytes of "ubinary" are from 0 to 255, those of "binary" 128 less, as Cohere has them."""
    import numpy as np

    return np.packbits(array >= 0).astype(np.int16) - (128 if kind == "binary" else 0)


def _numbers(array: NDArray[Any]) -> bytes:
    """Return the JSON of an array, [size] or [rows, size], made in slices so that few numbers become objects at
    once."""
    if array.ndim > 1:
        parts = [_numbers(row) for row in array]
    else:
        parts = [json.encode(array[n : n + _SLICE].tolist())[1:-1] for n in range(0, len(array), _SLICE)]
    return b"[" + b",".join(parts) + b"]"


class VectorRequest(EngineBody, PromptBody, kw_only=True, forbid_unknown_fields=True):
    """The common fields of requests for vectors and scores. truncate_prompt_tokens: number of leading tokens that are
    kept of longer prompts, -1 for as many as the model takes."""

    id_prefix: ClassVar[str] = "embd-"
    task: ClassVar[str | None] = EMBED
    texts_field: ClassVar[str] = "input"
    names: ClassVar[Mapping[str, str]] = {}
    """The client's names for fields that the engine knows by other names."""

    truncate_prompt_tokens: Int | None = None
    truncation_side: Literal["left", "right"] = "right"
    use_activation: bool | None = None
    add_special_tokens: bool | None = None

    padding: Annotated[Any, Refused("no prompt is padded; leave it out", harmless=("do_not_pad",))] = None
    mm_processor_kwargs: Annotated[Any, AS_STORED] = None
    media_io_kwargs: Annotated[Any, AS_STORED] = None

    def params(self) -> PoolingParams:
        """Return the pooling parameters. Raises InvalidRequest."""
        return PoolingParams(
            task=self.task,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
            use_activation=self.use_activation,
        )

    def encoding(self) -> Encoding:
        """Return the encoding of vectors in the response."""
        return Encoding()


class InputRequest(VectorRequest, kw_only=True, forbid_unknown_fields=True):
    """Vectors or scores of one input or several, or of a conversation in the model's chat template."""

    input: Input | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        RequestBody.check(self)
        if (self.input is None) == (self.messages is None):
            raise InvalidRequest("give either input or messages", field="input")

    def prompts(self, preparer: Preparer) -> list[Prompt]:
        preparer.tools.vectors.checked(self.params().task)
        if self.input is None:
            return [preparer.rendered(self, opens_turn=False)]
        listed = listed_prompts("input", self.input)
        if self.encoding().format == "bytes" and len(listed) > MOST_DESCRIBED:
            raise InvalidRequest(
                f"input has {len(listed):,} texts, must have at most {MOST_DESCRIBED} where encoding_format is bytes, "
                "whose header describes each; take bytes_only or base64, or send several requests",
                field="input",
            )
        return [prompt_of(each, self.add_special_tokens) for each in listed]


class EmbeddingRequest(InputRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/embeddings`. prompt_name: the prompt of sentence-transformers' files that goes before each input.

    encoding_format: bytes is a binary response, which its header `metadata` describes, bytes_only is one without it.
    embed_dtype, endianness: of the numbers in base64 text and bytes.
    """

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    embed_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    endianness: Literal["native", "little", "big"] = "native"
    dimensions: Int | None = None
    prompt_name: str | None = None

    def encoding(self) -> Encoding:
        return Encoding(format=self.encoding_format or "float", type=self.embed_dtype, order=self.endianness)

    def params(self) -> PoolingParams:
        return structs.replace(super().params(), dimensions=self.dimensions)

    def prompts(self, preparer: Preparer) -> list[Prompt]:
        found = super().prompts(preparer)
        if self.input is None:
            return found
        return [preparer.tools.vectors.prompted(prompt, self.prompt_name) for prompt in found]


class ClassifyRequest(InputRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /classify`."""

    id_prefix = "classify-"
    task = CLASSIFY


class PoolingRequest(EmbeddingRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /pooling`: the output of the model's default task, or of the named one."""

    id_prefix = "pool-"
    task: Literal["embed", "classify", "score", "token_embed", "token_classify"] | None = None  # type: ignore[misc]

    def prompts(self, preparer: Preparer) -> list[Prompt]:
        return (InputRequest if self.prompt_name is None else EmbeddingRequest).prompts(self, preparer)


_INPUT_TYPES = {"search_query": ("query",), "search_document": ("document", "passage")}
"""Cohere's types of inputs, and the names of equivalent prompts in sentence-transformers' files."""


class CohereEmbedRequest(VectorRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v2/embed`, with Cohere's names."""

    texts_field = "texts"
    names: ClassVar[Mapping[str, str]] = {"dimensions": "output_dimension"}

    texts: Annotated[list[str], Meta(min_length=1)]
    images: Annotated[Any, Refused("send images to /v1/embeddings, as parts of messages", harmless=([],))] = None
    inputs: Annotated[Any, Refused("send texts; images go to /v1/embeddings, as parts of messages")] = None
    input_type: str | None = None
    embedding_types: list[Literal["float", "binary", "ubinary", "base64"]] | None = None
    output_dimension: Annotated[int, Meta(ge=1, le=MOST)] | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=MOST)] | None = None
    truncate: Literal["NONE", "START", "END"] = "END"

    def params(self) -> PoolingParams:
        kept = None if self.truncate == "NONE" else self.max_tokens or -1
        side = "left" if self.truncate == "START" else "right"
        return PoolingParams(
            task=EMBED, dimensions=self.output_dimension, truncate_prompt_tokens=kept, truncation_side=side
        )

    def prompts(self, preparer: Preparer) -> list[Prompt]:
        vectors = preparer.tools.vectors
        config = vectors.checked(EMBED)
        size, known = self.output_dimension or config.size, config.prompts
        if size % 8 and any(each in BITS for each in self.embedding_types or ()):
            raise InvalidRequest(
                f"embedding_types asks for bits of vectors of {size} numbers, which must be a multiple of 8; set "
                "output_dimension to one, or take float or base64",
                field="embedding_types",
            )
        kind = self.input_type or ""
        name = next((each for each in (kind, *_INPUT_TYPES.get(kind, ())) if each in known), None)
        return [vectors.prompted(Prompt(text=text), name) for text in checked_texts("texts", self.texts)]


class Score(Struct, frozen=True):
    """The score of a pair, or the probability of a label after an item."""

    index: int
    score: float
    object: str = "score"


class VectorList(Struct, kw_only=True):
    """Fields of lists of results besides the results."""

    id: str
    created: int
    model: str
    usage: TokenCounts
    object: str = "list"


class ScoreList(VectorList, kw_only=True):
    """The response of `POST /score` and `POST /generative_scoring`."""

    data: list[Score]
