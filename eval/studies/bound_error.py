"""How far the likelihood bound of a block is off at so many draws: the usual estimators and ours, on a trained model.

    python eval/studies/bound_error.py                      trains a small model first: some minutes on one core
    python eval/studies/bound_error.py --release R --data P  a release, on prepared text

Prints the standard deviation of the bound of one block over repeats, pooled over blocks, and the variance of a draw by the
number of masked tokens, which eval/draws.py allocates by.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mezzotint.data.cli import run_command
from mezzotint.data.corpus import corpus_documents
from mezzotint.data.rows import RowSource
from mezzotint.data.tokenizer import load_tokenizer
from mezzotint.data.train_tokenizer import TrainTokenizerConfig, train_tokenizer
from mezzotint.eval.canvases import shared
from mezzotint.eval.draws import allocate, block_draws, spread
from mezzotint.models.config import preset
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError
from mezzotint.models.state import State
from mezzotint.models.weights import load_model

Sets = list[tuple[tuple[int, ...], float]]  # masked tokens and the weight of their summed cross-entropy
ROW, BATCH, RATE = 256, 4, 4e-3
SMALLEST_LEVEL = 1e-3  # as in the code that is commonly used: a smaller t would leave the error without a bound


# -- estimators ----------------------------------------------------------------------------------------------------


def usual(count: int, draws: int, rng: random.Random) -> Sets:
    """One uniform mask ratio t per draw, each token masked with probability t, weight 1/t (LLaDA's loss, MDLM)."""
    chosen = []
    for _ in range(draws):
        t = max(rng.random(), SMALLEST_LEVEL)
        chosen.append((tuple(i for i in range(count) if rng.random() < t), 1 / t / draws))
    return chosen


def fixed_number(count: int, draws: int, rng: random.Random) -> Sets:
    """A uniform number of masked tokens per draw, exactly so many masked, weight n/k (LLaDA's likelihood)."""
    sizes = [rng.randint(1, count) for _ in range(draws)]
    return [(tuple(rng.sample(range(count), k)), count / k / draws) for k in sizes]


def strata(count: int, draws: int, rng: random.Random) -> Sets:
    """The numbers of masked tokens in equal strata, sets drawn independently."""
    sizes = [min(count, int((j + rng.random()) * count / draws) + 1) for j in range(draws)]
    return [(tuple(rng.sample(range(count), k)), count / k / draws) for k in sizes]


def allocated(count: int, draws: int, rng: random.Random) -> Sets:
    """Our allocation to numbers of masked tokens, sets drawn independently."""
    chosen: Sets = [(tuple(range(count)), 1 / count)]
    for stratum in allocate(count, draws - 1):
        for _ in range(stratum.draws):
            k = rng.randint(stratum.low, stratum.high)
            chosen.append((tuple(rng.sample(range(count), k)), stratum.width / stratum.draws / k))
    return chosen


def balanced(count: int, draws: int, rng: random.Random) -> Sets:
    """What mezzotint-eval does: our allocation, two replicates, each with sets that balance each other."""
    chosen = block_draws(count, draws=draws, key=str(rng.random()), replicates=2 if draws >= count else 1)
    return [(draw.masked, draw.weight) for draw in chosen]


ESTIMATORS: dict[str, Callable[[int, int, random.Random], Sets]] = {
    "uniform mask ratio (usual)": usual,
    "uniform number of masks": fixed_number,
    "numbers in strata": strata,
    "allocated": allocated,
    "allocated and balanced (ours)": balanced,
}


# -- a model and its blocks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Tokens (G,) and the state in front of them."""

    tokens: Tensor
    state: State


def small_model(*, steps: int, seed: int) -> tuple[Denoiser, Tensor]:
    """A Mamba denoiser trained for `steps` steps on the standard library's text, and held-out rows (R, ROW)."""
    with tempfile.TemporaryDirectory() as folder:
        train_tokenizer(TrainTokenizerConfig(out=folder, vocab_size=1024, sample_mb=2.0))
        tokenizer = load_tokenizer(folder)
    train: list[list[int]] = []
    held_out: list[list[int]] = []
    characters = 0
    for number, (_, text) in enumerate(corpus_documents("stdlib")):
        tokens = tokenizer.encode(text)
        kept = held_out if number % 20 == 0 else train
        kept += [tokens[i : i + ROW] for i in range(0, len(tokens) - ROW + 1, ROW)]
        characters += len(text)
        if characters > 3_000_000:
            break
    ids = {"mask_token_id": tokenizer.mask_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    sizes = {"d_model": 128, "d_ff": 384, "d_state": 32, "ssm_head_dim": 32}
    config = preset("10m", "mamba", vocab_size=tokenizer.vocab_size, init_std=0.08, pattern="MMMM", **ids, **sizes)
    g = torch.Generator().manual_seed(seed)
    model = Denoiser(config, generator=g)
    fit(model, torch.tensor(train), steps=steps, generator=g)
    return model.eval(), torch.tensor(held_out)


def fit(model: Denoiser, rows: Tensor, *, steps: int, generator: torch.Generator) -> None:
    """Train on all frontiers of random rows with stratified linear noise."""
    size, mask = model.config.block_length, model.config.mask_token_id
    blocks = ROW // size
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    began, losses = time.monotonic(), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 30) * (1 - step / steps)
        tokens = rows[torch.randint(len(rows), (BATCH,), generator=generator)]
        target = tokens.unflatten(1, (blocks, size))
        order = torch.randperm(BATCH * blocks, generator=generator)
        levels = ((order + torch.rand(len(order), generator=generator)) / len(order)).view(BATCH, blocks, 1)
        masked = torch.rand(target.shape, generator=generator) < levels
        frontiers = torch.arange(blocks).expand(BATCH, -1)
        logits = model(tokens[:, :-size], target.masked_fill(masked, mask), frontiers, rows=masked)
        nll = F.cross_entropy(logits, target[masked], reduction="none")
        loss = (nll / levels.expand(masked.shape)[masked]).sum() / tokens.numel()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            mean, seconds = sum(losses[-100:]) / 100, time.monotonic() - began
            print(f"step {step + 1}: {mean:.3f} nats/token, {seconds:.0f} s", file=sys.stderr)


def released(release: str, data: str) -> tuple[Denoiser, Tensor]:
    """A release, and the rows of one document each of a prepared folder."""
    model = load_model(release, dtype=torch.float32)
    source = RowSource(data, ROW, model.config.block_length)
    rows = [source[i] for i in range(len(source))]
    kept = [row.tokens for row in rows if (row.documents == 0).all() and not row.fill.any()]
    if not kept:
        raise InputError(f"{data} has no row of {ROW} tokens that is one document: give longer texts")
    return model, torch.stack([torch.from_numpy(tokens) for tokens in kept])


def some_blocks(model: Denoiser, rows: Tensor, *, count: int, generator: torch.Generator) -> list[Block]:
    size, blocks = model.config.block_length, []
    for _ in range(count):
        row = rows[torch.randint(len(rows), (1,), generator=generator)][0]
        at = int(torch.randint(ROW // size, (1,), generator=generator)) * size
        state = model.start(1, ROW)
        blocks.append(Block(row[at : at + size], model.commit(row[None, :at], state) if at else state))
    return blocks


@torch.inference_mode()
def losses_of(model: Denoiser, block: Block, sets: list[tuple[int, ...]], *, batch: int = 64) -> Tensor:
    """(sets, G) float64 cross-entropy of every masked token, zero at tokens that stand."""
    found = []
    for first in range(0, len(sets), batch):
        part = sets[first : first + batch]
        masked = torch.zeros(len(part), len(block.tokens), dtype=torch.bool)
        for row, places in enumerate(part):
            masked[row, list(places)] = True
        canvas = block.tokens.expand(len(part), -1).masked_fill(masked, model.config.mask_token_id)
        logits = model.denoise(canvas, shared(block.state, len(part)))
        nll = F.cross_entropy(logits.flatten(0, 1), block.tokens.repeat(len(part)), reduction="none")
        found.append(torch.where(masked, nll.view(masked.shape), 0.0).double())
    return torch.cat(found)


# -- measurements --------------------------------------------------------------------------------------------------


def deviation(
    model: Denoiser, blocks: list[Block], estimator: str, *, draws: int, repeats: int, rng: random.Random
) -> tuple[float, float]:
    """Mean bound of a block in nats, and its standard deviation over repeats, pooled over blocks."""
    means, variances = [], []
    for block in blocks:
        chosen = [ESTIMATORS[estimator](len(block.tokens), draws, rng) for _ in range(repeats)]
        flat = [part for each in chosen for part in each]
        sums = losses_of(model, block, [masked for masked, _ in flat]).sum(dim=1)
        owner = torch.tensor([i for i, each in enumerate(chosen) for _ in each])
        parts = sums * torch.tensor([weight for _, weight in flat], dtype=torch.float64)
        found = torch.zeros(repeats, dtype=torch.float64).index_add_(0, owner, parts)
        means.append(float(found.mean()))
        variances.append(float(found.var()))
    return sum(means) / len(means), math.sqrt(sum(variances) / len(variances))


def by_number(model: Denoiser, blocks: list[Block], *, sets: int, rng: random.Random) -> list[tuple[int, float, float]]:
    """(k, standard deviation of the mean cross-entropy of k masked tokens: of any set, and with each token's own mean
    taken off, which is what balancing leaves)."""
    count = len(blocks[0].tokens)
    numbers = sorted({1, 2, 3, *(max(1, count * i // 8) for i in range(1, 8)), count - 1})
    squares = {k: [0.0, 0.0] for k in numbers}
    for block in blocks:
        chosen = {k: [tuple(rng.sample(range(count), k)) for _ in range(sets)] for k in numbers}
        losses = {k: losses_of(model, block, chosen[k]) for k in numbers}
        total = torch.cat(list(losses.values()))
        own = total.sum(dim=0) / (total > 0).sum(dim=0).clamp(min=1)
        for k in numbers:
            mean = losses[k].sum(dim=1) / k
            left = mean - torch.stack([own[list(masked)].mean() for masked in chosen[k]])
            squares[k][0] += float(mean.var()) / len(blocks)
            squares[k][1] += float(left.var()) / len(blocks)
    return [(k, math.sqrt(any_set), math.sqrt(left)) for k, (any_set, left) in squares.items()]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Error of the likelihood bound at a given number of draws.")
    parser.add_argument("--release", help="release folder to measure instead of a model trained here")
    parser.add_argument("--data", help="prepared folder for --release")
    parser.add_argument("--steps", type=int, default=400, help="training steps (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--blocks", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=40, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    return run_command(lambda: study(options), InputError)


def study(options: argparse.Namespace) -> int:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if (options.release is None) != (options.data is None):
        raise InputError("--release and --data belong together: give both, or neither to train a small model")
    model, rows = (
        released(options.release, options.data)
        if options.release
        else small_model(steps=options.steps, seed=options.seed)
    )
    generator, rng = torch.Generator().manual_seed(options.seed), random.Random(options.seed)
    blocks = some_blocks(model, rows, count=options.blocks, generator=generator)
    found = {
        name: deviation(model, blocks, name, draws=options.draws, repeats=options.repeats, rng=rng)
        for name in ESTIMATORS
    }
    numbers = by_number(model, blocks, sets=options.repeats, rng=rng)
    size = model.config.block_length
    if options.json:
        estimators = {name: {"nats": mean, "deviation": spread} for name, (mean, spread) in found.items()}
        print(
            json.dumps({"block_length": size, "draws": options.draws, "estimators": estimators, "by_number": numbers})
        )
        return 0
    base = found["uniform mask ratio (usual)"][1]
    print(f"\n{options.draws} draws a block of {size} tokens, {len(blocks)} blocks, {options.repeats} repeats\n")
    print("| estimator | bound of a block, nats | standard deviation | of the usual |\n|---|---:|---:|---:|")
    for name, (mean, error) in found.items():
        print(f"| {name} | {mean:.2f} | {error:.2f} | {error / base:.3f} |")
    print(
        "\n| masked tokens | deviation of a set's mean | with token means taken off | allocated for |\n|---:|---:|---:|---:|"
    )
    scale = numbers[0][2] / math.sqrt(spread(1))
    for k, any_set, left in numbers:
        print(f"| {k} | {any_set:.3f} | {left:.3f} | {scale * math.sqrt(spread(k)):.3f} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
