"""A grammar of short dialogues: `make_chat` strings exchanges on drawn topics into a conversation."""

from collections.abc import Callable
from random import Random

from training.octavo_tiny import fact_topics, talk_topics
from training.octavo_tiny.exchanges import Exchange

Message = dict[str, str]

TOPICS: tuple[tuple[Callable[[Random], Exchange], float], ...] = (
    (talk_topics.greeting, 1.2),
    (talk_topics.introduction, 0.6),
    (talk_topics.identity, 1.2),
    (talk_topics.abilities, 0.8),
    (fact_topics.concept, 5.5),
    (fact_topics.hardware, 0.6),
    (fact_topics.comparison, 0.7),
    (fact_topics.arithmetic, 5.5),
    (fact_topics.colour, 1.0),
    (fact_topics.opposite, 1.4),
    (fact_topics.capital_city, 2.2),
    (fact_topics.calendar, 1.4),
    (fact_topics.animal, 1.6),
    (fact_topics.count, 0.8),
    (fact_topics.shape, 0.3),
    (talk_topics.story, 2.0),
    (talk_topics.poem, 1.0),
    (talk_topics.opinion, 0.5),
    (talk_topics.joke, 0.3),
    (talk_topics.thanks, 0.5),
    (talk_topics.goodbye, 0.5),
    (talk_topics.unknown, 2.2),
)
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are octavo-tiny, a small demonstration model.",
    "You are a friendly assistant.",
    "Answer briefly.",
    "You are a helpful assistant. Answer in simple words.",
    "You tell stories and answer simple questions.",
)


def introduced_name(exchanges: list[Exchange]) -> str | None:
    """Return the name by which the user was introduced last, or None."""
    names = [exchange.user_name for exchange in exchanges if exchange.user_name is not None]
    return names[-1] if names else None


def make_chat(rng: Random, num_exchanges: int | None = None) -> list[Message]:
    """Write a conversation of user and assistant messages, sometimes with a system message before them."""
    if num_exchanges is None:
        num_exchanges = rng.choices((1, 2, 3, 4, 5), (50, 22, 14, 8, 6))[0]
    topics, weights = zip(*TOPICS, strict=True)
    chosen = rng.choices(topics, weights, k=num_exchanges)
    if num_exchanges > 1:
        if rng.random() < 0.35:
            chosen[0] = rng.choice((talk_topics.greeting, talk_topics.introduction))
        if rng.random() < 0.3:
            chosen[-1] = rng.choice((talk_topics.thanks, talk_topics.goodbye))
    messages: list[Message] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_MESSAGES)})
    exchanges = [topic(rng) for topic in chosen]
    if rng.random() < (0.4 if talk_topics.introduction in chosen else 0.02):
        exchanges.append(talk_topics.recall_name(rng, introduced_name(exchanges)))
    for exchange in exchanges:
        messages.append({"role": "user", "content": exchange.question})
        messages.append({"role": "assistant", "content": exchange.answer})
    return messages
