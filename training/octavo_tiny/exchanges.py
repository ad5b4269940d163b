"""One question and its answer, and the manners in which a question may be typed."""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Exchange:
    """A question of the user, the answer of the assistant, and the user's name where the question gave it."""

    question: str
    answer: str
    user_name: str | None = None


def asked(rng: Random, *wordings: str) -> str:
    """Draw a wording of a question, and a manner: as it is, politely, or carelessly typed."""
    text = rng.choice(wordings)
    manner = rng.random()
    if manner < 0.08:
        return text.lower()
    if manner < 0.16:
        return text.rstrip("?.!")
    if manner < 0.24 and text.endswith("?"):
        if rng.random() < 0.4:
            return rng.choice(("Hi, ", "Hello, ", "Hey, ", "Please tell me, ")) + text[0].lower() + text[1:]
        return rng.choice(("Hi! ", "Hello. ", "Please tell me: ", "I have a question. ")) + text
    if manner < 0.28:
        return text.lower().rstrip("?.!")
    return text
