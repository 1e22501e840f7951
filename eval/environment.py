"""What results were made with: versions, code, processor and cards, as the heading of a results file keeps them."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path

import mezzotint.models

PACKAGES = ("mezzotint", "torch", "numpy", "lm_eval", "triton", "mamba-ssm", "causal-conv1d", "flash-attn")


@functools.cache
def environment() -> dict[str, object]:
    """Everything that is the same for all rows of one process; load averages and threads stand in the rows."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "packages": {name: found for name in PACKAGES if (found := package_version(name))},
        "code": code_hash(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "cards": card_names(),
    }


def package_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def code_hash() -> str:
    """12 hex digits that name the source of mezzotint.models, which computes everything that is measured."""
    assert mezzotint.models.__file__ is not None
    folder, digest = Path(mezzotint.models.__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def cpu_name() -> str:
    """The processor as the system names it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def card_names() -> list[str]:
    """CUDA devices with driver and compute capability; none where torch sees none."""
    import torch

    if not torch.cuda.is_available():
        return []
    cards = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        cards.append(f"{torch.cuda.get_device_name(index)}, compute capability {major}.{minor}, {_driver()}")
    return cards


def _driver() -> str:
    """The NVIDIA driver as it names itself."""
    path = Path("/proc/driver/nvidia/version")
    words = path.read_text().split() if path.exists() else []
    numbers = [word for word in words if word.replace(".", "").isdigit() and "." in word]
    return f"driver {numbers[0]}" if numbers else "driver unknown"


def describe(found: dict) -> str:
    """The same in a line."""
    packages = ", ".join(f"{name} {version}" for name, version in found["packages"].items())
    cards = "; ".join(found["cards"]) or "no CUDA device"
    return (
        f"{found['cpu']}, {found['cores']} cores; {cards}; Python {found['python']}, {packages}; {found['system']}; "
        f"models {found['code']}"
    )
