"""The generated text: deterministic, split in two, and well formed."""

from __future__ import annotations

import re
from random import Random

import pytest

from training.octavo_tiny import facts, unknowns
from training.octavo_tiny.chats import introduced_name, make_chat
from training.octavo_tiny.concepts import CONCEPTS
from training.octavo_tiny.corpus import (
    EARLY_WEIGHTS,
    END_OF_TEXT,
    HELD_OUT_START,
    KINDS,
    LATE_WEIGHTS,
    MESSAGE_END,
    MESSAGE_START,
    Document,
    make_document,
    make_documents,
)
from training.octavo_tiny.fact_topics import arithmetic, hardware
from training.octavo_tiny.lexicon import ANIMALS, make_character
from training.octavo_tiny.poems import make_poem
from training.octavo_tiny.stories import PLOTS, make_story
from training.octavo_tiny.talk_topics import introduction, recall_name


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return make_documents(seed=3, first=0, count=600)


def visible_texts(document: Document) -> list[str]:
    """Return what a reader would see: the text itself, or each message of a conversation."""
    if document.kind == "chat":
        return re.findall(r"<\|im_start\|>\w+\n(.*?)<\|im_end\|>\n", document.text, flags=re.DOTALL)
    return [document.text.removesuffix(END_OF_TEXT)]


def test_the_seed_and_the_number_decide_a_document() -> None:
    assert make_documents(5, 40, 20) == make_documents(5, 40, 20) != make_documents(6, 40, 20)
    assert make_document(5, 47) == make_documents(5, 40, 20)[7]


def test_held_out_stories_do_not_occur_in_the_training_text() -> None:
    trained = {document.text for document in make_documents(0, 0, 1500, "story")}
    held_out = [document.text for document in make_documents(0, HELD_OUT_START, 300, "story")]
    assert not trained.intersection(held_out)


def test_every_kind_of_document_occurs(documents: list[Document]) -> None:
    assert {document.kind for document in documents} == set(KINDS)


def test_later_text_has_fewer_stories_than_early_text() -> None:
    early, late = (
        sum(make_document(0, number, weights=weights).kind == "story" for number in range(400))
        for weights in (EARLY_WEIGHTS, LATE_WEIGHTS)
    )
    assert 0 < late < early / 2


def test_a_conversation_alternates_and_ends_with_the_assistant() -> None:
    for seed in range(100):
        roles = [message["role"] for message in make_chat(Random(seed))]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


def test_documents_are_well_formed(documents: list[Document]) -> None:
    for document in documents:
        text = document.text
        assert text.index(END_OF_TEXT) == len(text) - len(END_OF_TEXT)
        assert not re.search(r"[{}]|\bNone\b|  ", text), "a slot of a template is left unfilled"
        if document.kind == "chat":
            assert text.count(MESSAGE_START) == text.count(MESSAGE_END) >= 2
            assert text.endswith(f"{MESSAGE_END}\n{END_OF_TEXT}")
        else:
            assert text.removesuffix(END_OF_TEXT)[-1] in '.!?"', text
        if document.kind == "story":
            assert not re.search(r"(?<=[.!?] )[a-z]", text), "a sentence begins with a small letter"
        for shown in visible_texts(document):
            assert not re.search(r"\b[Aa] [aeio]\w+|\b[Aa]n [bcdfghjklmnpqrstvwxyz]\w+", shown), shown
            assert [each for each in shown.split("\n\n") if each.count('"') % 2] == []


@pytest.mark.parametrize("kind", [*ANIMALS[:6], "girl", "boy"])
def test_a_story_that_was_asked_for_is_about_the_right_hero(kind: str) -> None:
    for seed in range(10):
        assert f" {kind}" in make_story(Random(seed), kind).split("\n\n")[0]


def test_a_child_has_the_pronouns_of_its_kind() -> None:
    for seed in range(30):
        assert make_character(Random(seed), "girl").he == "she"
        assert make_character(Random(seed), "boy").himself == "himself"


def test_hero_and_friend_never_share_a_name() -> None:
    for seed in range(200):
        rng = Random(seed)
        hero = make_character(rng)
        assert make_character(rng, unlike=hero).name != hero.name


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.__name__)
def test_every_plot_tells_at_least_six_sentences(plot) -> None:  # type: ignore[no-untyped-def]
    rng = Random(1)
    hero = make_character(rng)
    sentences = plot(rng, hero, make_character(rng, unlike=hero), "park")
    assert len(sentences) >= 6
    assert any(hero.name in sentence for sentence in sentences)


def test_the_sums_are_right() -> None:
    operations = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    checked = 0
    for seed in range(400):
        exchange = arithmetic(Random(seed))
        question = re.search(r"(\d+) ([-+*]) (\d+)", exchange.question)
        if question:
            first, sign, second = question.groups()
            expected = operations[sign](int(first), int(second))
            assert int(re.findall(r"\d+", exchange.answer)[-1]) == expected, exchange
            checked += 1
    assert checked > 100


def test_poems_have_four_lines_and_belong_to_their_subject() -> None:
    for seed in range(20):
        subject, text = make_poem(Random(seed))
        assert subject
        assert len(text.split("\n")) == 4


def test_opposites_agree_with_each_other_and_unknown_capitals_are_unknown() -> None:
    # words with two meanings have two opposites, so only one of the pair can point back
    ambiguous = {"old", "short", "new", "light"}
    for word, opposite in facts.OPPOSITES.items():
        if opposite in facts.OPPOSITES and not {word, opposite} & ambiguous:
            assert facts.OPPOSITES[opposite] == word, (word, opposite)
    assert not set(facts.CAPITALS).intersection(unknowns.COUNTRIES_WITHOUT_CAPITAL)


def test_every_concept_says_what_it_is_in_whole_sentences() -> None:
    for concept in CONCEPTS:
        assert concept.names
        assert all(sentence.endswith((".", "!")) for sentence in concept.lead + concept.more)


def test_nothing_says_that_octavo_uses_a_gpu() -> None:
    octavo = next(concept for concept in CONCEPTS if concept.names[0] == "octavo")
    said = [*octavo.lead, *octavo.more, *{hardware(Random(seed)).answer for seed in range(100)}]
    about_gpus = [sentence for text in said for sentence in re.split(r"(?<=\.) ", text) if "GPU" in sentence]
    assert about_gpus
    assert [sentence for sentence in about_gpus if not re.search(r"needs no GPU|does not use a GPU", sentence)] == []


def test_the_users_name_is_recalled_only_when_it_was_told() -> None:
    told = introduction(Random(4))
    assert told.user_name is not None
    assert told.user_name in recall_name(Random(1), introduced_name([told])).answer
    assert introduced_name([]) is None
    assert "not" in recall_name(Random(1), None).answer
