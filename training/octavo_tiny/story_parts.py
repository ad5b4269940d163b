"""Sentences that every story shares: the opening, meeting a friend, an offer of help, thanks, the ending."""

from random import Random

from training.octavo_tiny import lexicon
from training.octavo_tiny.lexicon import Character, capital


def opening(rng: Random, hero: Character, place: str, where: str) -> list[str]:
    """Return the sentences that introduce the hero and the place."""
    his, he = hero.his, hero.he
    start = rng.choice(
        (
            "Once upon a time, there was {a} who lived {where}.",
            "Once upon a time, {where}, there lived {a}.",
            "There once was {a} who lived {where}.",
            "Long ago, {a} lived {where}.",
            "One day, {a} went for a walk {where}.",
            "One sunny morning, {a} woke up early {where}.",
            "Once there was {a}.",
            "In a small house {where} lived {a}.",
            "Once upon a time there was {a}.",
        )
    ).format(a=hero.introduction, where=where)
    weather = rng.choice(
        (
            "The sun was warm and the sky was blue.",
            "It was a bright and sunny day.",
            "The birds were singing.",
            "A soft wind was blowing.",
            "It was a cold and windy day.",
            "The air smelled of flowers.",
            "White clouds moved slowly across the sky.",
            "It had rained all night, and the ground was wet.",
        )
    )
    likes = rng.choice(
        (
            "{N} loved to play outside.",
            "{N} liked to sing all day long.",
            "Every day, {he} played near {his} home.",
            "{N} was always ready to help.",
            "{N} liked to ask many questions.",
            "Everybody liked {N}.",
            "{N} loved {his} family very much.",
            "{N} had a big smile and a warm heart.",
            "{N} liked to look at the clouds and dream.",
            "More than anything, {N} loved a good adventure.",
        )
    ).format(N=hero.name, he=he, his=his)
    extra = [s for s in (likes, weather) if rng.random() < 0.55]
    rng.shuffle(extra)
    return [start, *extra]


def meeting(rng: Random, hero: Character, friend: Character) -> str:
    """Return a sentence in which the hero meets the friend."""
    return rng.choice(
        (
            f"Then {hero.he} met {friend.introduction}.",
            f"On the way, {hero.name} met {friend.introduction}.",
            f"Just then, {friend.introduction} came along.",
            f"{hero.name} had a friend, {friend.introduction}.",
            f"Soon {hero.he} saw {friend.introduction}.",
        )
    )


def question_and_reply(rng: Random, friend: Character, hero: Character, trouble: str) -> list[str]:
    """Return the friend's question about the trouble and the hero's reply, which is a clause in the first person."""
    asked = rng.choice(
        (
            f'"What is wrong, {hero.name}?" asked {friend.name}.',
            f'{friend.name} asked, "Why are you so sad?"',
            f'"Why do you look so sad?" {friend.name} asked.',
            f'"Hello, {hero.name}! Can I help you?" said {friend.name}.',
        )
    )
    said = rng.choice(
        (
            f'"{capital(trouble)}," said {hero.name}.',
            f'{hero.name} answered, "{capital(trouble)}."',
            f'"Oh, {friend.name}, {trouble}," {hero.he} said.',
        )
    )
    return [asked, said]


def offer(rng: Random, friend: Character) -> str:
    """Return a sentence in which the friend offers help."""
    return rng.choice(
        (
            f'"Do not worry. I will help you," said {friend.name}.',
            f'"We can do it together," {friend.name} said with a smile.',
            f'{friend.name} thought for a moment and said, "I have an idea!"',
            f'"Let us try together!" said {friend.name}.',
            f'"I know what to do," said {friend.name}.',
        )
    )


def thanks(rng: Random, hero: Character, friend: Character) -> str:
    """Return a sentence in which the hero thanks the friend."""
    return rng.choice(
        (
            f'"Thank you, {friend.name}!" said {hero.name}.',
            f'{hero.name} gave {friend.name} a big hug and said, "Thank you so much!"',
            f'"You are a true friend," said {hero.name}.',
            f'"Thank you for helping me," {hero.name} said happily.',
            f"{hero.name} thanked {friend.name} and smiled.",
        )
    )


def ending(rng: Random, hero: Character, friend: Character | None) -> list[str]:
    """Return the closing sentences of a story."""
    he, his, name = hero.he, hero.his, hero.name
    if friend is not None and rng.random() < 0.6:
        other = friend.name
        return [
            rng.choice(
                (
                    f"From that day on, {name} and {other} were the best of friends.",
                    f"{name} and {other} played together until the sun went down.",
                    f"After that, {name} and {other} helped each other every day.",
                    f"{name} and {other} laughed and danced all the way home.",
                    f"And so {name} and {other} became very good friends.",
                    f"{name} knew that with a friend like {other}, everything is easier.",
                )
            )
        ]
    close = rng.choice(
        (
            f"{name} was very happy.",
            f"{name} went home with a happy heart.",
            f"That night, {name} slept well and dreamed of new adventures.",
            f"{capital(he)} smiled and went to sleep.",
            f"{name} was proud of {hero.himself}.",
            f"And {name} lived happily ever after.",
            f"It was the best day of {his} life.",
            f"{name} never forgot that day.",
        )
    )
    moral = rng.choice(
        (
            f"{name} learned that it is good to help others.",
            f"{name} learned that sharing makes everybody happy.",
            f"{name} learned that it is important to be brave.",
            f"{capital(he)} learned that it is always good to try again.",
            f"{capital(he)} knew that kind words can change a day.",
            f"{name} learned to listen to {his} friends.",
        )
    )
    return [close] if rng.random() < 0.6 else [moral, close] if rng.random() < 0.5 else [moral]


def relative(rng: Random) -> str:
    """Draw a relative, such as `grandmother`."""
    return rng.choice(lexicon.RELATIVES)
