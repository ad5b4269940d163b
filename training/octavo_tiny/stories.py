"""A grammar of small stories: a character, a place, a problem, attempts, a resolution and a feeling at the end.

`make_story` draws everything from the generator it is given, so one seed is one story. Each plot is a function that
tells the middle of a story in a few sentences; openings and endings are shared.
"""

from collections.abc import Callable
from itertools import pairwise
from random import Random

from training.octavo_tiny import lexicon, plots_of_friends, plots_of_self
from training.octavo_tiny.lexicon import Character, make_character
from training.octavo_tiny.story_parts import ending, opening

Plot = Callable[[Random, Character, Character, str], list[str]]

PLOTS: tuple[Plot, ...] = (
    plots_of_self.lost_thing,
    plots_of_self.new_skill,
    plots_of_friends.sharing_food,
    plots_of_friends.hurt_animal,
    plots_of_self.afraid_of_the_dark,
    plots_of_self.growing_plant,
    plots_of_friends.race,
    plots_of_self.building,
    plots_of_friends.treasure,
    plots_of_friends.birthday,
    plots_of_self.cooking,
    plots_of_friends.being_kind,
)
PLOTS_WITHOUT_FRIEND = (plots_of_self.afraid_of_the_dark,)


def make_story(rng: Random, kind: str | None = None, num_episodes: int = 1, name: str | None = None) -> str:
    """Write a story of `num_episodes` plots; `kind` fixes what the hero is (`fox`, `girl`, …), `name` who."""
    hero = make_character(rng, kind, name=name)
    place, preposition = rng.choice(lexicon.OUTDOORS)
    where = (
        f"{preposition} {rng.choice(('a', 'the'))} {rng.choice(('big ', 'quiet ', 'green ', 'little ', '', ''))}{place}"
    )
    paragraphs = []
    sentences = opening(rng, hero, place, where)
    for number, plot in enumerate(rng.sample(PLOTS, num_episodes)):
        friend = make_character(rng, unlike=hero)
        if number:
            sentences = [
                rng.choice(
                    (
                        "The next day, something new happened.",
                        "A week later, there was another adventure.",
                        "But that was not the end.",
                    )
                )
            ]
        sentences += plot(rng, hero, friend, place)
        sentences += ending(rng, hero, None if plot in PLOTS_WITHOUT_FRIEND else friend)
        paragraphs += split_paragraphs(rng, sentences)
    return "\n\n".join(paragraphs)


def split_paragraphs(rng: Random, sentences: list[str]) -> list[str]:
    """Join sentences into one to three paragraphs."""
    if rng.random() < 0.55:
        return [" ".join(sentences)]
    cuts = sorted(rng.sample(range(2, len(sentences) - 1), rng.choice((1, 2))))
    bounds = [0, *cuts, len(sentences)]
    return [" ".join(sentences[start:end]) for start, end in pairwise(bounds)]
