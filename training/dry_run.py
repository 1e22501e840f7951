"""What a run would be: the resolved recipe, sizes, and the cost of a step, without training anything."""

from __future__ import annotations

from mezzotint.models.config import parameter_count
from mezzotint.training.build import make_plan
from mezzotint.training.config import TrainConfig, dump
from mezzotint.training.plan_work import step_work


def dry_run(config: TrainConfig) -> str:
    """Text for the user. Opens the data and checks everything that training would check before its first step."""
    plan = make_plan(config)
    config = plan.config
    row = config.data.row_length
    work = step_work(plan.model, plan.noise, micro_rows=config.micro_rows, activations=config.engine.activations)
    cost = work.flops_per_token
    lines = [
        dump(config),
        f"arms hash                {plan.arms_hash}",
        f"parameters               {parameter_count(plan.model):,}",
        f"FLOPs per unique token   {cost:,.0f} (forward and backward, cut rows, {plan.noise.slots} frontier(s) a row)",
        f"tokens per step          {work.tokens:,} ({config.rows_per_step} rows of {row})",
        f"supervised per step      {work.supervised:,}",
        f"steps, tokens, FLOPs     {config.steps:,}, {config.steps * work.tokens:,}, {config.steps * work.flops:.2e}",
    ]
    return "\n".join(lines)
