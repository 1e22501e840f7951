"""Hand-built models behind the Denoiser's interface: one answers every task by rule, one guesses blindly."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mezzotint.data.tasks.keyed import Keyed
from mezzotint.data.tasks.symbols import alphabet
from mezzotint.data.tasks.vocabulary import Vocabulary
from mezzotint.data.tasks.words import keys, made_up, phone_number
from mezzotint.models.config import ModelConfig
from mezzotint.models.state import State

SURE = 40.0  # logit of the token a rule names, over 0 of all others


@dataclass
class TokenState:
    """All committed tokens (B, S): the most a state could hold."""

    tokens: Tensor


class RuleModel(nn.Module):
    """Keeps every token that was committed and writes what a rule makes of the whole text.

    The rules know the questions of all tasks and nothing of the samples. Where a rule finds no answer in the text, and
    always when `blind`, a random answer of the right form is written.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, block_length: int = 16, symbols: int = 0, blind: bool = False
    ) -> None:
        super().__init__()
        self.vocabulary, self.blind = vocabulary, blind
        self.config = ModelConfig(
            pattern="M",
            vocab_size=vocabulary.size,
            d_model=64,
            d_ff=1,
            block_length=block_length,
            chunk_length=block_length,
            mask_token_id=vocabulary.mask_id,
            eos_token_id=vocabulary.eos_id,
            pad_token_id=vocabulary.pad_id,
        )
        self.embed = nn.Embedding(1, 1)
        self.signs = alphabet(vocabulary, symbols, task="rules")
        self.passes = Counter()  # type: ignore[var-annotated]
        self._answers: dict[str, list[str]] = {}

    def start(self, batch: int, max_length: int, dtype=None, device=None) -> State:
        size = self.config.block_length
        room = -(-max_length // size) * size
        tokens = torch.full((batch, room), -1, dtype=torch.int64)
        return State((TokenState(tokens),), torch.zeros(batch, dtype=torch.long), room, size)  # type: ignore[arg-type]

    def commit(self, clean: Tensor, state: State, blocks: Tensor | None = None) -> State:
        self.passes["commit"] += 1
        size = self.config.block_length
        assert clean.shape[1] % size == 0
        count = torch.full((len(clean),), clean.shape[1]) if blocks is None else blocks * size
        for row, (at, new) in enumerate(zip(state.length.tolist(), count.tolist())):
            assert at + new <= state.max_length
            assert not (clean[row, :new] == self.config.mask_token_id).any(), "a mask was committed"
            state.layers[0].tokens[row, at : at + new] = clean[row, :new]  # type: ignore[union-attr]
        return State(state.layers, state.length + count, state.max_length, size)

    def denoise(self, canvas: Tensor, state: State, levels: Tensor | None = None) -> Tensor:
        self.passes["denoise"] += 1
        logits = torch.zeros(*canvas.shape, self.config.vocab_size)
        committed = state.layers[0].tokens  # type: ignore[union-attr]
        for row, length in enumerate(state.length.tolist()):
            text = committed[row, :length].tolist() + canvas[row].tolist()
            ids = torch.tensor(self.complete(text)[length:])
            logits[row].scatter_(1, ids[:, None], SURE)
        logits[..., [self.config.mask_token_id, self.config.pad_token_id]] = -torch.inf
        return logits

    def advance(self, clean: Tensor, canvas: Tensor, state: State, blocks: Tensor | None = None):
        state = self.commit(clean, state, blocks)
        return self.denoise(canvas, state), state

    # -- the rules -----------------------------------------------------------------------------------------------

    def complete(self, text: list[int]) -> list[int]:
        """`text` with every mask filled; behind the answer stands <eos>."""
        known = text[: text.index(self.config.mask_token_id)] if self.config.mask_token_id in text else text
        return self._complete_words(text, known) if self._is_words(known) else self._complete_symbols(text)

    def _is_words(self, known: list[int]) -> bool:
        return self.vocabulary.tokenizer is not None and self.vocabulary.decode(known[:200]).startswith(BEGINNINGS)

    def _complete_symbols(self, text: list[int]) -> list[int]:
        mask, eos = self.config.mask_token_id, self.config.eos_token_id
        if self.signs.marker in text:
            first = text.index(self.signs.marker)
            last = len(text) - 1 - text[::-1].index(self.signs.marker)
            count = self.copied
            found = text[first + 1 : first + 1 + count] if first < last and not self.blind else []
            if not found:
                letters = [*self.signs.keys.tolist(), *self.signs.values.tolist()]
                found = [self._random(text[:last]).choice(letters) for _ in range(count)]
            answer = [*found, *[eos] * len(text)]
            return [answer[place - last - 1] if token == mask else token for place, token in enumerate(text)]
        pairs: dict[int, int] = {}
        own = set(self.signs.keys.tolist())
        for token, after in itertools.pairwise(text):
            if token in own and after != mask:
                pairs.setdefault(token, after)
        values = set(self.signs.values.tolist())
        out = list(text)
        for place, token in enumerate(text):
            if token == mask:
                before = text[place - 1]
                value = pairs.get(before, -1)
                if before in own and (self.blind or value not in values):
                    value = self._random([*text[:place], place]).choice(sorted(values))
                out[place] = value if before in own else eos
        return out

    copied = 16  # symbols that `copy` asks for

    def _complete_words(self, text: list[int], known: list[int]) -> list[int]:
        words = self.vocabulary
        string = words.decode(known)
        end = max(match.end() for pattern in QUESTIONS for match in re.finditer(pattern, string))
        prompt, rest = string[:end], string[end:]
        if prompt not in self._answers:
            answers = None if self.blind else answer(prompt)
            self._answers = {prompt: answers or guess(prompt, self._random([len(prompt), *known[-40:], *known[:99]]))}
        target: list[int] = []
        for number, word in enumerate(self._answers[prompt]):
            target += [*(words.encode(",") if number else ()), *words.encode(f" {word}")]
        target += words.encode(".")
        written = next((n for n in range(len(target) + 1) if words.decode(target[:n]) == rest), len(target))
        target = target[written:] + [self.config.eos_token_id] * len(text)
        first = len(known)
        mask = self.config.mask_token_id
        return [target[place - first] if token == mask else token for place, token in enumerate(text)]

    def _random(self, key: list[int]) -> random.Random:
        return random.Random(hash(tuple(key)))


BEGINNINGS = ("There is an", "A special", "Some special", "This is a phone", "Some lines", "Below is", "Read the coded")
# how every question ends, in the last line: what stands behind is the answer
QUESTIONS = (
    r"The pass key is(?=[^\n]*\Z)",
    r" The special magic [a-z]+ for [^?\n]+ mentioned in the provided text (?:is|are)(?=[^\n]*\Z)",
    r"The number of [A-Z][a-z]+ [A-Z][a-z]+ is(?=[^\n]*\Z)",
    r"The variables that hold \d+ are(?=[^\n]*\Z)",
    r"The \d+ most frequent words are(?=[^\n]*\Z)",
)


def answer(prompt: str) -> list[str] | None:
    """The answers to the question at the end of `prompt`, read from it; None where it does not hold them."""
    body, end, question = prompt.rpartition("\n")
    body += end
    if question.endswith("The pass key is"):
        return _all(re.findall(r"The pass key is (\d+)\. Remember it", body))
    if match := re.search(
        r" The special magic [a-z]+ for ([^?\n]+) mentioned in the provided text (?:is|are)$", question
    ):
        found: list[str] = []
        for key in re.split(r", (?:and )?", match[1]):
            values = re.findall(rf"One of the special magic [a-z]+ for {re.escape(key)} is: ([\w-]+)\.", body)
            if not values:
                return None
            found += values
        return found
    if match := re.fullmatch(r"The number of (.+) is", question):
        return _all(re.findall(rf"{match[1]}: ([\d-]+)\n", body))
    if match := re.search(r"The variables that hold (\d+) are$", question):
        names = re.findall(rf"VAR ([A-Z]+) = {match[1]}\n", body)
        for name, before in re.findall(r"VAR ([A-Z]+) = VAR ([A-Z]+)\n", body):
            if before in names:
                names.append(name)
        return _all(names)
    match = re.search(r"The (\d+) most frequent words are$", question)
    assert match, question
    listed = re.findall(r"\d+\. ([a-z]+)\n", body) or re.findall(r" ([a-z]{6})\b", body.split("\n", 1)[1])
    return [word for word, _ in Counter(listed).most_common(int(match[1]))]


def _all(found: list[str]) -> list[str] | None:
    return found or None


def guess(prompt: str, rng: random.Random) -> list[str]:
    """Random answers of the form the question asks for."""
    draws = Keyed("guess", rng.random())
    question = prompt.rpartition("\n")[2]
    if match := re.search(r"for ([^?\n]+) mentioned in the provided text (?:is|are)$", question):
        kind = "uuids" if re.search(r"is: [0-9a-f]{8}-", prompt) else "numbers"
        made = keys(kind, draws)
        return [next(made) for _ in range(4 if "are" in question.split() else 1)]
    if question.startswith("The number of"):
        return [phone_number(draws)]
    if "variables" in question:
        return ["".join(rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(5)) for _ in range(5)]
    if match := re.search(r"The (\d+) most frequent words are$", question):
        return [made_up(rng.randrange(70**3)) for _ in range(int(match[1]))]
    return [str(rng.randrange(1, 50_001))]
