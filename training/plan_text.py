"""The plan as text: memory, work, time and disk of a run in aligned lines."""

from __future__ import annotations

from mezzotint.models.config import ModelConfig, parameter_count
from mezzotint.training.config import TrainConfig
from mezzotint.training.plan_memory import Memory, checkpoint_bytes
from mezzotint.training.plan_work import DAY, UTILIZATIONS, Gpu, Work

WIDTH = 44


def gigabytes(value: float) -> str:
    return f"{value / 1e9:,.1f} GB"


def report(
    config: TrainConfig,
    model: ModelConfig,
    need: Memory,
    work: Work,
    *,
    gpus: int,
    gpu: Gpu,
    vocabulary: str,
) -> str:
    engine = config.engine
    accumulation = config.rows_per_step // (gpus * config.micro_rows)
    parts = [
        [
            f"{config.run}: pattern {model.pattern}, blocks of {model.block_length}",
            _line("parameters", f"{parameter_count(model):,}"),
            _line("vocabulary", f"{model.vocab_size:,} ({vocabulary})"),
            _line("GPUs", f"{gpus} x {gpu.name} ({gpu.peak / 1e12:,.0f} TFLOP/s bfloat16)"),
            _line("engine", f"{engine.precision}, ZeRO {engine.zero_stage}, activations {engine.activations}"
                  + (", compiled" if engine.compile else "")),
            _line("rows of a pass, passes of a step", f"{config.micro_rows}, {accumulation}"),
        ],
        memory_lines(config, need, gpus=gpus, gpu=gpu),
        work_lines(config, work, gpus=gpus, gpu=gpu),
        disk_lines(config, model, gpus=gpus),
    ]  # fmt: skip
    return "\n\n".join("\n".join(lines) for lines in parts)


def memory_lines(config: TrainConfig, need: Memory, *, gpus: int, gpu: Gpu) -> list[str]:
    engine, activations = need.engine, need.activations
    rows = [
        ("weights", engine.weights),
        ("optimizer", engine.optimizer),
        (f"average of the weights, 1/{gpus}", need.average),
        ("gradients", engine.gradients),
        ("buckets for communication", engine.buckets),
        ("weights gathered for the pass", engine.gathered),
        ("activations kept for the backward pass", activations.kept),
        ("weights kept in bfloat16 (autocast)", activations.casts),
        (f"inside a layer or the head, most in {activations.largest}", activations.work),
    ]
    rows.append(("reducing or updating takes more than a pass", need.peak - sum(value for _, value in rows)))
    lines = ["bytes of one GPU at the worst moment of a step"]
    lines += [_line(f"  {name}", f"{value / 1e9:8.1f} GB") for name, value in rows if value > 1e6]
    lines.append(
        _line(
            "  total",
            f"{need.peak / 1e9:8.1f} GB of {gigabytes(gpu.usable)}, what CUDA leaves of {gigabytes(gpu.bytes)}",
        )
    )
    if config.engine.compile:
        lines.append("  (counted as not compiled; compiled layers keep less)")
    return lines


def work_lines(config: TrainConfig, work: Work, *, gpus: int, gpu: Gpu) -> list[str]:
    lines = [
        _line("tokens of a step", f"{work.tokens:,} ({config.rows_per_step:,} rows of {config.data.row_length:,}), "
              f"{work.supervised:,} denoised"),
        _line("steps, tokens", f"{config.steps:,}, {config.steps * work.tokens / 1e9:,.1f} billion"),
        _line("FLOPs of a token, forward and backward", f"{work.flops_per_token:.3g}"),
        _line("FLOPs of the run", f"{config.steps * work.flops:.3g}"),
    ]  # fmt: skip
    if work.again:
        lines.append(_line("computed again in the backward pass", f"{work.again / work.flops:.0%} on top"))
    lines.append("time, at a share of the peak (computing again not counted)")
    for utilization in UTILIZATIONS:
        seconds = work.seconds(gpus=gpus, gpu=gpu, utilization=utilization)
        rate = work.tokens / seconds / gpus
        lines.append(
            _line(f"  {utilization:.0%}", f"{seconds:,.1f} s a step, {rate:,.0f} tokens/s a GPU, "
                  f"{seconds * config.steps / DAY:,.1f} days")
        )  # fmt: skip
    if config.engine.precision == "float32":
        lines.append("  (the peak is that of bfloat16; products in float32 run at a fraction of it)")
    return lines


def disk_lines(config: TrainConfig, model: ModelConfig, *, gpus: int) -> list[str]:
    each, keep = checkpoint_bytes(model, average=config.ema_decay > 0), config.checkpoint
    count = keep.keep + 1 + (config.steps // keep.keep_every if keep.keep_every else 0)
    held = f"the newest {keep.keep} and one being written"
    if keep.keep_every:
        held += f", and one of every {keep.keep_every:,} steps"
    return [
        _line("a checkpoint", f"{gigabytes(each)}, every {keep.every:,} steps"),
        _line("disk", f"{gigabytes(each * count)} for {count} ({held})"),
        _line("host memory of a GPU while it saves", gigabytes(each / gpus)),
    ]


def _line(name: str, value: str) -> str:
    return f"{name:<{WIDTH}}{value}"
