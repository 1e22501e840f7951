"""What keeps a run honest with itself: how many steps it may skip, and whether a loss is out of line with those before."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field

from mezzotint.models.errors import InputError

FEWEST = 20  # steps before the first is judged


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """skip_budget: steps whose loss or gradient is not finite that may be skipped within skip_window steps; one more
    stops the run. spike_sigma: standard deviations over the mean of the last spike_window steps from which a loss or
    gradient norm is reported as a spike, 0 for never. hang_seconds: without a sign of life for so long a rank ends, 0
    for never."""

    skip_budget: int = 3
    skip_window: int = 1000
    spike_sigma: float = 6.0
    spike_window: int = 128
    hang_seconds: float = 1800.0

    def __post_init__(self) -> None:
        if self.skip_budget < 0 or self.skip_window < 1:
            raise InputError("guard.skip_budget must be at least 0 and guard.skip_window at least 1")
        if self.spike_sigma < 0 or self.spike_window < FEWEST:
            raise InputError(f"guard.spike_sigma must be at least 0 and guard.spike_window at least {FEWEST}")
        if self.hang_seconds < 0:
            raise InputError(f"guard.hang_seconds is {self.hang_seconds}; it must be at least 0")


@dataclass
class History:
    """What a run remembers of its steps; the same on every rank, and saved with the checkpoint."""

    updates: int = 0  # optimizer steps that changed the weights
    skipped: list[int] = field(default_factory=list)  # steps within the window
    losses: list[float] = field(default_factory=list)  # of the last steps
    norms: list[float] = field(default_factory=list)

    def as_dict(self) -> dict:
        return asdict(self)

    def skip(self, step: int, config: GuardConfig) -> bool:
        """Remember that `step` was skipped; whether the run may go on."""
        self.skipped = [s for s in (*self.skipped, step) if s > step - config.skip_window]
        return len(self.skipped) <= config.skip_budget

    def spike(self, loss: float, norm: float, config: GuardConfig) -> str:
        """Remember a finite step; words on what is out of line, or nothing."""
        self.updates += 1
        pairs = (("loss", loss, self.losses), ("gradient norm", norm, self.norms))
        found = [
            f"{name} {value:.4g}, {distance:.1f} standard deviations over the last {len(before)} steps"
            for name, value, before in pairs
            if 0 < config.spike_sigma <= (distance := deviations(value, before))
        ]
        for _, value, before in pairs:
            before.append(value)
            del before[: -config.spike_window]
        return " and ".join(found)


def deviations(value: float, before: list[float]) -> float:
    """How many standard deviations `value` lies over the mean of `before`; 0 when there are too few."""
    if len(before) < FEWEST:
        return 0.0
    mean = sum(before) / len(before)
    spread = math.sqrt(sum((x - mean) ** 2 for x in before) / (len(before) - 1))
    return (value - mean) / spread if spread > 0 else 0.0
