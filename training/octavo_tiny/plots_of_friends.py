"""Plots about what two do for each other: share, rescue, race, follow a map, surprise, invite.

Each plot tells the middle of a story and returns its sentences; it takes the hero, a friend and the name of the place.
"""

from random import Random

from training.octavo_tiny import lexicon
from training.octavo_tiny.lexicon import Character, capital
from training.octavo_tiny.story_parts import meeting, relative


def sharing_food(rng: Random, hero: Character, friend: Character, place: str) -> list[str]:
    """The hero has food, somebody is hungry, and sharing makes both glad."""
    he, his, name = hero.he, hero.his, hero.name
    food = rng.choice(lexicon.FOODS)
    a_food = f"{lexicon.article(food)} {food}"
    story = [
        rng.choice(
            (
                f"{name} had {a_food} for lunch.",
                f"{capital(his)} {relative(rng)} gave {hero.him} {a_food}.",
                f"One day, {name} found {a_food}.",
            )
        ),
        rng.choice(
            (
                f"It looked very good, and {name} was hungry.",
                f"The {food} was big and sweet.",
                f'"Yum!" said {name}. "I love this."',
            )
        ),
        meeting(rng, hero, friend),
        rng.choice(
            (
                f'"I am so hungry," said {friend.name}.',
                f"{friend.name} looked at the {food} and said nothing.",
                f'"I have not eaten all day," said {friend.name}.',
            )
        ),
    ]
    if rng.random() < 0.5:
        story.append(
            rng.choice(
                (
                    f"At first, {name} did not want to share.",
                    f"{name} wanted to eat it all.",
                    f'"This is mine," {name} thought.',
                )
            )
        )
        story.append(
            rng.choice(
                (
                    f"But then {he} saw how sad {friend.name} was.",
                    f"But {friend.name} looked so hungry that {name} felt sorry.",
                )
            )
        )
    else:
        story.append(rng.choice((f"{name} thought for a moment.", f"{name} felt sorry for {friend.name}.")))
    story += [
        rng.choice(
            (
                f'"We can share it," said {name}.',
                f'"Here, take half of my {food}," {he} said.',
                f"{name} broke the {food} in two and gave one half to {friend.name}.",
            )
        ),
        rng.choice(
            (
                f"They sat down and ate the {food} together.",
                "They ate it together under a tree.",
                f"The {food} tasted even better with a friend.",
            )
        ),
        rng.choice(
            (
                f'"You are very kind," said {friend.name}.',
                f'"Thank you, {name}!" said {friend.name}.',
                f"{friend.name} smiled for the first time that day.",
            )
        ),
    ]
    return story


def hurt_animal(rng: Random, hero: Character, friend: Character, place: str) -> list[str]:
    """The friend is hurt or stuck, and the hero helps."""
    he, name, other = hero.he, hero.name, friend.name
    trouble, rescue = rng.choice(
        (
            ("had hurt {his} foot", "{N} washed the foot and put a soft leaf around it."),
            ("was stuck in the mud", "{N} found a long stick and pulled with all {hero_his} strength."),
            ("had fallen into a hole", "{N} let down a rope and pulled {him} out."),
            (
                "was lost and could not find the way home",
                "{N} took {him} by the hand, and they looked for the right path.",
            ),
            ("was cold and wet", "{N} gave {him} a warm blanket and some hot tea."),
            ("had a thorn in {his} hand", "{N} was very careful and pulled the thorn out."),
        )
    )
    words = {"his": friend.his, "him": friend.him, "N": name, "hero_his": hero.his}
    return [
        rng.choice(
            (
                f"As {he} walked along, {he} heard a small voice.",
                f"Suddenly, {name} heard somebody cry.",
                f"{name} heard a strange sound and stopped.",
            )
        ),
        rng.choice(
            (
                '"Help! Please help me!" said the voice.',
                '"Is anybody there?" called the voice.',
                '"Oh no, oh no," said the voice.',
            )
        ),
        f"It was {friend.introduction}.",
        rng.choice((f"{other} {trouble}.", f"Poor {other} {trouble}.")).format(**words),
        rng.choice(
            (
                f'"Do not be afraid," said {name}. "I will help you."',
                f'"I will help you," said {name}.',
                f"{name} was a little scared, but {he} wanted to help.",
            )
        ),
        rescue.format(**words),
        rng.choice(
            (
                f"Soon {other} felt much better.",
                f"After a while, {other} could smile again.",
                f"{other} was safe at last.",
            )
        ),
        rng.choice(
            (
                f'"Thank you for saving me," said {other}.',
                f'"You are so brave, {name}!" {other} said.',
                f'"How can I thank you?" asked {other}. "Just be my friend," said {name}.',
            )
        ),
    ]


def race(rng: Random, hero: Character, friend: Character, place: str) -> list[str]:
    """A race in which the hero stops to help and wins something better."""
    he, name, other = hero.he, hero.name, friend.name
    wins = rng.random() < 0.4
    story = [
        rng.choice(("One day, there was a big race.", f"Every year, there was a big race near the {place}.")),
        rng.choice((f"{name} wanted to win more than anything.", f"{name} had practiced for many weeks.")),
        f"{capital(friend.introduction)} wanted to win, too.",
        rng.choice(
            (
                '"Ready, steady, go!" somebody called, and they all ran.',
                f'"I am faster than you," said {other}.',
                "Everybody came to watch.",
            )
        ),
        rng.choice(
            (
                f"{name} ran as fast as {he} could.",
                f"At first, {name} was in front.",
                f"{name} and {other} ran side by side.",
            )
        ),
    ]
    if wins:
        story += [
            rng.choice(
                (
                    f"{other} stopped to rest because {friend.he} felt so sure.",
                    f"{other} looked back, and {friend.he} lost the way.",
                )
            ),
            rng.choice((f"But {name} ran on and on, and did not stop.", f"{name} did not stop, not even once.")),
            rng.choice((f"{name} won the race!", f"{name} was the first to reach the end, and everybody cheered.")),
            rng.choice(
                (
                    f'"Well done," said {other}. "Next time, I will not rest."',
                    f"{other} was a good friend and clapped the loudest.",
                )
            ),
        ]
    else:
        story += [
            rng.choice(
                (f"Then {other} fell down and hurt {friend.his} knee.", f"Suddenly, {other} fell over a stone.")
            ),
            rng.choice(
                (f"{name} could win now, but {he} stopped and went back.", f"{name} stopped at once and turned around.")
            ),
            rng.choice((f'"Are you hurt?" asked {name}.', f'"Take my hand," said {name}.')),
            rng.choice(("They walked to the end of the race together.", "Arm in arm, they came in last.")),
            rng.choice(("Everybody cheered for both of them.", f'"A friend is better than a prize," said {name}.')),
        ]
    return story


def treasure(rng: Random, hero: Character, friend: Character, place: str) -> list[str]:
    """The two follow a map and find something."""
    he, his, name, other = hero.he, hero.his, hero.name, friend.name
    inside = rng.choice(
        (
            "a letter that said: the best treasure is a friend",
            "a box full of shiny shells",
            "an old golden bell",
            "many colorful stones",
            "a small lamp that shone like a star",
            "a book with wonderful pictures",
        )
    )
    first, second = rng.sample(
        (
            "over the hill",
            "across the river",
            "through the forest",
            "past the old mill",
            "along the stony path",
            "around the lake",
        ),
        2,
    )
    return [
        rng.choice(
            (
                f"One day, {name} found an old map.",
                f"One morning, there was a map {rng.choice(lexicon.HIDING_PLACES)}.",
                f"In an old box, {name} found a map.",
            )
        ),
        rng.choice(
            (
                f'"A treasure map!" {he} said.',
                "There was a big red cross on it.",
                f'"I wonder where it leads," said {name}.',
            )
        ),
        rng.choice(
            (
                f"{capital(he)} showed it to {his} friend, {friend.introduction}.",
                f"{capital(he)} ran to {his} friend {other}, {lexicon.article(friend.kind)} {friend.kind}.",
            )
        ),
        rng.choice((f'"Let us go and find it!" said {other}.', f'"What are we waiting for?" asked {other}.')),
        f"They went {first} and {second}.",
        rng.choice(
            (
                "It was a long way, and they were tired.",
                "The way was hard, but they did not give up.",
                "On the way, they sang songs and ate some bread.",
            )
        ),
        rng.choice(
            (
                "At last, they came to a big tree.",
                "At last, they came to a small cave.",
                "At the end of the path, they saw a big stone.",
            )
        ),
        rng.choice((f'"This is the place!" said {name}.', "They began to dig.", f"{other} pointed to the ground.")),
        rng.choice((f"They found {inside}.", f"There it was: {inside}.")),
        rng.choice(
            (
                f'"It is beautiful," said {other}.',
                "They looked at it for a long time.",
                f'"We found it together," said {name}.',
            )
        ),
    ]


def birthday(rng: Random, hero: Character, friend: Character, place: str) -> list[str]:
    """The hero thinks that the birthday is forgotten; there is a surprise."""
    he, him, his, name, other = hero.he, hero.him, hero.his, hero.name, friend.name
    gift = f"{rng.choice(lexicon.COLOURS)} {rng.choice(lexicon.TOYS)}"
    return [
        rng.choice((f"It was {name}'s birthday.", f"Today was a special day. It was {name}'s birthday.")),
        rng.choice(("But nobody said a word about it.", f"But when {he} woke up, nobody was there.")),
        rng.choice((f'"Did they all forget?" {he} thought.', f"{name} felt sad and all alone.")),
        rng.choice(
            (
                f"{capital(he)} went to see {his} friend, {friend.introduction}.",
                f"{capital(he)} went out and met {friend.introduction}, who was an old friend.",
            )
        ),
        rng.choice(
            (f'"I have no time today," said {other}.', f'"Come with me," said {other}. "I want to show you something."')
        ),
        rng.choice((f"Slowly, {name} walked home.", f"Together they walked to the {place}.")),
        rng.choice(
            ('"Surprise!" everybody shouted.', 'Suddenly, the lights went on, and everybody shouted, "Happy birthday!"')
        ),
        rng.choice(
            ("There were a big cake and many balloons.", f"All {his} friends were there, and they sang a song.")
        ),
        rng.choice(
            (
                f"{other} gave {him} {lexicon.article(gift)} {gift}.",
                f"The best present was {lexicon.article(gift)} {gift}.",
            )
        ),
        rng.choice(
            (
                f'"I thought you forgot!" said {name}.',
                f'"Thank you all," said {name} with a smile.',
                f"{name} blew out the candles and made a wish.",
            )
        ),
    ]


def being_kind(rng: Random, hero: Character, friend: Character, place: str) -> list[str]:
    """Somebody new is alone, and the hero invites them."""
    he, name, other = hero.he, hero.name, friend.name
    game = rng.choice(("hide and seek", "ball", "tag", "a guessing game", "a game with stones"))
    return [
        rng.choice((f"One day, {name} saw somebody new near the {place}.", f"Somebody new had moved to the {place}.")),
        f"It was {friend.introduction}.",
        rng.choice(
            (
                f"{other} sat all alone and looked at the ground.",
                f"{other} did not know anybody and felt lonely.",
                f"Nobody played with {other}.",
            )
        ),
        rng.choice((f"{name} went over and sat down.", f"{name} was a little shy, but {he} went over.")),
        rng.choice(
            (
                f'"Hello, my name is {name}. What is your name?" {he} asked.',
                f'"Hi! I am {name}," said {name}. "Who are you?"',
            )
        ),
        rng.choice(
            (f'"My name is {other}," came the quiet answer.', f'"I am {other}," said {other}. "I am new here."')
        ),
        rng.choice(
            (f'"Do you want to play {game} with me?" asked {name}.', f'"Come and play {game} with us!" said {name}.')
        ),
        rng.choice((f"{other}'s eyes lit up.", f"{other} smiled.", f'"Yes, I would love to," said {other}.')),
        rng.choice((f"They played {game} all afternoon.", f"Soon they were laughing and playing {game}.")),
        rng.choice(
            (
                f'"Will you come again tomorrow?" asked {other}. "Of course," said {name}.',
                f'"I am glad that I met you," said {other}.',
            )
        ),
    ]
