"""The checks can fail: each mutation is a mistake somebody could make, and the named checks must notice it.

`passes` names checks that do *not* notice: one function agrees with itself even when it is wrong, which is why the
oracles exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mutations
import pytest
import test_denoiser_oracle
import test_leaks
import test_parity
from support import random_case, tiny_config

from mezzotint.models.mamba2 import Mamba2

# ---- the checks -----------------------------------------------------------------------------------------------------


def check_oracle(_: Path) -> None:
    config = tiny_config("MAM", 3, chunk_length=6)
    test_denoiser_oracle.check_against_oracle(config, random_case(config, batch=2, blocks=4))


def check_parity(_: Path) -> None:
    test_parity.test_training_is_block_by_block_is_advance("MAM", 4, "rope", 2)


def check_documents(_: Path) -> None:
    test_leaks.test_another_document_changes_nothing("MAM", 5, (0, 2), slice(2, 5))


def check_gradients(_: Path) -> None:
    test_leaks.test_gradients_reach_exactly_the_visible_tokens("MAM", 2)


def check_invalid(tmp_path: Path) -> None:
    test_leaks.test_invalid_tokens_never_alter_the_state("MAM", tmp_path)


def check_untouched(tmp_path: Path) -> None:
    test_parity.test_denoise_leaves_the_state_bit_identical("MAM", tmp_path)


def check_likelihood(_: Path) -> None:
    test_denoiser_oracle.test_blocks_of_one_token_sum_to_one("MAM")


CHECKS: dict[str, Callable[[Path], None]] = {
    "oracle": check_oracle,
    "parity": check_parity,
    "documents": check_documents,
    "gradients": check_gradients,
    "invalid": check_invalid,
    "untouched": check_untouched,
    "likelihood": check_likelihood,
}


# ---- who notices what -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutation:
    apply: Callable[[pytest.MonkeyPatch], None]
    fails: tuple[str, ...]
    passes: tuple[str, ...] = ()


MUTATIONS = [
    Mutation(mutations.tail_dropped_from_the_state, fails=("parity",), passes=("oracle",)),
    Mutation(mutations.left_context_dropped, fails=("oracle",), passes=("parity",)),
    Mutation(
        mutations.convolution_sees_other_documents, fails=("oracle", "documents", "gradients"), passes=("parity",)
    ),
    Mutation(mutations.boundary_state_one_token_off, fails=("parity",)),
    Mutation(mutations.boundary_state_is_of_the_wrong_block, fails=("oracle", "parity")),
    Mutation(mutations.backward_scan_crosses_the_block, fails=("oracle", "parity", "gradients")),
    Mutation(mutations.backward_decay_one_index_off, fails=("oracle",), passes=("parity", "documents", "gradients")),
    Mutation(mutations.backward_scan_includes_the_token_itself, fails=("oracle",), passes=("parity",)),
    Mutation(mutations.directions_swapped, fails=("oracle",), passes=("parity",)),
    Mutation(mutations.entering_state_not_masked, fails=("oracle", "documents", "gradients"), passes=("parity",)),
    Mutation(mutations.running_sum_not_restarted, fails=("documents",), passes=("oracle", "parity")),
    Mutation(mutations.invalid_tokens_advance_the_state, fails=("invalid",), passes=("oracle", "parity")),
    Mutation(mutations.clean_token_sees_a_later_block, fails=("oracle", "parity", "gradients")),
    Mutation(mutations.frontier_sees_its_own_answer, fails=("oracle", "parity", "gradients", "likelihood")),
    Mutation(mutations.frontier_misses_the_last_clean_block, fails=("oracle",)),
    Mutation(mutations.attention_sees_other_documents, fails=("oracle", "documents", "gradients"), passes=("parity",)),
    Mutation(mutations.query_heads_take_turns_at_the_keys, fails=("oracle",), passes=("parity",)),
    Mutation(mutations.denoise_writes, fails=("untouched",), passes=("oracle",)),
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.apply.__name__)
def test_mutation_is_noticed(mutation: Mutation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    # all passes by the general code, in which the mistakes are made: the step from a state is a second writing of it, held
    # against the oracles by tests/test_torch_step.py
    monkeypatch.setattr(Mamba2, "steps", lambda *_: False)
    mutation.apply(monkeypatch)
    for name in mutation.fails:
        with pytest.raises(AssertionError):
            CHECKS[name](tmp_path)
            pytest.fail(f"the {name} check does not notice it", pytrace=False)
    for name in mutation.passes:
        CHECKS[name](tmp_path)


@pytest.mark.parametrize("name", CHECKS)
def test_the_checks_pass_without_mutation(name: str, tmp_path: Path):
    CHECKS[name](tmp_path)
