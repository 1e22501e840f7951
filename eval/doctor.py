"""What a measurement stands on: versions, device, threads, load, memory, and which backends run the operations."""

from __future__ import annotations

import os
import platform

import torch

from mezzotint.eval.environment import cpu_name as cpu_name
from mezzotint.eval.environment import package_version
from mezzotint.eval.memory import available_bytes, both_units
from mezzotint.eval.timing import load_average
from mezzotint.models.errors import InputError
from mezzotint.models.ops import Backend, backends

PACKAGES = (
    *("mezzotint", "torch", "numpy", "safetensors", "deepspeed", "datasets", "sentencepiece", "grain", "transformers"),
    *("lm_eval", "triton", "mamba-ssm", "causal-conv1d", "flash-attn"),
)


def examine() -> dict:
    """Everything the doctor says, as one JSON value; the backends are those of a CUDA device where there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "versions": {"python": platform.python_version()} | {name: package_version(name) for name in PACKAGES},
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": load_average(),
        "available_bytes": available_bytes(),
        "cuda": [_cuda(index) for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else [],
        "backends": [
            {"op": found.op, "backend": found.name, "used": used, "reason": reason}
            for found, used, reason in _choices(backends(device))
        ],
    }


def describe(found: dict) -> str:
    """The same for a reader."""
    lines = ["versions"]
    lines += [f"  {name:16} {version or 'not installed'}" for name, version in found["versions"].items()]
    lines += ["machine", f"  {found['cpu']} ({found['cpu_capability']}), {found['cores']} cores"]
    lines += [f"  torch uses {found['threads']} threads; load average {found['load']:.2f}"]
    lines += [f"  {both_units(found['available_bytes'])} of memory available"]
    if found["load"] > 0.5 * found["cores"]:
        lines += ["  the machine is busy: latencies measured now will be marked noisy or be too long"]
    if not found["cuda"]:
        lines += ["  no CUDA device: everything runs on the CPU"]
    for card in found["cuda"]:
        lines += [
            f"  {card['name']}, compute capability {card['capability']}, {both_units(card['available_bytes'])} free"
        ]
    lines += ["operations"]
    for row in found["backends"]:
        lines += [f"  {row['op']:10} {row['backend']:18} {'used' if row['used'] else 'not used: ' + row['reason']}"]
    return "\n".join(lines)


def device_name(device: str) -> str:
    """The processor or card as the system names it."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else cpu_name()


def require_device(device: str) -> None:
    """Raises InputError for a device that torch cannot use here."""
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise InputError(f"unknown device {device!r}; use cpu or cuda") from error
    if kind not in ("cpu", "cuda"):
        raise InputError(f"device {device!r} is not supported; use cpu or cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError("this machine has no CUDA device that torch can use; leave --device out")


def _choices(table: list[Backend]) -> list[tuple[Backend, bool, str | None]]:
    """Each backend, whether it is the one that runs its op, and if not why: declined, or behind a preferred one."""
    chosen: dict[str, str] = {}
    for backend in table:
        if backend.declined is None:
            chosen.setdefault(backend.op, backend.name)
    rows = []
    for backend in table:
        used = chosen.get(backend.op) == backend.name
        behind = f"{chosen.get(backend.op)} is preferred"
        rows.append((backend, used, None if used else backend.declined or behind))
    return rows


def _cuda(index: int) -> dict:
    major, minor = torch.cuda.get_device_capability(index)
    return {
        "name": torch.cuda.get_device_name(index),
        "capability": f"{major}.{minor}",
        "available_bytes": available_bytes(f"cuda:{index}"),
    }
