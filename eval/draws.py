"""Which tokens of a block are masked in which draw of the likelihood bound, and what each draw weighs."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from dataclasses import dataclass

ENUMERATE_UP_TO = 3  # tokens of a block up to which every subset is taken: the bound is then exact


@dataclass(frozen=True)
class Draw:
    """Tokens `masked` of a block, weighing `weight`; draws of one `stratum` share the number of masked tokens."""

    masked: tuple[int, ...]
    weight: float
    stratum: int


def block_draws(count: int, *, draws: int, key: str) -> list[Draw]:
    """Draws whose weighted sum of cross-entropies over masked tokens bounds -log p of `count` tokens of a block.

    For the linear schedule each token is masked with probability t, t uniform, and the cross-entropy weighs 1/t.
    Let S(M) be the summed cross-entropy over a set M of masked tokens. With n = `count` tokens, given t the number of
    masked tokens is k with probability C(n,k) t^k (1-t)^(n-k), and every set of k tokens is equally likely, so

        bound = integral over t of (1/t) sum_k C(n,k) t^k (1-t)^(n-k) E[S | k] dt
              = sum_k C(n,k) Beta(k, n-k+1) E[S | k]
              = sum_{k=1..n} (1/k) E[S | k]  =  (1/n) sum_{k=1..n} (n/k) E[S | k],

    since Beta(k, n-k+1) = (k-1)! (n-k)! / n!. So t needs no sampling: k is enumerated, with n strata of weight 1/k.
    (The sum is also the mean, over all orders of revealing tokens one at a time, of -log p of the text in that order.)
    n = 1 leaves -log p itself: at blocks of one token the bound is the exact autoregressive likelihood.

    Up to ENUMERATE_UP_TO tokens, and in every stratum that has no more sets than draws, all sets are taken. With
    draws < n, k comes from `draws` equal intervals of (0, n], one uniform point in each, so that every k keeps its
    weight in expectation. `key` names the block: equal keys give equal draws, whatever the model.
    """
    if count <= ENUMERATE_UP_TO:
        return [draw for k in range(1, count + 1) for draw in _all_sets(count, k, weight=1 / k)]
    rng = random.Random(hashlib.sha256(key.encode()).digest())
    if draws < count:
        sizes = [min(count, int((j + rng.random()) * count / draws) + 1) for j in range(draws)]
        return [_random_set(count, k, weight=count / draws / k, rng=rng) for k in sizes]
    repeats, chosen = max(1, round(draws / count)), []
    for k in range(1, count + 1):
        if math.comb(count, k) <= repeats:
            chosen += _all_sets(count, k, weight=1 / k)
        else:
            chosen += [_random_set(count, k, weight=1 / k / repeats, rng=rng) for _ in range(repeats)]
    return chosen


def _all_sets(count: int, k: int, *, weight: float) -> list[Draw]:
    each = weight / math.comb(count, k)
    return [Draw(masked, each, k) for masked in itertools.combinations(range(count), k)]


def _random_set(count: int, k: int, *, weight: float, rng: random.Random) -> Draw:
    return Draw(tuple(sorted(rng.sample(range(count), k))), weight, k)
