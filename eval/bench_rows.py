"""Rows of `make bench`: what is timed beside what in one run, and the ratio aimed at.

Samples of a row are interleaved, so that load falls on a step and on its floor alike.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from mezzotint.eval.bench_training import one_stream_hidden, one_stream_step, training_case, two_stream_step
from mezzotint.eval.doctor import device_name
from mezzotint.eval.fill import fill_random, prefill, random_tokens
from mezzotint.eval.floor import decode_floor, prefill_floor, read_bandwidth, state_read_seconds, training_floor
from mezzotint.eval.speed_passes import block_decoder, passes
from mezzotint.eval.subjects import Subject, build, preset_subject
from mezzotint.eval.timing import Protocol, Timing, interleave, load_average
from mezzotint.models.compiled import CompiledLayers
from mezzotint.models.denoiser import Denoiser, LayerRun, run_layer

BACKBONES = ("attention", "mamba", "hybrid")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FULL = Protocol(steps=15, seconds=4.0, least=7, warmups=1, warmup_tolerance=0.05, warmup_seconds=1.5)
QUICK = Protocol(steps=3, seconds=0.1, least=2, warmups=1, warmup_seconds=0.0)

DECODING = replace(FULL, steps=60, seconds=1.5)  # of each pass
# ratios aimed at: training and decoding of attention and of a model with Mamba layers
TRAINING_AIMS = {torch.float32: (1.25, 1.5), torch.bfloat16: (2.0, 2.4)}
DECODING_AIMS, LENGTH_AIM, STREAMS_AIM = (1.3, 1.4), 1.03, 1.9
PREFILL_AIM = 1 / 0.85  # of the time that a training forward takes for the same tokens
PREFILL_TOKENS, PREFILL_CHUNK = 4096, 1024
BLOCK_STEPS, BLOCK_AIM = 8, 1.05  # over all but one denoising step and one advance
PARTS = ("training", "prefill", "decoding")


@dataclass(frozen=True)
class Bench:
    """What is measured: models of preset `size` (its first `layers`), training steps of `batch` rows."""

    size: str
    batch: int
    device: str
    protocol: Protocol
    row_length: int = 1024
    contexts: tuple[int, ...] = (1024, 16_384, 65_536)
    layers: int | None = None
    dtypes: tuple[torch.dtype, ...] = tuple(DTYPES.values())
    parts: tuple[str, ...] = PARTS
    compiled: bool = False

    def rows(self) -> Iterator[dict]:
        """All rows of the table, in its order."""
        cases = [(backbone, dtype) for backbone in BACKBONES for dtype in self.dtypes]
        if "training" in self.parts:
            for backbone, dtype in cases:
                yield from self.training(backbone, dtype)
        if "prefill" in self.parts and self.contexts:
            for backbone, dtype in cases:
                yield from self.prefill(backbone, dtype)
        if "decoding" in self.parts and self.contexts:
            bandwidth = read_bandwidth(self.device)
            for backbone, dtype in cases:
                for context in self.contexts:
                    yield from self.decoding(backbone, dtype, context, bandwidth)
                yield self.block(backbone, dtype)
            yield self.length()

    def subject(self, backbone: str) -> Subject:
        """The preset; of a hybrid cut to two layers one of each kind."""
        whole = preset_subject(self.size, backbone)
        if self.layers is None:
            return whole
        pattern = whole.config.pattern[: self.layers]
        if backbone == "hybrid" and len(set(pattern)) == 1:
            pattern = pattern[:-1] + "A"
        config = replace(whole.config, pattern=pattern)
        return replace(whole, config=config, fingerprint=f"{whole.fingerprint}-{pattern}")

    def training(self, backbone: str, dtype: torch.dtype) -> Iterator[dict]:
        """A training step over its floor, and over one plain stream of the same model and tokens."""
        subject = self.subject(backbone)
        model = build(subject, dtype=torch.float32, device=self.device).train().requires_grad_(True)
        case = training_case(subject.config, batch=self.batch, row_length=self.row_length, device=self.device)
        floor = training_floor(
            subject.config,
            batch=self.batch,
            row_length=self.row_length,
            masked=int(case.masked.sum()),
            dtype=dtype,
            device=self.device,
        )
        calls: dict[str, Callable[[], object]] = {
            "step": two_stream_step(model, case, autocast=dtype),
            "floor": floor,
            "one": one_stream_step(model, case, autocast=dtype),
        }
        times = interleave(calls, protocol=self.protocol, device=self.device)
        about = {"step": f"training, {self.batch} x {self.row_length}", "model": backbone, "dtype": dtype_name(dtype)}
        aim = TRAINING_AIMS[dtype]["M" in subject.config.pattern]
        yield about | _ratio(times["step"], times["floor"], beside="floor", aim=aim)
        yield about | _ratio(times["step"], times["one"], beside="one stream", aim=STREAMS_AIM)

    def prefill(self, backbone: str, dtype: torch.dtype) -> Iterator[dict]:
        """A prompt read in chunks, over a training forward of one plain stream of its tokens, and over its floor."""
        subject = self.subject(backbone)
        config, tokens = subject.config, self._prompt
        model = build(subject, dtype=dtype, device=self.device).requires_grad_(True)
        prompt = random_tokens(config, 1, tokens, generator=torch.Generator().manual_seed(0)).to(self.device)
        state = model.start(1, tokens)
        calls: dict[str, Callable[[], object]] = {
            "prefill": lambda: prefill(model, prompt, state, chunk=PREFILL_CHUNK),
            "forward": lambda: one_stream_hidden(model, prompt, dtype),
            "floor": prefill_floor(config, tokens=tokens, dtype=dtype, device=self.device),
        }
        times = interleave(calls, protocol=self.protocol, device=self.device)
        about = {"step": f"prefill of {short_count(tokens)}", "model": backbone, "dtype": dtype_name(dtype)}
        yield about | _ratio(times["prefill"], times["forward"], beside="training forward", aim=PREFILL_AIM)
        aim = DECODING_AIMS["M" in config.pattern]
        yield about | _ratio(times["prefill"], times["floor"], beside="floor", aim=aim)

    @property
    def _prompt(self) -> int:
        return PREFILL_CHUNK if self.protocol == QUICK else PREFILL_TOKENS

    def decoding(self, backbone: str, dtype: torch.dtype, context: int, bandwidth: float) -> Iterator[dict]:
        """A denoising step and an advance at `context` over their floors, as they are and compiled."""
        subject = self.subject(backbone)
        config = subject.config
        model = build(subject, dtype=dtype, device=self.device)
        ways = {"": run_layer} | ({", compiled": CompiledLayers()} if self.compiled else {})
        calls = {way: _passes_at(model, context, run) for way, run in ways.items()}
        reading = state_read_seconds(config, batch=1, context=context, itemsize=dtype.itemsize, bandwidth=bandwidth)
        for name, blocks in (("denoise", 1), ("advance", 2)):
            floor = decode_floor(config, batch=1, context=context, dtype=dtype, device=self.device, passes=blocks)
            timed = {way: calls[way][name] for way in ways} | {"floor": floor}
            times = interleave(timed, protocol=self._decoding, device=self.device)
            parts = {"floor_products_ms": times["floor"].p50 * 1e3, "floor_reading_ms": reading * 1e3}
            aim = DECODING_AIMS["M" in config.pattern]
            for way in ways:
                step = f"{name} at {short_count(context)}{way}"
                about = {"step": step, "model": backbone, "dtype": dtype_name(dtype)}
                yield about | _ratio(times[way], times["floor"], beside="floor", aim=aim, more=reading) | parts

    def block(self, backbone: str, dtype: torch.dtype) -> dict:
        """A block of BLOCK_STEPS steps with sampling, over its passes: all but one denoise, and an advance."""
        model, context = build(self.subject(backbone), dtype=dtype, device=self.device), self.contexts[0]
        generator, steps = torch.Generator().manual_seed(0), BLOCK_STEPS
        state = model.start(1, context + 2 * model.config.block_length)
        state = fill_random(state, length=context, generator=generator)
        calls = passes(model, state, chunk=model.config.block_length, generator=generator)
        block = block_decoder(model, state, steps=steps, generator=generator)

        def alone() -> None:
            calls["advance"]()
            for _ in range(steps - 1):
                calls["denoise"]()

        times = interleave({"block": block, "passes": alone}, protocol=self._decoding, device=self.device)
        about = {"step": f"block of {steps} steps at {short_count(context)}", "model": backbone}
        beside = f"{steps - 1} denoise, 1 advance"
        return (
            about | {"dtype": dtype_name(dtype)} | _ratio(times["block"], times["passes"], beside=beside, aim=BLOCK_AIM)
        )

    @property
    def _decoding(self) -> Protocol:
        return QUICK if self.protocol == QUICK else DECODING

    def length(self) -> dict:
        """Mamba's denoising step at 256k over the same at 1k."""
        model = build(self.subject("mamba"), dtype=torch.float32, device=self.device)
        calls = {name: _passes_at(model, length)["denoise"] for name, length in (("long", 262_144), ("short", 1024))}
        longer = replace(self.protocol, steps=100)
        times = interleave(calls, protocol=longer, device=self.device)
        about = {"step": "denoise at 256k", "model": "mamba", "dtype": "float32"}
        return about | _ratio(times["long"], times["short"], beside="at 1k", aim=LENGTH_AIM)


def short_count(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _passes_at(model: Denoiser, length: int, run: LayerRun = run_layer) -> dict[str, Callable[[], object]]:
    generator = torch.Generator().manual_seed(0)
    state = fill_random(model.start(1, length + 2 * model.config.block_length), length=length, generator=generator)
    return passes(model, state, chunk=model.config.block_length, generator=generator, run=run)


def _ratio(timing: Timing, other: Timing, *, beside: str, aim: float, more: float = 0.0) -> dict:
    """One line of the table: `timing` over `other` with `more` seconds, by wall time and by processor time."""
    return {
        "ms": timing.p50 * 1e3,
        "beside": beside,
        "beside_ms": (other.p50 + more) * 1e3,
        "ratio": timing.p50 / (other.p50 + more),
        "cpu_ratio": timing.cpu / (other.cpu + more),
        "aim": aim,
        "spread": timing.p90 / timing.p10,
        "n": timing.n,
        "load": timing.load,
    }


def about_machine(device: str) -> dict:
    """What a benchmark ran on."""
    return {
        "machine": device_name(device),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "load": load_average(),
    }
