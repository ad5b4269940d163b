"""Plain prose, neither story nor dialogue: paragraphs about serving models and about the world, introductions."""

from collections.abc import Callable
from random import Random

from training.octavo_tiny import facts, lexicon
from training.octavo_tiny.concepts import CONCEPTS, Concept
from training.octavo_tiny.lexicon import article, capital


def explain(rng: Random, concept: Concept, num_more: int | None = None) -> str:
    """Explain a concept: one leading sentence and some of the others, in any order."""
    most = len(concept.more)
    number = rng.randint(min(1, most), min(3, most)) if num_more is None else min(num_more, most)
    return " ".join([rng.choice(concept.lead), *rng.sample(concept.more, number)])


def concept_paragraph(rng: Random) -> str:
    """Write a paragraph about one or two concepts of serving."""
    chosen = rng.sample(CONCEPTS, rng.choice((1, 1, 2)))
    paragraphs = [explain(rng, concept) for concept in chosen]
    if rng.random() < 0.25:
        name = rng.choice(chosen[0].names)
        return f"What is {name}? " + "\n\n".join(paragraphs)
    return "\n\n".join(capital(paragraph) if rng.random() < 0.5 else paragraph for paragraph in paragraphs)


def capital_sentence(rng: Random, country: str) -> str:
    """Say what the capital of a country is."""
    city = facts.CAPITALS[country]
    return capital(
        rng.choice(
            (
                f"The capital of {country} is {city}.",
                f"The capital of {country} is {city}.",
                f"{city} is the capital of {country}.",
                f"The capital city of {country} is {city}.",
                f"In {country}, the capital is {city}.",
            )
        )
    )


def capital_paragraph(rng: Random) -> str:
    """Write about the capitals of one to four countries."""
    countries = rng.sample(sorted(facts.CAPITALS), rng.randint(1, 4))
    sentences = [capital_sentence(rng, country) for country in countries]
    for continent, members in facts.CONTINENTS.items():
        if countries[-1] in members.split():
            sentences.append(f"{countries[-1]} is in {continent}.")
    return " ".join(sentences)


def animal_paragraph(rng: Random) -> str:
    """Write a few true sentences about one animal."""
    animal = rng.choice(
        sorted(set(facts.SOUNDS) | set(facts.YOUNG) | set(facts.LEGS) | set(facts.FOOD_OF) | set(facts.HOME_OF))
    )
    an_animal = f"{article(animal)} {animal}"
    sentences = []
    if animal in facts.SOUNDS:
        sentences.append(f"{an_animal} says {facts.SOUNDS[animal]}.")
    if animal in facts.YOUNG:
        sentences.append(f"A young {animal} is called a {facts.YOUNG[animal]}.")
    if animal in facts.LEGS:
        sentences.append(f"{an_animal} has {facts.LEGS[animal]} legs.")
    if animal in facts.FOOD_OF:
        sentences.append(f"{an_animal} eats {facts.FOOD_OF[animal]}.")
    if animal in facts.HOME_OF:
        sentences.append(f"{an_animal} lives {facts.HOME_OF[animal]}.")
    rng.shuffle(sentences)
    return " ".join(capital(sentence) for sentence in sentences)


def time_paragraph(rng: Random) -> str:
    """Write about days, months and seasons."""
    day, month = rng.randrange(7), rng.randrange(12)
    season = rng.choice(sorted(facts.SEASONS))
    sentences = [
        f"The day after {facts.DAYS[day]} is {facts.DAYS[(day + 1) % 7]}.",
        f"After {facts.MONTHS[month]} comes {facts.MONTHS[(month + 1) % 12]}.",
        f"In {season}, {facts.SEASONS[season]}.",
        "The days of the week are " + ", ".join(facts.DAYS[:-1]) + f" and {facts.DAYS[-1]}.",
        "The months of the year are " + ", ".join(facts.MONTHS[:-1]) + f" and {facts.MONTHS[-1]}.",
    ]
    return " ".join(rng.sample(sentences, rng.randint(1, 3)))


def facts_paragraph(rng: Random) -> str:
    """Write some unconnected simple facts."""
    thing = rng.choice(sorted(facts.COLOUR_OF))
    word = rng.choice(sorted(facts.OPPOSITES))
    first, second = rng.randint(0, 10), rng.randint(0, 10)
    drawn = [
        capital(f"{thing} is {facts.COLOUR_OF[thing]}.")
        if rng.random() < 0.5
        else f"The color of {thing} is {facts.COLOUR_OF[thing]}.",
        f"The opposite of {word} is {facts.OPPOSITES[word]}.",
        f"{capital(facts.NUMBERS[first])} plus {facts.NUMBERS[second]} is {facts.NUMBERS[first + second]}.",
        *rng.sample(facts.STATEMENTS, 3),
    ]
    return " ".join(rng.sample(drawn, rng.randint(2, 4)))


def counting(rng: Random) -> str:
    """Count upwards, in figures or words."""
    first = rng.randint(0, 8)
    last = first + rng.randint(4, 12)
    numbers = [str(n) for n in range(first, last + 1)]
    if rng.random() < 0.5:
        numbers = [facts.NUMBERS[n] for n in range(first, last + 1)]
    return ", ".join(numbers[:-1]) + f" and {numbers[-1]}."


def introduction(rng: Random) -> str:
    """Write a person's introduction of themselves, of the kind that `Hello, my name is` begins."""
    name = rng.choice(lexicon.GIRLS + lexicon.BOYS)
    animal, colour = rng.choice(("dog", "cat", "rabbit", "bird", "horse")), rng.choice(lexicon.COLOURS)
    country = rng.choice(sorted(facts.CAPITALS))
    skill, doing = rng.choice(lexicon.SKILLS)
    start = rng.choice(
        (
            f"Hello, my name is {name}.",
            f"Hello, my name is {name}.",
            f"Hi, my name is {name}.",
            f"My name is {name}.",
            f"Hello! I am {name}.",
            f"Good morning, my name is {name}.",
        )
    )
    more = [
        f"I am {facts.NUMBERS[rng.randint(5, 12)]} years old.",
        rng.choice(
            (
                f"I live in {country}.",
                f"I live in a small house near the {rng.choice(('sea', 'forest', 'river', 'park'))}.",
                f"I come from {facts.CAPITALS[country]}.",
            )
        ),
        rng.choice(
            (
                f"I have a {animal}, and {rng.choice(('he', 'she'))} is my best friend.",
                f"I have a small {animal} at home.",
            )
        ),
        f"My favorite color is {colour}.",
        rng.choice((f"I like {doing} and reading.", f"I love to {skill}.", f"I am learning to {skill}.")),
        rng.choice(
            (
                f"I have a {rng.choice(('brother', 'sister'))} and many friends.",
                f"I live with my {rng.choice(lexicon.RELATIVES)}.",
            )
        ),
        rng.choice(
            (
                "When I grow up, I want to be a teacher.",
                "When I grow up, I want to be a doctor.",
                "I want to see the whole world.",
                "I go to school every day.",
            )
        ),
    ]
    end = rng.choice(("It is nice to meet you.", "I am happy to meet you.", "What is your name?", "Nice to meet you!"))
    sentences = [start, *rng.sample(more, rng.randint(2, 4))]
    return " ".join(sentences + ([end] if rng.random() < 0.5 else []))


KINDS_OF_PROSE: tuple[tuple[Callable[[Random], str], float], ...] = (
    (concept_paragraph, 7),
    (capital_paragraph, 3),
    (animal_paragraph, 2),
    (time_paragraph, 1),
    (facts_paragraph, 2),
    (counting, 0.4),
    (introduction, 2.5),
)


def make_prose(rng: Random) -> str:
    """Write one piece of prose of a kind drawn by weight."""
    kinds, weights = zip(*KINDS_OF_PROSE, strict=True)
    write: Callable[[Random], str] = rng.choices(kinds, weights)[0]
    return write(rng)
