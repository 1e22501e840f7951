"""Which tokens of a block are masked in which draw of the likelihood bound, and what each draw weighs."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from dataclasses import dataclass
from functools import lru_cache

DESIGN = "balanced-1"  # part of a results row's identity: another way to draw masks gets another name
ENUMERATE_UP_TO = 3  # tokens of a block up to which every set is taken: the bound is then exact
COMMON = -1  # the replicate of draws that are the same in all: they carry no Monte-Carlo error


@dataclass(frozen=True)
class Draw:
    """Tokens `masked` of a block, weighing `weight`; `stratum` is their number.

    Draws of one `replicate` are chosen together, independently of those of another.
    """

    masked: tuple[int, ...]
    weight: float
    stratum: int
    replicate: int


@dataclass(frozen=True)
class Stratum:
    """Numbers of masked tokens `low` to `high`, among which each of `draws` draws takes one uniformly."""

    low: int
    high: int
    draws: int

    @property
    def width(self) -> int:
        return self.high - self.low + 1


def block_draws(count: int, *, draws: int, key: str, replicates: int = 1) -> list[Draw]:
    """Draws whose weighted sum of cross-entropies over masked tokens bounds -log p of `count` tokens of a block.

    For the linear schedule each token is masked with probability t, t uniform, and the cross-entropy weighs 1/t.
    Let S(M) be the summed cross-entropy over a set M of masked tokens. With n = `count` tokens, given t the number of
    masked tokens is k with probability C(n,k) t^k (1-t)^(n-k), and every set of k tokens is equally likely, so

        bound = integral over t of (1/t) sum_k C(n,k) t^k (1-t)^(n-k) E[S | k] dt
              = sum_k C(n,k) Beta(k, n-k+1) E[S | k]
              = sum_{k=1..n} (1/k) E[S | k],

    since Beta(k, n-k+1) = (k-1)! (n-k)! / n!. So t needs no sampling: k is enumerated, each k with weight 1/k. (The sum
    is also the mean, over all orders of revealing tokens one at a time, of -log p of the text in that order.)
    n = 1 leaves -log p itself: at blocks of one token the bound is the exact autoregressive likelihood.

    Which sets: the one of all n tokens exactly once, since it has no variance; for the other k, `allocate` says how
    many draws each gets. Within a replicate the sets are *balanced* (`_balanced`): together they give every token
    nearly the same weight, so that hard and easy tokens, most of the variance of independent sets, cancel. Each set
    for itself stays uniform among those of its size, so the estimate is unbiased whatever the balance.

    `replicates` independent replicates share the draws equally; their spread is the Monte-Carlo error. Up to
    ENUMERATE_UP_TO tokens, and wherever there are no more sets than `draws`, all sets are taken. `key` names the block:
    equal keys give equal draws, whatever the model.
    """
    if count <= ENUMERATE_UP_TO or 2**count - 1 <= draws:
        return [draw for k in range(1, count + 1) for draw in _all_sets(count, k)]
    rng = random.Random(hashlib.sha256(key.encode()).digest())
    if draws == 1:
        k = rng.randint(1, count)
        return [Draw(tuple(sorted(rng.sample(range(count), k))), count / k, k, 0)]
    chosen = [Draw(tuple(range(count)), 1 / count, count, COMMON)]
    strata = allocate(count, max(1, (draws - 1) // replicates))
    for replicate in range(replicates):
        sizes = []
        for stratum in strata:
            for _ in range(stratum.draws):
                k = rng.randint(stratum.low, stratum.high)
                sizes.append((k, stratum.width / stratum.draws / k))
        chosen += [Draw(masked, w / replicates, len(masked), replicate) for masked, w in _balanced(count, sizes, rng)]
    return chosen


def _all_sets(count: int, k: int) -> list[Draw]:
    each = 1 / k / math.comb(count, k)
    return [Draw(masked, each, k, COMMON) for masked in itertools.combinations(range(count), k)]


def _balanced(count: int, sizes: list[tuple[int, float]], rng: random.Random) -> list[tuple[tuple[int, ...], float]]:
    """One set of tokens for each (size, weight): heaviest first, each takes the tokens that carry least so far.

    Ties fall at random, so the law of the whole is the same for every order of the tokens, and each set is uniform.
    """
    carried = [0.0] * count
    chosen = []
    for k, weight in sorted(sizes, key=lambda size: -size[1]):
        ranked = sorted(range(count), key=lambda i: (round(carried[i], 9), rng.random()))
        masked = tuple(sorted(ranked[:k]))
        for i in masked:
            carried[i] += weight
        chosen.append((masked, weight))
    return chosen


def spread(k: int) -> float:
    """Variance of the mean cross-entropy of a balanced set of k masked tokens, up to a factor, as it is allocated for.

    1/k is what sampling k tokens of a population gives; the constant is what all masked tokens share, the luck of which
    tokens stand. Measured on small trained models by eval/studies/bound_error.py; the error is flat in the constant.
    """
    return 1 / k + 0.25


@lru_cache(maxsize=1024)
def allocate(count: int, draws: int) -> tuple[Stratum, ...]:
    """Strata of 1 to count - 1 masked tokens, with `draws` draws in all.

    Draws in proportion to the standard deviation (Neyman 1934): k by k, shares of sqrt(spread(k)) are added up, and
    each time they reach another whole draw the stratum is closed. So few masked tokens get several draws and many
    masked tokens share one.
    """
    deviations = [math.sqrt(spread(k)) for k in range(1, count)]
    share = sum(deviations) / draws
    strata: list[Stratum] = []
    total, closed, low = 0.0, 0, 1
    for k, deviation in enumerate(deviations, start=1):
        total += deviation
        reached = draws if k == count - 1 else math.floor(total / share + 0.5)
        if reached > closed:
            strata.append(Stratum(low, k, reached - closed))
            closed, low = reached, k + 1
    if low < count:  # the last draw was given before the last k
        last = strata.pop()
        strata.append(Stratum(last.low, count - 1, last.draws))
    return tuple(strata)
