"""Trains the soft tokens of KV Packet: a frozen denoiser reading documents alone is taught what it says reading them all."""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch

from mezzotint.data.loader import Batch, DataConfig, Loader
from mezzotint.data.manifest import NAME as MANIFEST
from mezzotint.data.manifest import check_tokenizer, check_vocabulary
from mezzotint.data.tokenizer import load_tokenizer
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError
from mezzotint.models.policies.adapters import fresh_adapters, model_fingerprint
from mezzotint.models.weights import load_model
from mezzotint.training import checkpoint, strict
from mezzotint.training.adapters_objective import AdapterObjective, SoftTokens
from mezzotint.training.checkpoint import CheckpointConfig, RunState
from mezzotint.training.distributed import Ranks, join
from mezzotint.training.engine import Engine, EngineConfig, MicroBatch
from mezzotint.training.noise import NoiseSource
from mezzotint.training.objective import Objective
from mezzotint.training.pieces import Piece, Pieces
from mezzotint.training.saver import Saver
from mezzotint.training.stopwatch import Stopwatch

FILE = "adapters.safetensors"


@dataclass(frozen=True, kw_only=True)
class AdaptersConfig:
    """What is trained on what. A row is `documents` documents of equal length, then its own part.

    share: of a row that the documents take; lr falls linearly to 0; every: steps between checkpoints.
    """

    release: str
    data: str
    run: str
    steps: int = 300
    rows_per_step: int = 16
    micro_rows: int = 16
    row_length: int = 256
    documents: int = 2
    share: float = 0.5
    header: int = 8
    trailer: int = 8
    lr: float = 5e-4
    seed: int = 0
    every: int = 100

    def __post_init__(self) -> None:
        for name in ("steps", "rows_per_step", "micro_rows", "row_length", "documents", "every"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.header < 0 or self.trailer < 0 or self.header + self.trailer == 0:
            raise InputError(f"header {self.header} and trailer {self.trailer} leave no soft token to train")
        if not 0 < self.share < 1:
            raise InputError(f"share is {self.share}; it must be above 0 and below 1")
        if not 0 < self.lr <= 1:  # a step moves a value by about the rate, and soft tokens begin near 0.02
            raise InputError(f"lr is {self.lr}; it must be above 0 and at most 1")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"seed is {self.seed}; it must be from 0 to 2^63 - 1")
        if self.rows_per_step % self.micro_rows:
            raise InputError(f"rows_per_step {self.rows_per_step} is no multiple of micro_rows {self.micro_rows}")

    def spans(self, block: int, *, bidirectional: bool) -> tuple[tuple[int, int], ...]:
        """(start, end) of the documents. Block-causal rows keep whole blocks for their own part. InputError where empty."""
        unit = 1 if bidirectional else block
        each = int(self.share * self.row_length) // self.documents // unit * unit
        own = self.row_length - each * self.documents
        if each == 0 or own < unit or own % unit:
            raise InputError(
                f"rows of {self.row_length} tokens cannot be {self.documents} documents of {each} tokens and whole blocks "
                f"of {block} behind them: take longer rows, fewer documents or another share"
            )
        return tuple((i * each, (i + 1) * each) for i in range(self.documents))


@dataclass(frozen=True)
class AdapterRun:
    """The moving parts."""

    config: AdaptersConfig
    frozen: Denoiser
    fingerprint: str  # of the frozen weights, before
    loader: Loader
    noise: NoiseSource
    engine: Engine
    soft: SoftTokens
    saver: Saver
    ranks: Ranks


def train_adapters(config: AdaptersConfig) -> int:
    """Train or go on; the adapters lie in the run folder at the end. Raises InputError for what the user can mend."""
    ranks = join()
    run = _start(config, ranks)
    with closing(run.engine):
        first = _resume(run)
        rows = config.rows_per_step // ranks.world
        batches = run.loader.iterate(first, config.rows_per_step, ranks.rank * rows, rows)
        for step in range(first, config.steps):
            loss, norm = _step(run, step, next(batches))
            if (step + 1) % 10 == 0 or step + 1 == config.steps:
                ranks.say(f"step {step + 1} of {config.steps}: KL {loss:.4f} nats a masked token, gradient {norm:.3g}")
            if (step + 1) % config.every == 0 or step + 1 == config.steps:
                _save(run, step + 1)
                run.saver.wait()
        if not run.saver.finish():
            raise InputError(
                f"{config.run} has no checkpoint of its last step: see the warning above, then start again"
            )
        ranks.alone(lambda: _finish(run))
    return 0


def _open_run(folder: Path) -> None:
    """Make the run folder before anything is trained. InputError where that cannot be, and for a release."""
    if (folder / "model.safetensors").exists():
        raise InputError(f"--run {folder} is a release, and its files are not mixed with a run's: give another folder")
    if (folder / MANIFEST).exists():
        raise InputError(
            f"--run {folder} is prepared data, and its files are not mixed with a run's: give another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"the run folder {folder} cannot be written: {error.strerror}; give another --run") from error


def _start(config: AdaptersConfig, ranks: Ranks) -> AdapterRun:
    frozen = load_model(config.release, dtype=torch.float32, device=ranks.device).requires_grad_(False)
    if "M" in frozen.config.pattern:
        raise InputError(f"adapters are for attention alone; {config.release} has the pattern {frozen.config.pattern}")
    if config.rows_per_step % ranks.world:
        raise InputError(f"rows_per_step {config.rows_per_step} is no multiple of {ranks.world} ranks")
    size = frozen.config.block_length
    bidirectional = _bidirectional(config, size)
    data = DataConfig(
        sources=((config.data, 1.0),), row_length=config.row_length, seed=config.seed, align=not bidirectional
    )
    loader = Loader(data, config.row_length if bidirectional else size)
    for manifest in loader.manifests:
        check_vocabulary(manifest, frozen.config.vocab_size)
        if any(Path(config.release).glob("tokenizer.*")):
            check_tokenizer(manifest, load_tokenizer(config.release))
    spans = config.spans(size, bidirectional=bidirectional)
    _open_run(Path(config.run))
    fingerprint = model_fingerprint(frozen)
    start = fresh_adapters(frozen, header=config.header, trailer=config.trailer, seed=config.seed)
    objective = AdapterObjective(frozen, SoftTokens(start), spans=spans, bidirectional=bidirectional)
    own = config.row_length - spans[-1][1]
    noise = NoiseSource(
        seed=config.seed,
        rows_per_step=config.rows_per_step,
        row_blocks=1 if bidirectional else own // size,
        slots=1,
        block_length=own if bidirectional else size,
    )
    optimizer = torch.optim.AdamW(objective.model.parameters(), lr=config.lr, weight_decay=0.0)
    engine = Engine(
        cast(Objective, objective),  # the engine calls it with a micro-batch, and trains and saves its `model`
        optimizer,
        config=EngineConfig(precision="float32", zero_stage=0),
        clip=1.0,
        micro_rows=config.micro_rows,
        accumulation=config.rows_per_step // ranks.world // config.micro_rows,
        ranks=ranks,
    )
    saver = Saver(Path(config.run), CheckpointConfig(every=config.every), ranks)
    return AdapterRun(config, frozen, fingerprint, loader, noise, engine, objective.model, saver, ranks)


def _bidirectional(config: AdaptersConfig, block: int) -> bool:
    """A model whose block is its training row; its recipe lies in the release. Raises InputError where it is missing."""
    path = Path(config.release) / "training.yaml"
    recipe = strict.parse_yaml(path.read_text(encoding="utf-8"), source=str(path)) if path.is_file() else None
    data = recipe.get("data") if isinstance(recipe, dict) else None
    trained = data.get("row_length") if isinstance(data, dict) else None
    if not isinstance(trained, int):
        raise InputError(f"{path} does not say how long the training rows were (data.row_length): export the run again")
    if trained == block and config.row_length > block:
        raise InputError(
            f"rows of {config.row_length} tokens are longer than the {block} that {config.release} was made for"
        )
    return trained == block


def _step(run: AdapterRun, step: int, batch: Batch) -> tuple[float, float]:
    """One optimizer step: nats a masked token over all ranks, and the gradient's norm."""
    config, ranks = run.config, run.ranks
    blocks = torch.full((len(batch.tokens),), run.noise.row_blocks)
    noise = run.noise.draw(step=step, first_row=ranks.rank * len(batch.tokens), blocks=blocks)
    parts = torch.arange(len(batch.tokens)).split(config.micro_rows)
    micro = [
        MicroBatch(
            batch.tokens[rows].to(ranks.device),
            batch.documents[rows].to(ranks.device),
            noise.select(rows),
            batch.row_ids[rows],
        )
        for rows in parts
    ]
    count = ranks.total(float(sum(_masked(part) for part in micro)))
    losses, bad, _ = run.engine.accumulate(micro, count.clamp(min=1), Stopwatch(ranks.device))
    if bool(bad.any()):
        raise InputError(f"step {step}: the loss is not finite; take a lower lr")
    norm = run.engine.step(config.lr * (1 - step / config.steps))
    total = float(ranks.sum(losses.double().sum()[None]))
    return total / max(float(count), 1.0), norm


def _masked(micro: MicroBatch) -> int:
    """Masked tokens of a micro-batch: the linear schedule masks each token with the level itself."""
    return int((micro.noise.uniforms < micro.noise.levels[..., None]).sum())


def _save(run: AdapterRun, step: int) -> None:
    fragments = run.engine.fragments()
    pieces = [Piece(kind, f.name, f.start, view) for f in fragments for kind, view in f.views.items()]
    state = RunState(
        step=step,
        next_row=step * run.config.rows_per_step,
        seed=run.config.seed,
        ema_updates=0,
        validation_due=False,
        history={},
        data_hash=run.loader.hash,
        tokenizer_hash=run.loader.manifests[0].tokenizer_sha256,
        arms_hash=run.fingerprint,
        recipe=strict.dump_yaml({"adapters": asdict(run.config)}),
        model=run.frozen.config.to_dict(),
        shapes={name: list(p.shape) for name, p in run.soft.named_parameters()},
        world=run.ranks.world,
        zero_stage=0,
    )
    run.saver.begin(state, pieces)


def _resume(run: AdapterRun) -> int:
    """The step to go on at. InputError for a run folder of another model, data or setting."""
    folder = checkpoint.newest(Path(run.config.run), run.ranks.say)
    if folder is None:
        return 0
    state = checkpoint.read_state(folder)
    written = strict.parse_yaml(state.recipe, source=str(folder)).get("adapters")
    now = asdict(run.config)
    if not isinstance(written, dict):
        raise InputError(f"{run.config.run} is the run of a denoiser, not of adapters: give another --run")
    for name in now:
        if name not in ("release", "data", "run", "micro_rows", "every") and written.get(name) != now[name]:
            raise InputError(
                f"{folder} was written with {name} {written.get(name)}, this start has {now[name]}: give the same again, or "
                "another --run"
            )
    if state.arms_hash != run.fingerprint or state.data_hash != run.loader.hash:
        raise InputError(f"{folder} belongs to other weights or other data: give another --run")
    pieces = Pieces(folder)
    for fragment in run.engine.fragments(reading=True):
        for kind, view in fragment.views.items():
            view.copy_(pieces.read(kind, fragment.name, fragment.start, fragment.size))
    run.engine.restored(state.step)
    run.ranks.say(f"resuming {run.config.run} at step {state.step}")
    return state.step


def _finish(run: AdapterRun) -> None:
    """Write the adapters; the frozen weights must be what they were, to the bit."""
    after = model_fingerprint(run.frozen)
    assert after == run.fingerprint, "training adapters has changed the frozen denoiser"
    path = Path(run.config.run) / FILE
    found = run.soft.adapters(run.fingerprint)
    found.save(path)
    print(f"written: {path} ({found.fingerprint}), for the model {run.fingerprint}, whose weights are unchanged")
