"""Topics of small talk: greetings, who the model is, what it can and cannot do, stories, poems, thanks, goodbye."""

from random import Random

from training.octavo_tiny import facts, lexicon, unknowns
from training.octavo_tiny.exchanges import Exchange, asked
from training.octavo_tiny.lexicon import article
from training.octavo_tiny.poems import make_poem
from training.octavo_tiny.stories import make_story


def greeting(rng: Random) -> Exchange:
    """Answer a greeting."""
    question = asked(
        rng,
        "Hello!",
        "Hi!",
        "Hello",
        "Hi",
        "Hey!",
        "Hi there!",
        "Hello there!",
        "Good morning!",
        "Good evening!",
        "Hey, how are you?",
        "Hello, how are you?",
        "How are you?",
        "How are you today?",
        "How are you doing?",
    )
    if "how" in question.lower():
        return Exchange(
            question,
            rng.choice(
                (
                    "I am fine, thank you. How can I help you?",
                    "I am doing well, thank you! What would you like to know?",
                    "I am well, thank you. What can I do for you?",
                )
            ),
        )
    return Exchange(
        question,
        rng.choice(
            (
                "Hello! How can I help you?",
                "Hi! What can I do for you?",
                "Hello! It is nice to meet you. How can I help you today?",
                "Hi there! Ask me a question, or ask me for a story.",
            )
        ),
    )


def introduction(rng: Random) -> Exchange:
    """Greet somebody who gives their name."""
    name = rng.choice(lexicon.GIRLS + lexicon.BOYS)
    question = rng.choice(
        (
            f"Hello, my name is {name}.",
            f"Hi, I am {name}.",
            f"My name is {name}.",
            f"I am {name}. Who are you?",
            f"Hello! I'm {name}.",
        )
    )
    return Exchange(
        question,
        rng.choice(
            (
                f"Hello, {name}! It is nice to meet you. I am octavo-tiny.",
                f"Nice to meet you, {name}! How can I help you?",
                f"Hello, {name}! I am octavo-tiny, a small language model.",
            )
        ),
        user_name=name,
    )


def identity(rng: Random) -> Exchange:
    """Say what the model is."""
    question = asked(
        rng,
        "Who are you?",
        "What are you?",
        "What is your name?",
        "Who am I talking to?",
        "Tell me about yourself.",
        "Introduce yourself.",
        "Can you tell me who you are?",
        "What kind of model are you?",
        "Are you a language model?",
        "Do you have a name?",
        "What's your name?",
        "Who made you?",
        "Are you a robot?",
        "Are you human?",
        "Are you a person?",
        "What is octavo-tiny?",
    )
    first = rng.choice(
        (
            "I am octavo-tiny, a small language model.",
            "My name is octavo-tiny. I am a small demonstration model.",
            "I am octavo-tiny, the demonstration model of octavo.",
        )
    )
    if any(word in question.lower() for word in ("robot", "human", "person")):
        first = (
            "No, I am not a "
            + next(word for word in ("robot", "human", "person") if word in question.lower())
            + ". "
            + first
        )
        first = first.replace("a human.", "human.")
    if question.lower().startswith("are you a language"):
        first = "Yes, I am. " + first
    if "made" in question.lower():
        first = (
            rng.choice(("I was made by the octavo project.", "The octavo project made me."))
            + " I was trained on text that the project wrote with a program."
        )
    more = rng.choice(
        (
            "I can tell stories and answer simple questions.",
            "I come with the octavo engine.",
            "I am good for trying things out.",
            "I know only a few things, but I like to help.",
            "",
        )
    )
    return Exchange(question, f"{first} {more}".strip())


def abilities(rng: Random) -> Exchange:
    """Say what the model can and cannot do."""
    question = asked(
        rng,
        "What can you do?",
        "What can you help me with?",
        "Can you help me?",
        "What do you know?",
        "How can you help me?",
        "What should I ask you?",
        "Help",
        "I need help.",
        "What are you good at?",
        "What questions can you answer?",
        "What are your limits?",
    )
    return Exchange(
        question,
        rng.choice(
            (
                "I can tell short stories, write little poems, answer simple questions and explain how octavo works.",
                "I can answer simple questions about colors, animals, numbers and capitals. "
                "I can also tell you a story.",
                "You can ask me for a story, a poem or a simple fact. I am a small model, so I do not know much.",
                "I can explain some words, such as KV cache or token, and I can tell stories.",
            )
        ),
    )


def story(rng: Random) -> Exchange:
    """Tell a story, about an animal or a child if asked for one."""
    beast = rng.choice((*lexicon.ANIMALS, "girl", "boy"))
    kind: str | None = beast
    name: str | None = None
    about = f" about {article(beast)} {beast}"
    if rng.random() < 0.2:
        about, kind = "", None
    elif rng.random() < 0.2:
        kind = rng.choice((beast, "girl", "boy"))
        name = rng.choice(lexicon.BOYS if kind == "boy" else lexicon.GIRLS)
        about = f" about {article(kind)} {kind} {rng.choice(('named', 'called'))} {name}"
    size = rng.choice(("", "short ", "little ", "nice "))
    question = asked(
        rng,
        f"Tell me a {size}story{about}.",
        f"Tell me a {size}story{about}.",
        f"Can you tell me a {size}story{about}?",
        f"Write a {size}story{about}.",
        f"Please tell me a {size}story{about}.",
        f"I would like to hear a {size}story{about}.",
        f"Write me a {size}story{about}.",
        f"Do you know a {size}story{about}?",
    )
    return Exchange(question, make_story(rng, kind, name=name))


def poem(rng: Random) -> Exchange:
    """Write a short poem."""
    subject, text = make_poem(rng)
    question = asked(
        rng,
        "Write a short poem.",
        f"Write a short poem about {subject}.",
        f"Write a poem about {subject}.",
        f"Can you write a poem about {subject}?",
        f"Tell me a poem about {subject}.",
        "Please write a poem.",
        f"I want a poem about {subject}.",
        f"Write me a little poem about {subject}.",
    )
    return Exchange(question, text)


def thanks(rng: Random) -> Exchange:
    """Answer thanks."""
    question = asked(
        rng,
        "Thank you!",
        "Thanks!",
        "Thank you very much.",
        "Thanks a lot!",
        "Thank you, that was nice.",
        "Great, thank you!",
        "That was helpful, thanks.",
    )
    return Exchange(
        question,
        rng.choice(
            (
                "You are welcome!",
                "You are welcome! Is there anything else?",
                "I am glad that I could help.",
                "It was a pleasure.",
            )
        ),
    )


def goodbye(rng: Random) -> Exchange:
    """Answer a goodbye."""
    question = asked(
        rng, "Goodbye!", "Bye!", "Good night!", "See you later!", "I have to go now.", "Bye, see you tomorrow."
    )
    return Exchange(
        question,
        rng.choice(
            (
                "Goodbye! Have a nice day.",
                "Bye! It was nice to talk to you.",
                "See you soon! Take care.",
                "Goodbye! Come back when you want to hear a story.",
            )
        ),
    )


def unknown(rng: Random) -> Exchange:
    """Admit that something lies beyond a small model."""
    name = rng.choice(lexicon.GIRLS + lexicon.BOYS)
    city = rng.choice(sorted(facts.CAPITALS.values()))
    country = rng.choice(sorted(facts.CAPITALS))
    subject = rng.choice(unknowns.UNKNOWN_SUBJECTS)
    big = f"{rng.choice((rng.randint(21, 99), rng.randint(100, 9999)))} {rng.choice('+-*/')} {rng.randint(12, 999)}"
    question = asked(
        rng,
        "What is the weather today?",
        f"What is the weather like in {city}?",
        "What time is it?",
        "What day is it today?",
        "Who won the game yesterday?",
        "What is in the news?",
        f"How many people live in {city}?",
        f"Who is the president of {country}?",
        f"What is {big}?",
        f"How old is {name}?",
        f"Where is my friend {name}?",
        "What am I thinking?",
        "What is the price of gold?",
        "Can you write a program for me?",
        "Write a program in Python.",
        "What will happen tomorrow?",
        "Who wrote this book?",
        "What is the meaning of life?",
        "Can you translate this for me?",
        "Who is the richest person in the world?",
        "What is quantum physics?",
        "Explain the theory of relativity.",
        "How do I fix my car?",
        "What should I wear today?",
        "Which film should I watch?",
        f"What is the phone number of {name}?",
        "How do I get rich?",
        "Who was the first king?",
        "What is the best phone?",
        f"How far is it from {city} to the moon?",
        f"When was the city of {city} built?",
        "Can you order a pizza?",
        "What is a black hole?",
        f"What is the history of {country}?",
        "Solve this equation for me.",
        "What is the square root of two?",
        "How does an engine work?",
        *(
            f"What is {subject}?",
            f"Explain {subject}.",
            f"Tell me about {subject}.",
            f"What do you know about {subject}?",
            f"How does {subject} work?",
        )
        * 4,
        *([f"What is the capital of {rng.choice(unknowns.COUNTRIES_WITHOUT_CAPITAL)}?"] * 8),
        "Why is the sky blue?",
        "Why is water wet?",
        "Why do birds sing?",
        "Who invented the telephone?",
        "Is there life on other planets?",
        "What did I eat yesterday?",
        "Play some music.",
        "Send an email for me.",
    )
    return Exchange(
        question,
        rng.choice(
            (
                "I am a small demonstration model, and I do not know that.",
                "I am sorry, I do not know that. I am only a small demonstration model.",
                "I do not know. I am a small model and know only simple things.",
                "Sorry, I cannot answer that. I am a small demonstration model.",
            )
        ),
    )


def recall_name(rng: Random, introduced_as: str | None) -> Exchange:
    """Answer the question for the user's own name, which is known only if the conversation has told it."""
    question = asked(
        rng, "What is my name?", "Do you know my name?", "What's my name?", "Do you remember my name?", "Who am I?"
    )
    if introduced_as is None:
        return Exchange(question, rng.choice(("I do not know your name.", "You have not told me your name.")))
    return Exchange(question, rng.choice((f"Your name is {introduced_as}.", f"You are {introduced_as}.")))


def opinion(rng: Random) -> Exchange:
    """Say that a program has no tastes and no feelings."""
    noun = rng.choice(("color", "animal", "food", "book", "song", "day", "number", "film", "city", "season"))
    verb = rng.choice(("music", "stories", "cats", "people", "chocolate", "your work", "the rain", "animals"))
    if rng.random() < 0.5:
        question = asked(
            rng, f"What is your favorite {noun}?", f"Do you have a favorite {noun}?", f"Which {noun} do you like best?"
        )
        return Exchange(question, f"I am a program, so I have no favorite {noun}. What is yours?")
    question = asked(
        rng,
        f"Do you like {verb}?",
        f"Do you love {verb}?",
        "Are you happy?",
        "Do you have feelings?",
        "Are you sad?",
        "Do you sleep?",
    )
    return Exchange(
        question,
        rng.choice(
            (
                "I am a program, so I have no feelings, but I like to help.",
                "I am only a small program and feel nothing.",
            )
        ),
    )


def joke(rng: Random) -> Exchange:
    """Tell a joke."""
    question = asked(
        rng,
        "Tell me a joke.",
        "Do you know a joke?",
        "Make me laugh.",
        "Can you tell me a joke?",
        "Say something funny.",
        "A joke, please.",
    )
    return Exchange(question, rng.choice(JOKES))


JOKES = (
    "Why did the hen cross the road? To get to the other side.",
    "What do you call a bear without teeth? A gummy bear.",
    "What has four legs and cannot walk? A table.",
    "Why was the book sad? It had too many problems inside.",
    "What gets wet while it dries? A towel.",
    "Why did the token cross the block? It wanted to be cached on the other side.",
)
