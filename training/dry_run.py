"""What a run would be: the resolved recipe, sizes, and the cost of a step, without training anything."""

from __future__ import annotations

import torch

from mezzotint.models.config import parameter_count
from mezzotint.training.build import Plan, make_plan
from mezzotint.training.config import TrainConfig, dump
from mezzotint.training.metrics import count_work


def dry_run(config: TrainConfig) -> str:
    """Text for the user. Opens the data and checks everything that training would check before its first step."""
    plan = make_plan(config)
    config = plan.config
    row = config.data.row_length
    tokens = config.rows_per_step * row
    cost = flops_per_token(plan)
    lines = [
        dump(config),
        f"arms hash                {plan.arms_hash}",
        f"parameters               {parameter_count(plan.model):,}",
        f"FLOPs per unique token   {cost:,.0f} (forward and backward, cut rows, {plan.noise.slots} frontier(s) a row)",
        f"tokens per step          {tokens:,} ({config.rows_per_step} rows of {row})",
        f"supervised per step      {config.rows_per_step * plan.noise.slots * plan.model.block_length:,}",
        f"steps, tokens, FLOPs     {config.steps:,}, {config.steps * tokens:,}, {config.steps * tokens * cost:.2e}",
    ]
    return "\n".join(lines)


def flops_per_token(plan: Plan) -> float:
    """Forward and backward FLOPs of full rows per unique token, over the draws of 64 steps of one micro-batch."""
    size, row_blocks = plan.model.block_length, plan.noise.row_blocks
    rows = min(plan.config.micro_rows, plan.config.rows_per_step)
    flops = tokens = 0.0
    for step in range(1 if plan.noise.slots == row_blocks else 64):
        noise = plan.noise.draw(step=step, first_row=0, blocks=torch.full((rows,), row_blocks))
        masked = round(rows * plan.noise.slots * size / 2)  # half of all tokens, on average over levels
        work = count_work(plan.model, noise, row_length=plan.config.data.row_length, masked=masked)
        flops, tokens = flops + work.flops, tokens + work.unique_tokens
    return flops / tokens
