"""The words that the generated stories are made of: names, animals, places, things and feelings."""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Character:
    """Somebody in a story, with the pronouns that stay with them to its end."""

    name: str
    kind: str
    he: str
    him: str
    his: str

    @property
    def himself(self) -> str:
        """Return the reflexive pronoun."""
        return "himself" if self.he == "he" else "herself"

    @property
    def introduction(self) -> str:
        """Return the character as a story introduces them, such as `a little fox named Ruby`."""
        return f"{article(self.kind)} {self.kind} named {self.name}"


GIRLS = [
    "Lily",
    "Mia",
    "Anna",
    "Sara",
    "Emma",
    "Lucy",
    "Rosa",
    "Nora",
    "Ella",
    "Ivy",
    "Zoe",
    "Maya",
    "Clara",
    "Ruby",
    "Amy",
    "Nina",
    "Lena",
    "Hana",
    "Tara",
    "Julia",
    "Alice",
    "Daisy",
]
BOYS = [
    "Tom",
    "Ben",
    "Max",
    "Sam",
    "Leo",
    "Tim",
    "Jack",
    "Finn",
    "Noah",
    "Oscar",
    "Adam",
    "Paul",
    "Hugo",
    "Luca",
    "Omar",
    "Theo",
    "Felix",
    "Peter",
    "Jonas",
    "Daniel",
    "Toby",
    "Henry",
]
ANIMALS = [
    "fox",
    "rabbit",
    "bear",
    "mouse",
    "cat",
    "dog",
    "owl",
    "hedgehog",
    "frog",
    "squirrel",
    "duck",
    "turtle",
    "lion",
    "elephant",
    "monkey",
    "pig",
    "penguin",
    "sheep",
    "horse",
    "goat",
    "badger",
    "deer",
    "wolf",
    "bird",
    "otter",
    "cow",
    "hen",
    "bee",
    "dragon",
]
SIZES = ("little", "small", "young", "tiny")
NATURES = (
    "kind",
    "brave",
    "shy",
    "curious",
    "clever",
    "cheerful",
    "quiet",
    "gentle",
    "lazy",
    "proud",
    "funny",
    "friendly",
)
COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "pink", "orange", "purple", "golden", "silver")

# a place, with the words that lead into it
OUTDOORS = (
    ("forest", "in"),
    ("park", "in"),
    ("garden", "in"),
    ("meadow", "in"),
    ("village", "in"),
    ("valley", "in"),
    ("beach", "on"),
    ("farm", "on"),
    ("hill", "on"),
    ("river", "by"),
    ("lake", "by"),
    ("pond", "by"),
    ("sea", "by"),
)
TOYS = (
    "ball",
    "kite",
    "doll",
    "drum",
    "boat",
    "bell",
    "book",
    "hat",
    "scarf",
    "lamp",
    "flute",
    "box",
    "basket",
    "key",
    "coin",
    "cup",
)
FOODS = ("apple", "cake", "pie", "cookie", "pear", "carrot", "plum", "sandwich", "banana", "muffin")
MEALS = ("soup", "bread", "pancakes", "a cake", "an apple pie", "cookies", "porridge", "jam")
SKILLS = (
    ("swim", "swimming"),
    ("dance", "dancing"),
    ("sing", "singing"),
    ("paint", "painting"),
    ("climb", "climbing"),
    ("read", "reading"),
    ("whistle", "whistling"),
    ("skate", "skating"),
    ("juggle", "juggling"),
    ("cook", "cooking"),
)
PLANTS = ("sunflower", "rose", "pumpkin", "tulip", "bean", "tomato", "apple tree", "lemon tree")
BUILDINGS = ("tree house", "sand castle", "bridge", "raft", "snowman", "tower", "boat", "kite", "swing", "nest")
HIDING_PLACES = (
    "under the bed",
    "behind the old tree",
    "in the tall grass",
    "next to the well",
    "under a big leaf",
    "behind the door",
    "in the basket",
    "on top of the wall",
    "under the bridge",
    "between two stones",
)
RELATIVES = ("mother", "father", "grandmother", "grandfather", "aunt", "uncle")


def article(word: str) -> str:
    """Return the indefinite article that fits before `word`."""
    return "an" if word[0].lower() in "aeiou" else "a"


def capital(text: str) -> str:
    """Return `text` with its first letter in upper case, skipping an opening quotation mark."""
    first = 1 if text.startswith('"') else 0
    return text[:first] + text[first : first + 1].upper() + text[first + 1 :]


def make_character(
    rng: Random, kind: str | None = None, unlike: Character | None = None, name: str | None = None
) -> Character:
    """Draw a character; `kind` and `name` fix what is known, `unlike` has a name and a kind that are taken."""
    if name is not None:
        is_girl = name in GIRLS
    elif kind in ("girl", "boy"):
        is_girl = kind == "girl"
    else:
        is_girl = rng.random() < 0.5
    if kind is None:
        others = [animal for animal in ANIMALS if unlike is None or not unlike.kind.endswith(f" {animal}")]
        kind = ("girl" if is_girl else "boy") if rng.random() < 0.5 else rng.choice(others)
    if name is None:
        taken = unlike.name if unlike else ""
        name = rng.choice([free for free in (GIRLS if is_girl else BOYS) if free != taken])
    adjective = rng.choice(SIZES + NATURES) if rng.random() < 0.8 else "little"
    he, him, his = ("she", "her", "her") if is_girl else ("he", "him", "his")
    return Character(name, f"{adjective} {kind}", he, him, his)
