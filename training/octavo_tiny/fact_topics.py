"""Topics with a right answer: words of the trade, sums, colours, capitals, the calendar, animals."""

from random import Random

from training.octavo_tiny import facts
from training.octavo_tiny.concepts import CONCEPTS
from training.octavo_tiny.exchanges import Exchange, asked
from training.octavo_tiny.lexicon import article, capital
from training.octavo_tiny.prose import capital_sentence, explain


def concept(rng: Random) -> Exchange:
    """Explain a word of the trade."""
    chosen = rng.choice(CONCEPTS) if rng.random() < 0.75 else rng.choice(CONCEPTS[:8])
    name = rng.choice(chosen.names)
    be = "are" if name.endswith("s") and name[0].islower() and not name.endswith("ss") else "is"
    question = asked(
        rng,
        f"What {be} {name}?",
        f"What {be} {name}?",
        f"Explain {name}.",
        f"Can you explain {name}?",
        f"Tell me about {name}.",
        f"What do you know about {name}?",
        f"Please explain what {name} {be}.",
        f"How would you explain {name}?",
        f"Could you tell me what {name} {be}?",
        f"Explain {name} to me in simple words.",
        f"I want to learn about {name}.",
        f"Describe {name}.",
        f"What does {name} mean?",
        f"Do you know what {name} {be}?",
        f"Why do we need {name}?",
        f"How does {name} work?",
    )
    return Exchange(question, capital(explain(rng, chosen)) if chosen.names[0] != "octavo" else explain(rng, chosen))


def hardware(rng: Random) -> Exchange:
    """Say what octavo runs on. The model ships with a version of octavo, so that "this version" stays true."""
    question = asked(
        rng,
        "Does octavo run on a GPU?",
        "Does octavo need a GPU?",
        "Does octavo use a GPU?",
        "Can octavo use a GPU?",
        "Can octavo use CUDA?",
        "Do I need a GPU?",
        "Do I need a graphics card?",
        "Does octavo run on a CPU?",
        "Does octavo work without a GPU?",
        "What does octavo run on?",
        "Where does octavo run?",
        "What hardware does octavo need?",
        "Which hardware does octavo run on?",
    )
    return Exchange(
        question,
        rng.choice(
            (
                "octavo runs on the CPU. This version does not use a GPU.",
                "This version of octavo runs on the CPU only.",
                "octavo runs on a plain CPU and needs no GPU. This version cannot use one.",
            )
        ),
    )


def comparison(rng: Random) -> Exchange:
    """Explain two words of the trade next to each other."""
    first, second = rng.sample([concept for concept in CONCEPTS if concept.names[0] != "octavo"], 2)
    if rng.random() < 0.4:
        first, second = (
            next(concept for concept in CONCEPTS if concept.names[0] == name) for name in ("prefill", "decode")
        )
    one, other = first.names[0], second.names[0]
    question = asked(
        rng,
        f"What is the difference between {one} and {other}?",
        f"What is the difference between {one} and {other}?",
        f"Compare {one} and {other}.",
        f"How do {one} and {other} differ?",
        f"Explain {one} and {other}.",
    )
    return Exchange(question, f"{rng.choice(first.lead)} {rng.choice(second.lead)}")


def arithmetic(rng: Random) -> Exchange:
    """Add, take away or multiply small numbers."""
    kind = rng.choice(("plus", "plus", "minus", "times"))
    if kind == "plus":
        a, b = rng.randint(0, 10), rng.randint(0, 10)
        result = a + b
    elif kind == "minus":
        a = rng.randint(0, 15)
        b = rng.randint(0, min(a, 10))
        result = a - b
    else:
        a, b = rng.randint(0, 5), rng.randint(0, 5)
        result = a * b
    sign = {"plus": "+", "minus": "-", "times": "*"}[kind]
    symbols = rng.random() < 0.6
    left = (
        f"{a} {sign} {b}"
        if symbols
        else f"{a} {kind} {b}"
        if rng.random() < 0.7
        else f"{facts.NUMBERS[a]} {kind} {facts.NUMBERS[b]}"
    )
    question = asked(
        rng,
        f"What is {left}?",
        f"What is {left}?",
        f"{left} = ?",
        f"How much is {left}?",
        f"Calculate {left}.",
        f"Can you tell me what {left} is?",
        f"{left}?",
        f"What's {left}?",
    )
    if symbols:
        return Exchange(
            question,
            rng.choice(
                (
                    f"{a} {sign} {b} = {result}.",
                    f"{a} {sign} {b} is {result}.",
                    f"The answer is {result}.",
                    f"{a} {kind} {b} is {result}.",
                )
            ),
        )
    return Exchange(question, rng.choice((f"{a} {kind} {b} is {result}.", f"The answer is {result}.")))


def colour(rng: Random) -> Exchange:
    """Say the colour of something."""
    thing = rng.choice(sorted(facts.COLOUR_OF))
    shade = facts.COLOUR_OF[thing]
    question = asked(
        rng,
        f"What color is {thing}?",
        f"What is the color of {thing}?",
        f"Which color does {thing} have?",
        f"Do you know the color of {thing}?",
        f"What colour is {thing}?",
    )
    return Exchange(
        question,
        rng.choice(
            (
                f"{capital(thing)} is {shade}.",
                f"The color of {thing} is {shade}.",
                f"{capital(thing)} is usually {shade}.",
            )
        ),
    )


def opposite(rng: Random) -> Exchange:
    """Say the opposite of a word."""
    word = rng.choice(sorted(facts.OPPOSITES))
    quoted = rng.choice((word, f'"{word}"'))
    question = asked(
        rng,
        f"What is the opposite of {quoted}?",
        f"Tell me the opposite of {quoted}.",
        f"What's the opposite of {quoted}?",
        f"Opposite of {quoted}?",
        f"Which word is the opposite of {quoted}?",
        f"What is the antonym of {quoted}?",
    )
    return Exchange(
        question,
        rng.choice(
            (
                f"The opposite of {word} is {facts.OPPOSITES[word]}.",
                f"It is {facts.OPPOSITES[word]}.",
                f"The opposite of {word} is {facts.OPPOSITES[word]}.",
            )
        ),
    )


def capital_city(rng: Random) -> Exchange:
    """Say what the capital of a country is."""
    country = rng.choice(sorted(facts.CAPITALS))
    city = facts.CAPITALS[country]
    if rng.random() < 0.15:
        question = asked(
            rng,
            f"Which country has the capital {city}?",
            f"{city} is the capital of which country?",
            f"Where is {city}?",
        )
        return Exchange(question, rng.choice((f"{city} is the capital of {country}.", f"{city} is in {country}.")))
    question = asked(
        rng,
        f"What is the capital of {country}?",
        f"What is the capital of {country}?",
        f"What's the capital of {country}?",
        f"Which city is the capital of {country}?",
        f"Name the capital of {country}.",
        f"Tell me the capital of {country}.",
        f"Do you know the capital of {country}?",
        f"capital of {country}?",
    )
    return Exchange(question, capital_sentence(rng, country))


def calendar(rng: Random) -> Exchange:
    """Answer about days, months and seasons."""
    days = rng.random() < 0.5
    names = facts.DAYS if days else facts.MONTHS
    number = rng.randrange(len(names))
    here, after, before = names[number], names[(number + 1) % len(names)], names[number - 1]
    unit = "day" if days else "month"
    kind = rng.choice(("after", "after", "before", "list", "count", "season"))
    if kind == "after":
        return Exchange(
            asked(
                rng,
                f"Which {unit} comes after {here}?",
                f"What {unit} comes after {here}?",
                f"What comes after {here}?",
                f"What is the {unit} after {here}?",
            ),
            rng.choice(
                (f"{after} comes after {here}.", f"After {here} comes {after}.", f"The {unit} after {here} is {after}.")
            ),
        )
    if kind == "before":
        return Exchange(
            asked(
                rng,
                f"Which {unit} comes before {here}?",
                f"What {unit} comes before {here}?",
                f"What is the {unit} before {here}?",
            ),
            rng.choice((f"{before} comes before {here}.", f"The {unit} before {here} is {before}.")),
        )
    if kind == "list":
        whole = "week" if days else "year"
        return Exchange(
            asked(
                rng,
                f"What are the {unit}s of the {whole}?",
                f"Name the {unit}s of the {whole}.",
                f"List the {unit}s of the {whole}.",
            ),
            f"The {unit}s of the {whole} are {', '.join(names[:-1])} and {names[-1]}.",
        )
    if kind == "count":
        return Exchange(
            asked(
                rng,
                f"How many {unit}s are in a {'week' if days else 'year'}?",
                f"How many {unit}s does a {'week' if days else 'year'} have?",
            ),
            "A week has seven days." if days else "A year has twelve months.",
        )
    season = rng.choice(sorted(facts.SEASONS))
    return Exchange(
        asked(rng, f"What happens in {season}?", f"Tell me about {season}.", f"What is {season} like?"),
        f"In {season}, {facts.SEASONS[season]}.",
    )


def animal(rng: Random) -> Exchange:
    """Answer about an animal: its sound, young, legs, food or home."""
    kind = rng.choice(("sound", "sound", "young", "legs", "food", "home"))
    table = {
        "sound": facts.SOUNDS,
        "young": facts.YOUNG,
        "legs": facts.LEGS,
        "food": facts.FOOD_OF,
        "home": facts.HOME_OF,
    }[kind]
    beast = rng.choice(sorted(table))
    value, one = table[beast], f"{article(beast)} {beast}"
    if kind == "sound":
        return Exchange(
            asked(
                rng,
                f"What does {one} say?",
                f"What sound does {one} make?",
                f"Which sound does {one} make?",
                f"What noise does {one} make?",
                f"How does {one} sound?",
            ),
            rng.choice(
                (f"{capital(one)} says {value}.", f'{capital(one)} says "{value}".', f"{capital(one)} goes {value}.")
            ),
        )
    if kind == "young":
        return Exchange(
            asked(
                rng,
                f"What is a young {beast} called?",
                f"What is a baby {beast} called?",
                f"What do you call a baby {beast}?",
            ),
            f"A young {beast} is called a {value}.",
        )
    if kind == "legs":
        return Exchange(
            asked(rng, f"How many legs does {one} have?", f"How many legs has {one} got?"),
            f"{capital(one)} has {value} legs.",
        )
    if kind == "food":
        return Exchange(
            asked(
                rng,
                f"What does {one} eat?",
                f"What do {beast}s eat?" if beast not in ("mouse",) else "What do mice eat?",
                f"What is the food of {one}?",
            ),
            f"{capital(one)} eats {value}.",
        )
    return Exchange(
        asked(rng, f"Where does {one} live?", f"What is the home of {one}?"), f"{capital(one)} lives {value}."
    )


def count(rng: Random) -> Exchange:
    """Count to a number, or say which number comes next."""
    if rng.random() < 0.4:
        number = rng.randint(0, 30)
        return Exchange(
            asked(
                rng,
                f"What number comes after {number}?",
                f"Which number comes after {number}?",
                f"What comes after {number}?",
            ),
            rng.choice((f"{number + 1} comes after {number}.", f"After {number} comes {number + 1}.")),
        )
    last = rng.randint(3, 15)
    question = asked(
        rng,
        f"Count to {last}.",
        f"Can you count to {last}?",
        f"Please count to {last}.",
        f"Count from 1 to {last}.",
        f"Count from one to {facts.NUMBERS[last]}.",
    )
    return Exchange(question, ", ".join(str(number) for number in range(1, last + 1)) + ".")


def shape(rng: Random) -> Exchange:
    """Say how many sides a shape has."""
    name = rng.choice(sorted(facts.SIDES))
    return Exchange(
        asked(rng, f"How many sides does a {name} have?", f"How many sides has a {name}?"),
        f"A {name} has {facts.SIDES[name]} sides.",
    )
