"""What decoding under a policy cost, as the harness counts it: passes, recomputed tokens, bytes, decisions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Cost:
    """Counts of one decoding of B rows. A token-layer is one token run through one layer.

    `passes` are those of decoding (NFE); commits of finished blocks and what a policy runs to prepare are apart.
    """

    layers: int
    passes: int = 0
    token_layers: int = 0  # of decoding passes: what was recomputed
    full_token_layers: int = 0  # what the same passes would have run without any cache of the canvas
    commits: int = 0
    commit_token_layers: int = 0  # clean passes over finished blocks
    prefill_token_layers: int = 0  # prompts, before the first pass
    shared_token_layers: int = 0  # affixes, documents and prefixes that were not in the store yet
    decision_operations: int = 0  # multiply-adds and reads of the hooks that a policy called to decide
    decision_seconds: float = 0.0  # in the policy's own code, its hooks included
    peak_bytes: int = 0  # of memory, segments and the policy's state, each storage once
    held_bytes: int = 0  # the same at the end
    prepare_seconds: float = 0.0  # before the first pass
    seconds: float = 0.0  # of all
    effective: dict[str, object] = field(default_factory=dict)  # the parameters as they came to be used

    @property
    def tokens(self) -> float:
        """Recomputed tokens: token-layers of decoding over layers."""
        return self.token_layers / self.layers

    @property
    def share(self) -> float:
        """Token-layers of decoding over those without a cache of the canvas."""
        return self.token_layers / max(self.full_token_layers, 1)

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Time spent in here is the policy's."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.decision_seconds += time.perf_counter() - began

    def hold(self, held: int) -> None:
        """`held` bytes are held now."""
        self.held_bytes = held
        self.peak_bytes = max(self.peak_bytes, held)
