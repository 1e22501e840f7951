"""What is kept of a scored text: running sums by position and by share of masks, Monte-Carlo error, ratios with errors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from mezzotint.eval.draws import COMMON, Draw

LEVELS = 10  # bins of the share of masked tokens, over (0, 1]
FIRST_EDGE = 64  # positions below are one bin; above, bins double


@dataclass
class Tally:
    """Running sums over the blocks of any number of documents: all that is kept of a text, whatever its length."""

    nats: float = 0.0
    tokens: int = 0
    blocks: int = 0
    # lower edge of a bin of positions -> [nats, tokens]; by share of masked tokens [nats, tokens]: both sum to the whole
    by_position: dict[int, list[float]] = field(default_factory=dict)
    by_level: list[list[float]] = field(default_factory=lambda: [[0.0, 0.0] for _ in range(LEVELS)])
    _variance: float = 0.0  # of blocks that show their own
    _silent: int = 0  # blocks that do not
    _twins: list[float] = field(default_factory=lambda: [0.0, 0.0])  # number, and sum of a single replicate's variances

    @property
    def error(self) -> float:
        """Monte-Carlo standard error of `nats`, from the spread of replicates; infinite where none was repeated."""
        if self._silent and not self._twins[0]:
            return math.inf
        silent = self._silent * self._twins[1] / self._twins[0] if self._silent else 0.0
        return math.sqrt(self._variance + silent)

    def add(self, draws: list[Draw], nats: Tensor, *, count: int, position: int, twin: bool) -> None:
        """Take in a block of `count` tokens at `position`: the summed cross-entropy (draws,) of each draw's tokens.

        twin: its two replicates are each what other blocks have alone, so it speaks for their error.
        """
        parts = [draw.weight * loss for draw, loss in zip(draws, nats.tolist())]
        value = math.fsum(parts)
        self.nats, self.tokens, self.blocks = self.nats + value, self.tokens + count, self.blocks + 1
        place = self.by_position.setdefault(position_edge(position), [0.0, 0.0])
        place[0], place[1] = place[0] + value, place[1] + count
        for draw, part in zip(draws, parts):
            level = self.by_level[(draw.stratum * LEVELS - 1) // count]
            # a draw stands for weight * stratum of the block's `count` numbers of masked tokens, and so for as many tokens
            level[0], level[1] = level[0] + part, level[1] + draw.weight * draw.stratum
        replicates = sorted({draw.replicate for draw in draws} - {COMMON})
        if replicates == [0]:
            self._silent += 1
        elif replicates:
            halves = [math.fsum(p for draw, p in zip(draws, parts) if draw.replicate == r) for r in replicates]
            variance = (halves[0] - halves[1]) ** 2  # (e1 - e2)^2 / 4 of the two estimates e = 2 * half
            self._variance += variance
            if twin:
                self._twins = [self._twins[0] + 1, self._twins[1] + 2 * variance]

    def values(self) -> dict[str, object]:
        """What a results row keeps."""
        return {
            "nats": self.nats,
            "tokens": self.tokens,
            "monte_carlo_error": self.error if math.isfinite(self.error) else None,
            "by_position": [[edge, *sums] for edge, sums in sorted(self.by_position.items())],
            "by_level": [[i / LEVELS, *sums] for i, sums in enumerate(self.by_level)],
        }


def position_edge(position: int) -> int:
    """Lower edge of the bin of a token position: 0, 64, 128, 256, ..."""
    return 0 if position < FIRST_EDGE else 1 << (position.bit_length() - 1)


@dataclass(frozen=True)
class Bound:
    """A bound over several rows: its value and standard error, the row being the unit of sampling.

    monte_carlo_error: what the draws alone leave open in these very rows, in nats a token; None where it is not known.
    """

    nats_per_token: float
    nats_per_token_error: float
    bits_per_byte: float
    bits_per_byte_error: float
    monte_carlo_error: float | None
    rows: int
    tokens: int
    bytes: int


def summarize(rows: list[dict]) -> Bound:
    """The bound of rows {nats, tokens, bytes, monte_carlo_error}: ratios of sums, standard errors by linearization.

    The error over rows holds the spread of the rows and of the draws together; with one row it is infinite, not zero.
    """
    nats = [float(row["nats"]) for row in rows]
    tokens = sum(int(row["tokens"]) for row in rows)
    per_token = ratio(nats, [float(row["tokens"]) for row in rows])
    per_byte = ratio(nats, [float(row["bytes"]) for row in rows])
    errors = [row.get("monte_carlo_error") for row in rows]  # absent in files of older versions
    squares = [error**2 for error in errors if error is not None]
    known = math.sqrt(math.fsum(squares)) / tokens if len(squares) == len(errors) else None
    bits = 1 / math.log(2)
    return Bound(
        nats_per_token=per_token[0],
        nats_per_token_error=per_token[1],
        bits_per_byte=per_byte[0] * bits,
        bits_per_byte_error=per_byte[1] * bits,
        monte_carlo_error=known,
        rows=len(rows),
        tokens=tokens,
        bytes=sum(int(row["bytes"]) for row in rows),
    )


def by_bin(rows: list[dict], name: str) -> list[tuple[float, float, float]]:
    """(lower edge, nats a token, tokens) of `by_position` or `by_level`, summed over rows; empty bins left out."""
    sums: dict[float, list[float]] = {}
    for row in rows:
        for edge, nats, tokens in row[name]:
            held = sums.setdefault(edge, [0.0, 0.0])
            held[0], held[1] = held[0] + nats, held[1] + tokens
    return [(edge, nats / tokens, tokens) for edge, (nats, tokens) in sorted(sums.items()) if tokens]


def ratio(tops: list[float], bottoms: list[float]) -> tuple[float, float]:
    """sum(tops) / sum(bottoms) and its standard error; infinite where nothing can be said."""
    n, bottom = len(tops), sum(bottoms)
    if bottom == 0:
        return math.inf, math.inf
    value = sum(tops) / bottom
    if n < 2:
        return value, math.inf
    squares = sum((top - value * below) ** 2 for top, below in zip(tops, bottoms))
    return value, math.sqrt(squares * n / (n - 1)) / bottom
