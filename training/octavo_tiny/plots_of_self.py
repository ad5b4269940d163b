"""Plots about what the hero does: loses something, learns, is afraid, plants, builds, cooks.

Each plot tells the middle of a story and returns its sentences; it takes the hero, a friend and the name of the place.
"""

from random import Random

from training.octavo_tiny import lexicon
from training.octavo_tiny.lexicon import Character, capital
from training.octavo_tiny.story_parts import meeting, offer, question_and_reply, relative, thanks


def lost_thing(rng: Random, hero: Character, friend: Character, place: str) -> list[str]:
    """The hero loses something dear and finds it again with help."""
    he, him, his, name = hero.he, hero.him, hero.his, hero.name
    colour, thing = rng.choice(lexicon.COLOURS), rng.choice(lexicon.TOYS)
    a_thing = f"{lexicon.article(colour)} {colour} {thing}"
    first, second, third = rng.sample(lexicon.HIDING_PLACES, 3)
    story = [
        rng.choice((f"{name} had {a_thing}.", f"{capital(his)} {relative(rng)} had given {him} {a_thing}.")),
        rng.choice(
            (
                f"{capital(he)} took it everywhere.",
                f"{name} loved the {thing} very much.",
                f"It was {his} favorite thing.",
            )
        ),
        rng.choice(
            (
                f"One day, the {thing} was gone.",
                f"But one morning, {he} could not find the {thing}.",
                f"One day, {name} lost the {thing}.",
            )
        ),
        rng.choice(
            (f"{name} was very sad.", f"{name} began to cry.", f"{capital(he)} felt sad and did not know what to do.")
        ),
        f"{capital(he)} looked {first}, but the {thing} was not there.",
    ]
    story.append(meeting(rng, hero, friend))
    story += question_and_reply(
        rng,
        friend,
        hero,
        rng.choice((f"I lost my {thing}", f"I cannot find my {colour} {thing}", f"my {thing} is gone")),
    )
    story.append(offer(rng, friend))
    if rng.random() < 0.6:
        story.append(rng.choice((f"They looked {second}, but they found nothing.", f"First they looked {second}.")))
    story.append(
        rng.choice(
            (
                f"At last, they found the {colour} {thing} {third}!",
                f"Then {friend.name} saw something {colour} {third}. It was the {thing}!",
            )
        )
    )
    story.append(thanks(rng, hero, friend))
    return story


def new_skill(rng: Random, hero: Character, friend: Character, place: str) -> list[str]:
    """The hero cannot do something, practises and succeeds."""
    he, his, name = hero.he, hero.his, hero.name
    skill, doing = rng.choice(lexicon.SKILLS)
    return [
        rng.choice(
            (
                f"{name} wanted to learn to {skill}.",
                f"{name} wished {he} could {skill}.",
                f"All {his} friends could {skill}, but {name} could not.",
            )
        ),
        rng.choice(
            (
                f"{capital(he)} tried once, but it was too hard.",
                f"{capital(he)} tried and tried, but {he} could not do it.",
                f"The first time {he} tried, it did not work at all.",
            )
        ),
        rng.choice(
            (
                f'"I will never learn it," {he} said.',
                f'"It is too hard for me," said {name}.',
                f"{name} wanted to give up.",
            )
        ),
        meeting(rng, hero, friend),
        rng.choice(
            (
                f'"I can teach you," said {friend.name}.',
                f'"{capital(doing)} takes time," said {friend.name}. "Try a little every day."',
                f'"Do not give up!" said {friend.name}. "I will show you."',
            )
        ),
        rng.choice(
            (
                f"So {name} tried again the next day, and the day after that.",
                f"They practiced {doing} every morning.",
                f"{name} listened and tried again, slowly and with care.",
            )
        ),
        rng.choice(
            (
                f"After a week, {name} could {skill} a little.",
                "Day by day, it became easier.",
                f"Each time, {he} got a little better.",
            )
        ),
        rng.choice(
            (
                f"One day, {name} could {skill} as well as anybody!",
                f'"Look, I can {skill}!" {he} shouted.',
                f"At last, {name} could {skill}, and everybody clapped.",
            )
        ),
    ]


def afraid_of_the_dark(rng: Random, hero: Character, friend: Character, place: str) -> list[str]:
    """The hero is afraid at night and learns that there is no reason to be."""
    he, him, his, name = hero.he, hero.him, hero.his, hero.name
    noise, source = rng.choice(
        (
            ("tap, tap, tap", "a branch that knocked on the window"),
            ("woo, woo", "the wind in the trees"),
            ("scratch, scratch", "a tiny mouse that was looking for crumbs"),
            ("drip, drip, drip", "the rain that fell from the roof"),
            ("creak, creak", "the old door that moved in the wind"),
        )
    )
    parent = relative(rng)
    return [
        rng.choice(
            (
                f"{name} was afraid of the dark.",
                f"But at night, {name} was always afraid.",
                f"There was only one thing {name} did not like: the dark.",
            )
        ),
        rng.choice((f"One night, {he} heard a sound.", f"One night, {he} could not sleep because of a sound."))
        + f' "{capital(noise)}!"',
        rng.choice(
            (
                f"{name} hid under {his} blanket.",
                f"{capital(his)} heart beat very fast.",
                f'"What is that?" {he} whispered.',
            )
        ),
        rng.choice(
            (f"{capital(he)} called {his} {parent}.", f"{capital(his)} {parent} came into the room with a small lamp.")
        ),
        rng.choice(
            (
                f'"Let us look together," said {his} {parent}.',
                f'"There is nothing to fear," said {his} {parent}. "Come and see."',
            )
        ),
        rng.choice(("They walked slowly through the dark and looked.", "They held hands and followed the sound.")),
        rng.choice((f"It was only {source}!", f"And what did they find? It was just {source}.")),
        rng.choice(
            (
                f"{name} laughed and was not afraid any more.",
                f"{name} felt much better and laughed.",
                f'"How silly of me!" said {name}.',
            )
        ),
        rng.choice(
            (
                f"Then {he} looked up and saw the bright stars.",
                f"{capital(his)} {parent} gave {him} a kiss and said good night.",
            )
        ),
    ]


def growing_plant(rng: Random, hero: Character, friend: Character, place: str) -> list[str]:
    """The hero plants a seed and waits for it to grow."""
    he, his, name = hero.he, hero.his, hero.name
    plant = rng.choice(lexicon.PLANTS)
    return [
        rng.choice(
            (
                f"One day, {name} found a small seed.",
                f"{capital(his)} {relative(rng)} gave {hero.him} a tiny seed.",
                f"In spring, {name} got a seed as a present.",
            )
        ),
        rng.choice(
            (
                f"{capital(he)} put the seed in the ground and gave it some water.",
                f"{name} dug a little hole and planted the seed.",
            )
        ),
        rng.choice(
            (
                f"Every day, {he} looked, but there was nothing to see.",
                f"{name} waited one day, and two days, and three days, but nothing happened.",
            )
        ),
        rng.choice((f'"Why does it not grow?" {he} asked.', f'"Maybe it is a bad seed," said {name}.')),
        meeting(rng, hero, friend),
        rng.choice(
            (
                f'"You must be patient," said {friend.name}. "Seeds need water, sun and time."',
                f'"Give it time," said {friend.name}. "Good things grow slowly."',
            )
        ),
        rng.choice(
            (
                f"So {name} watered the seed every morning and waited.",
                f"{name} waited and sang a song to the seed every evening.",
            )
        ),
        rng.choice(
            (
                "Then one morning, there was a little green leaf!",
                "After many days, a small green plant came out of the ground.",
            )
        ),
        rng.choice(
            (f"It grew and grew until it was a beautiful {plant}.", f"By summer, it was the biggest {plant} of all.")
        ),
        rng.choice(
            (
                f'"We did it!" said {name}.',
                f"{name} showed the {plant} to everybody.",
                f'"It was worth the wait," said {name}.',
            )
        ),
    ]


def building(rng: Random, hero: Character, friend: Character, place: str) -> list[str]:
    """Two friends build something; it breaks, and they build it better."""
    he, name, other = hero.he, hero.name, friend.name
    thing = rng.choice(lexicon.BUILDINGS)
    return [
        rng.choice(
            (
                f"{name} wanted to build a {thing}.",
                f'"Today I will build a {thing}," said {name}.',
                f"One day, {name} had an idea. {capital(he)} would build a {thing}.",
            )
        ),
        rng.choice(
            (
                f"{capital(he)} worked all morning, but it was hard to do alone.",
                f"{capital(he)} began at once, but soon {he} was tired.",
            )
        ),
        meeting(rng, hero, friend),
        rng.choice(
            (
                f'"What are you doing?" asked {other}. "I am building a {thing}," said {name}.',
                f'"May I help you?" asked {other}. "Yes, please!" said {name}.',
            )
        ),
        rng.choice(
            ("They worked together and told each other jokes.", f"{name} did the top, and {other} did the bottom.")
        ),
        rng.choice(
            (
                f"But then a strong wind came, and the {thing} broke.",
                f"Suddenly, there was a loud crash, and the {thing} fell apart.",
                f"Then the rain came, and the {thing} was gone.",
            )
        ),
        rng.choice(
            (
                f'"Oh no! All our work!" said {name}.',
                f"{name} wanted to cry.",
                "They looked at each other and were sad.",
            )
        ),
        rng.choice(
            (
                f'"We can build it again, and this time we will make it stronger," said {other}.',
                f'"Now we know how to do it better," said {other}.',
            )
        ),
        rng.choice(("So they started again.", "They took a deep breath and began again.")),
        rng.choice(
            (
                f"The new {thing} was bigger and stronger than the first.",
                f"In the evening, the new {thing} was ready, and it was wonderful.",
            )
        ),
    ]


def cooking(rng: Random, hero: Character, friend: Character, place: str) -> list[str]:
    """The hero cooks; an ingredient is wrong or missing, and help comes."""
    he, his, name, other = hero.he, hero.his, hero.name, friend.name
    meal = rng.choice(lexicon.MEALS)
    missing = rng.choice(("sugar", "flour", "milk", "salt", "butter", "honey"))
    return [
        rng.choice(
            (f"{name} wanted to make {meal} for {his} {relative(rng)}.", f"One day, {name} decided to make {meal}.")
        ),
        rng.choice(
            (
                f"{capital(he)} went into the kitchen and looked around.",
                f"{capital(he)} took a big pot and a long spoon.",
            )
        ),
        rng.choice((f"But there was no {missing} in the house.", f'"Oh no, there is no {missing}!" said {name}.')),
        rng.choice(
            (
                f"So {he} went to {his} friend, {friend.introduction}.",
                f"There was a knock on the door. It was {friend.introduction}.",
            )
        ),
        rng.choice(
            (
                f'"Do you have some {missing}?" asked {name}.',
                f'"I need some {missing}," said {name}. "Can you help me?"',
            )
        ),
        rng.choice(
            (
                f'"Yes, I have a lot of it," said {other}. "You can have some."',
                f'"Of course!" said {other}. "But may I help you cook?"',
            )
        ),
        rng.choice(
            ("They went to the kitchen and cooked together.", f"{name} stirred, and {other} added the {missing}.")
        ),
        rng.choice(("Soon the whole house smelled wonderful.", "They made a big mess, but they had a lot of fun.")),
        rng.choice(
            (
                "In the end, there was enough for everybody.",
                "They tasted it, and it was very good.",
                f'"This is the best I have ever eaten," said {other}.',
            )
        ),
    ]
