"""A made-up parallel corpus: a small English grammar with its German, whose words stand in another order.

because the old dog has seen the house      weil der alte Hund das Haus gesehen hat
today the woman buys a small ship           heute kauft die Frau ein kleines Schiff
"""

from __future__ import annotations

import random
from typing import NamedTuple


class Noun(NamedTuple):
    english: str
    german: str
    gender: str  # m, f, n


class Verb(NamedTuple):
    english: str  # sees
    english_done: str  # seen
    german: str  # sieht
    german_done: str  # gesehen


NOUNS = [
    Noun(*line.split())
    for line in """
        man Mann m
        dog Hund m
        tree Baum m
        king König m
        garden Garten m
        letter Brief m
        teacher Lehrer m
        table Tisch m
        woman Frau f
        cat Katze f
        town Stadt f
        door Tür f
        bridge Brücke f
        flower Blume f
        lamp Lampe f
        school Schule f
        child Kind n
        house Haus n
        book Buch n
        ship Schiff n
        window Fenster n
        picture Bild n
        horse Pferd n
        field Feld n
    """.strip().splitlines()
]
VERBS = [
    Verb(*line.split())
    for line in """
        sees seen sieht gesehen
        buys bought kauft gekauft
        finds found findet gefunden
        paints painted malt gemalt
        seeks sought sucht gesucht
        loves loved liebt geliebt
        takes taken nimmt genommen
        shows shown zeigt gezeigt
    """.strip().splitlines()
]
ADJECTIVES = [
    ("old", "alt"),
    ("small", "klein"),
    ("red", "rot"),
    ("new", "neu"),
    ("beautiful", "schön"),
    ("white", "weiß"),
]
ADVERBS = [("today", "heute"), ("now", "jetzt"), ("often", "oft"), ("here", "hier"), ("sometimes", "manchmal")]
THE = {"m": ("der", "den"), "f": ("die", "die"), "n": ("das", "das")}  # subject, object
A = {"m": ("ein", "einen"), "f": ("eine", "eine"), "n": ("ein", "ein")}
ENDING_THE = {"m": ("e", "en"), "f": ("e", "e"), "n": ("e", "e")}
ENDING_A = {"m": ("er", "en"), "f": ("e", "e"), "n": ("es", "es")}


def make_pairs(count: int, *, seed: int = 0) -> list[tuple[str, str]]:
    """`count` sentences with their translations, the same for the same seed."""
    draw = random.Random(seed)
    return [_sentence(draw) for _ in range(count)]


def _sentence(draw: random.Random) -> tuple[str, str]:
    english, german = _clause(draw, allow_adverb=True)
    if draw.random() < 0.3:  # a second clause, whose verb goes to the end in German
        why, warum = _clause(draw, subordinate=True)
        english, german = f"{english} because {why}", f"{german}, weil {warum}"
    return f"{english}.", f"{german}."


def _clause(draw: random.Random, *, allow_adverb: bool = False, subordinate: bool = False) -> tuple[str, str]:
    subject, subjekt = _noun_phrase(draw, case=0)
    thing, objekt = _noun_phrase(draw, case=1)
    verb = draw.choice(VERBS)
    done = draw.random() < 0.4
    english = f"{subject} {'has ' + verb.english_done if done else verb.english} {thing}"
    finite, rest = ("hat", f" {verb.german_done}") if done else (verb.german, "")
    if subordinate:
        return english, f"{subjekt} {objekt}{rest} {finite}"
    if allow_adverb and draw.random() < 0.5:  # the verb stays second, so the subject moves behind it
        when, wann = draw.choice(ADVERBS)
        return f"{when} {english}", f"{wann} {finite} {subjekt} {objekt}{rest}"
    return english, f"{subjekt} {finite} {objekt}{rest}"


def _noun_phrase(draw: random.Random, *, case: int) -> tuple[str, str]:
    noun = draw.choice(NOUNS)
    definite = draw.random() < 0.6
    article, artikel = ("the", THE[noun.gender][case]) if definite else ("a", A[noun.gender][case])
    if draw.random() < 0.4:
        adjective, adjektiv = draw.choice(ADJECTIVES)
        ending = (ENDING_THE if definite else ENDING_A)[noun.gender][case]
        article = "an" if article == "a" and adjective[0] in "aeiou" else article
        return f"{article} {adjective} {noun.english}", f"{artikel} {adjektiv}{ending} {noun.german}"
    return f"{article} {noun.english}", f"{artikel} {noun.german}"
