"""How fast a device multiplies matrices: the peak that utilization is a share of, and a word where bfloat16 is slow."""

from __future__ import annotations

import math
import time

import torch

# dense bfloat16 peaks in TFLOP/s, from the makers' data sheets; float32 parameters under autocast run at these
PEAKS = {"A100": 312, "H100": 989, "H200": 989, "B200": 2250}
SLOW = 2.0  # times that bfloat16 may take of float32's time before it is worth a word


def device_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of one device: from a data sheet, or half a second of matrix products."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, tflops in PEAKS.items():
            if known in name:
                return tflops * 1e12
    return product_rate(device, dtype, size=1024, seconds=0.5)


def product_rate(device: torch.device, dtype: torch.dtype, *, size: int, seconds: float) -> float:
    """FLOP/s of the quickest product of two square matrices within about so many seconds."""
    a = torch.ones(size, size, device=device, dtype=dtype)
    best, until = math.inf, time.perf_counter() + seconds
    while best == math.inf or time.perf_counter() < until:
        start = time.perf_counter()
        (a @ a)[0, 0].item()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def slow_bfloat16(device: torch.device) -> str:
    """A sentence for a processor without instructions for bfloat16, on which the narrow products are the slow ones."""
    if device.type != "cpu":
        return ""
    wide, narrow = (product_rate(device, dtype, size=256, seconds=0.05) for dtype in (torch.float32, torch.bfloat16))
    if wide <= SLOW * narrow:
        return ""
    return (
        f"warning: this processor multiplies in bfloat16 {wide / narrow:.0f} times slower than in float32: a run with "
        "engine.precision=float32 is that much quicker here (one that has begun keeps its precision)"
    )
