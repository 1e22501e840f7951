"""Words that tasks are written with: adjective-noun keys, made-up words and names, numbers, identifiers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

from mezzotint.data.errors import InputError
from mezzotint.data.tasks.keyed import Keyed

ADJECTIVES = """
able amber ample angry antique arid autumn awkward azure basic bitter blank bold brave brief bright brisk broad bronze
busy calm careful charming cheap clean clear clever cloudy cold common cool copper coral crimson crisp curious curly damp
dark dear decent deep dense dim distant double dry dull eager early eastern easy elastic elegant empty equal exact fair
faint famous fancy fast final firm flat fluffy fond formal fresh frosty full gentle giant glad golden grand gray green
happy hard harsh heavy hidden hollow honest huge humble icy idle inner iron ivory jolly keen kind large late lazy lean
level light little lively local lonely long loose loud lucky mellow merry mighty mild modern modest narrow native neat
nimble noble noisy northern odd old orange outer pale patient plain polite proud pure quick quiet rapid rare ready regular
rich ripe rough round royal rusty sandy scarlet secret serious shallow sharp shiny short shy silent silver simple sleepy
slim slow small smooth soft solid southern spare steady steep stern still stormy strange strict strong sudden sunny sweet
swift tall tame tender thick thin tidy tiny tough true upper vast velvet violet vivid warm wary weary western wide wild
windy winter wise wooden young
""".split()  # noqa: SIM905 - 200 quoted words are no easier to read

NOUNS = """
acorn actor anchor angle ankle apple arch arrow artist aunt badge baker ball banner barn barrel basin basket bath beach
beam bear bell belt bench berry bird blanket boat bolt book boot bottle bowl box branch bread brick bridge brook broom
brush bucket button cabin cable cake camel camp canal candle canoe canvas card carpet castle cave cellar chain chair chalk
cherry chess chief chimney circle clay cliff clock cloth cloud coast coat coin collar comb cook cord corner cottage cotton
cousin cradle crane cream creek crow crown cup curtain daisy dance deer desert desk dish dock door dove dragon drawer dress
drum duck eagle engine fabric falcon farm feather fence ferry fiddle field finger flag flame flour flower flute forest fork
fountain fox frame frog fruit garden gate glass globe glove goat goose grape grass guest hall hammer harbor harp hat hawk
hedge helmet hill hinge honey hook horn horse hotel hut ink island jacket jar jewel judge jungle kettle key kite knot
ladder lake lamp lantern leaf lemon letter library lily lion lock magnet maple marble market mask meadow melon mill mirror
moon mountain mouse museum nail needle nest noon notebook oak ocean olive onion orchard otter oven owl paddle painter palace
panda paper parade path peach pearl pebble pencil pepper piano pigeon pillow pilot pine pipe planet plate plum pocket poem
pond pony
""".split()  # noqa: SIM905 - 200 quoted words are no easier to read

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
SYLLABLES = len(CONSONANTS) * len(VOWELS)
MADE_UP = SYLLABLES**3  # made-up words of three syllables


def made_up(number: int, syllables: int = 3) -> str:
    """The made-up word of that number, each number another: `badalo`."""
    text = ""
    for _ in range(syllables):
        number, place = divmod(number, SYLLABLES)
        text = CONSONANTS[place // len(VOWELS)] + VOWELS[place % len(VOWELS)] + text
    return text


def made_up_words(draws: Keyed) -> Iterator[str]:
    """Made-up words of three syllables, no two alike."""
    return (made_up(number) for number in draws.distinct(MADE_UP))


def names(draws: Keyed) -> Iterator[str]:
    """First and last names, made up, no two alike: `Bodi Kamolu`."""
    for number in draws.distinct(SYLLABLES**5):
        first, last = divmod(number, MADE_UP)
        yield f"{made_up(first, 2).capitalize()} {made_up(last).capitalize()}"


def keys(kind: str, draws: Keyed) -> Iterator[str]:
    """Keys or values of a needle, no two alike: `words` (adjective-noun), `numbers` (seven digits) or `uuids`."""
    if kind == "words":
        for number in draws.distinct(len(ADJECTIVES) * len(NOUNS)):
            yield f"{ADJECTIVES[number // len(NOUNS)]}-{NOUNS[number % len(NOUNS)]}"
        raise InputError(
            f"a prompt needs more than {len(ADJECTIVES) * len(NOUNS)} keys: take keys=uuids, or shorter ones"
        )
    if kind == "numbers":
        yield from (str(10**6 + number) for number in draws.distinct(9 * 10**6))
    while True:
        high, low = draws.raw(2).tolist()
        yield str(uuid.UUID(int=high << 64 | low, version=4))


KINDS = {"words": len(ADJECTIVES) * len(NOUNS), "numbers": 9 * 10**6, "uuids": 2**122}  # how many there are of each
LONGEST = {
    "words": max(map(len, ADJECTIVES)) + 1 + max(map(len, NOUNS)),
    "numbers": 7,
    "uuids": 36,
}  # characters


def phone_number(draws: Keyed) -> str:
    return f"555-{draws.below(1000):03}-{draws.below(10_000):04}"


def variable_names(draws: Keyed) -> Iterator[str]:
    """Five capital letters, no two alike."""
    for number in draws.distinct(26**5):
        letters = ""
        for _ in range(5):
            number, letter = divmod(number, 26)
            letters += chr(ord("A") + letter)
        yield letters
