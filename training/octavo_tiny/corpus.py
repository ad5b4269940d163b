"""The training text as a whole: documents in their mix, one per seed, with training and held-out seeds kept apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from training.octavo_tiny.chats import Message, make_chat
from training.octavo_tiny.prose import make_prose
from training.octavo_tiny.stories import make_story

END_OF_TEXT = "<|endoftext|>"
MESSAGE_START = "<|im_start|>"
MESSAGE_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, MESSAGE_START, MESSAGE_END)

# document numbers of the held-out text start here; training never reaches them
HELD_OUT_START = 1_000_000_000
KINDS = ("story", "prose", "chat")
# stories are long, uniform and learned first; later their room goes to what needs more repetition
EARLY_WEIGHTS = (34, 26, 40)
LATE_WEIGHTS = (10, 48, 42)
LONG_SHARE = 0.03

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Document:
    """One document as the model reads it, special tokens included, and the kind of text that it is."""

    kind: str
    text: str


def render_chat(messages: list[Message]) -> str:
    """Render a conversation as `CHAT_TEMPLATE` does."""
    return "".join(f"{MESSAGE_START}{message['role']}\n{message['content']}{MESSAGE_END}\n" for message in messages)


def make_document(
    seed: int, number: int, kind: str | None = None, weights: Sequence[float] = EARLY_WEIGHTS
) -> Document:
    """Write document `number` of the corpus `seed`: of `kind`, or of one drawn by `weights`."""
    rng = Random(f"{seed}/{number}")
    chosen = kind or rng.choices(KINDS, weights)[0]
    is_long = rng.random() < LONG_SHARE
    if chosen == "story":
        return Document(chosen, make_story(rng, num_episodes=rng.randint(2, 4) if is_long else 1) + END_OF_TEXT)
    if chosen == "prose":
        return Document(chosen, make_prose(rng) + END_OF_TEXT)
    return Document(chosen, render_chat(make_chat(rng, rng.randint(6, 12) if is_long else None)) + END_OF_TEXT)


def make_documents(
    seed: int, first: int, count: int, kind: str | None = None, weights: Sequence[float] = EARLY_WEIGHTS
) -> list[Document]:
    """Write `count` documents from number `first` on."""
    return [make_document(seed, number, kind, weights) for number in range(first, first + count)]
