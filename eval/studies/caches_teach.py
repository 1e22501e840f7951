"""Teaches small denoisers the recall task of the study: a loop of its own, since only the answers are ever masked.

A row's entries and questions are always visible and only answers are masked, as instruction tuning masks responses alone:
the loss is that of what is asked, and a model learns within minutes what random entries would drown.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from caches_task import Recall  # beside this file
from torch import Tensor

from mezzotint.data.files import write_bytes
from mezzotint.models.config import ModelConfig
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.weights import save_weights

BLOCK = 8  # of the block-causal models: the entries of a row are one, four questions the next
PATTERNS = {"row": "AA", "attention": "AA", "mamba": "MM", "hybrid": "MA"}


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """How one model is taught. enough: share of right answers at which it may stop, looked at every `look` steps."""

    task: Recall
    steps: int = 1000
    rows: int = 24
    rate: float = 4e-3
    seed: int = 1
    look: int = 100
    enough: float = 0.97


def teach_recall(kind: str, lesson: Lesson, out: Path) -> Path:
    """The release of a model that was taught, made once; training.json in it says what that took."""
    if (out / "training.yaml").exists():
        return out
    torch.set_num_threads(1)
    model = Denoiser(_config(kind, lesson.task), generator=torch.Generator().manual_seed(lesson.seed))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lesson.rate, weight_decay=0.01, betas=(0.9, 0.95))
    g, began, step, share = torch.Generator().manual_seed(lesson.seed), time.process_time(), 0, 0.0
    while step < lesson.steps and share < lesson.enough:
        for group in optimizer.param_groups:
            group["lr"] = lesson.rate * min(1.0, (step + 1) / 50, (lesson.steps - step) / (0.3 * lesson.steps))
        _step(model, optimizer, lesson, g)
        step += 1
        if step % lesson.look == 0:
            share = right(model, lesson.task)
            print(
                f"{kind}: step {step}, {share:.3f} right, {time.process_time() - began:.0f} s of processor", flush=True
            )
    out.mkdir(parents=True, exist_ok=True)
    save_weights(model, out)
    about = {"steps": step, "right": share, "core_seconds": round(time.process_time() - began, 1)}
    write_bytes(out / "training.json", json.dumps(about).encode())
    row = lesson.task.length if kind == "row" else 2 * lesson.task.length
    write_bytes(out / "training.yaml", f"data:\n  row_length: {row}\n".encode())  # as long as a block: bidirectional
    return out


def _config(kind: str, task: Recall) -> ModelConfig:
    block = task.length if kind == "row" else BLOCK
    return ModelConfig(
        pattern=PATTERNS[kind],
        vocab_size=task.vocabulary,
        d_model=64,
        d_ff=128,
        block_length=block,
        chunk_length=block,
        n_heads=4,
        n_kv_heads=4,
        head_dim=16,
        qk_norm=True,
        rope_theta=100,
        init_std=0.1,
        ssm_head_dim=32,
        d_state=32,
        mask_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )


def _step(model: Denoiser, optimizer: torch.optim.Optimizer, lesson: Lesson, g: torch.Generator) -> None:
    """One step on fresh rows: of every row a share from 0.3 to 1 of the answers is masked."""
    task = lesson.task
    rows = task.rows(lesson.rows, g)
    masked = torch.zeros(rows.shape, dtype=torch.bool)
    share = 0.3 + 0.7 * torch.rand(lesson.rows, 1, generator=g)
    masked[:, task.answers] = torch.rand(lesson.rows, task.asked, generator=g) < share
    logits = _logits(model, rows, masked)
    loss = F.cross_entropy(logits[masked], rows[masked])
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _logits(model: Denoiser, rows: Tensor, masked: Tensor) -> Tensor:
    """(B, T, V) where something may be masked; zeros in the blocks before, which are read clean."""
    size, length = model.config.block_length, rows.shape[1]
    first = 0 if size == length else length - size
    noisy = rows.masked_fill(masked, model.config.mask_token_id)[:, None, first:]
    frontier = torch.full((len(rows), 1), first // size)
    logits = model(rows[:, :first], noisy, frontier)[:, 0]
    return F.pad(logits, (0, 0, first, 0))


@torch.inference_mode()
def right(model: Denoiser, task: Recall) -> float:
    """The share of right answers on held-out rows, all answers masked at once."""
    rows = task.rows(200, torch.Generator().manual_seed(2**40))
    masked = torch.zeros(rows.shape, dtype=torch.bool)
    masked[:, task.answers] = True
    return float((_logits(model, rows, masked)[masked].argmax(dim=-1) == rows[masked]).double().mean())
