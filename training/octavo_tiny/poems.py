"""Short rhymed poems of four lines, put together from couplets that share a subject."""

from random import Random

# subject -> couplets; any two couplets of one subject make a poem
COUPLETS: dict[str, tuple[tuple[str, str], ...]] = {
    "the sun": (
        ("The sun comes up and paints the sky,", "and little birds begin to fly."),
        ("It shines on meadow, hill and tree,", "it shines on you, it shines on me."),
        ("The golden light is warm and bright,", "it stays with us until the night."),
    ),
    "the moon": (
        ("The moon is round, the moon is white,", "it is a lamp that shines at night."),
        ("It looks at me, it looks at you,", "it sees the sea so deep and blue."),
        ("The stars are dancing all around,", "and nobody can hear a sound."),
    ),
    "the rain": (
        ("The rain is falling on the ground,", "I like to listen to the sound."),
        ("It gives the flowers all they need,", "it wakes up every little seed."),
        ("And when the clouds have gone away,", "the children all come out to play."),
    ),
    "a cat": (
        ("My little cat is soft and sweet,", "she walks on very quiet feet."),
        ("She likes to sleep, she likes to play,", "she does it almost every day."),
        ("And when the moon is in the sky,", "she sits and sees the stars go by."),
    ),
    "a dog": (
        ("My dog can run, my dog can bark,", "we play together in the park."),
        ("He brings the ball right back to me,", "then takes a nap beneath a tree."),
        ("He is my friend, so good and true,", "and I am sure he would like you."),
    ),
    "the sea": (
        ("The sea is wide, the sea is deep,", "the waves are singing me to sleep."),
        ("A little boat goes up and down,", "and sails away from our small town."),
        ("The fish are swimming in the blue,", "I wish that I could swim there, too."),
    ),
    "spring": (
        ("The snow has gone, the grass is green,", "the nicest spring I have ever seen."),
        ("The flowers open one by one,", "and turn their faces to the sun."),
        ("The birds come home and start to sing,", "they know a happy song of spring."),
    ),
    "winter": (
        ("The snow is falling soft and slow,", "and makes the quiet garden glow."),
        ("We build a man of snow so tall,", "he wears a hat, he fears no fall."),
        ("Inside, the fire is warm and bright,", "we tell each other tales at night."),
    ),
    "a friend": (
        ("A friend is there on every day,", "when you are sad, when you can play."),
        ("A friend will share, a friend will care,", "a friend is good and kind and fair."),
        ("So take my hand and walk with me,", "and see how happy we can be."),
    ),
    "a tree": (
        ("There stands a tree upon the hill,", "when there is no wind, it stands so still."),
        ("The birds have built a nest up high,", "so close to clouds, so close to sky."),
        ("Its leaves are green, its roots are strong,", "it hears the birds sing all day long."),
    ),
    "octavo": (
        ("The prompts come in, the tokens go,", "octavo keeps a steady flow."),
        ("It puts the keys in blocks so neat,", "a cache that is not hard to beat."),
        ("The batch is full, the work is done,", "it answers each and every one."),
    ),
}


def make_poem(rng: Random) -> tuple[str, str]:
    """Draw a subject and write its poem; return both."""
    subject = rng.choice(sorted(COUPLETS))
    couplets = rng.sample(COUPLETS[subject], 2)
    lines = [line for couplet in couplets for line in couplet]
    return subject, "\n".join(line[:1].upper() + line[1:] for line in lines)
