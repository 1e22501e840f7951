"""Our steps beside other people's models of the same size, in one run: transformers' Mamba2 and Llama, a dense mask.

    python -m mezzotint.eval.bench_peers

Prints a Markdown table and writes it to runs/bench/peers.md and .json. One thread; medians of interleaved samples. A ratio
is the peer's time over ours for the same number of tokens: larger is better for us.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mezzotint.data.cli import run_command
from mezzotint.data.files import write_bytes, write_json
from mezzotint.eval.bench_rows import FULL, QUICK, about_machine, dtype_name
from mezzotint.eval.bench_training import one_stream_step, training_case, two_stream_step
from mezzotint.eval.fill import fill_random
from mezzotint.eval.peers import LlamaDecoder, dense_mask_step, llama, mamba2, peer_step
from mezzotint.eval.speed_passes import block_decoder
from mezzotint.eval.subjects import build, preset_subject
from mezzotint.eval.timing import Protocol, Timing, interleave
from mezzotint.models.allocator import keep_freed_memory
from mezzotint.models.errors import InputError

DTYPES = (torch.float32, torch.bfloat16)
STEPS = 8  # denoising steps of a block
LLAMA_TOKENS = 8  # tokens of one sample of Llama's decoding, after which its cache is cut back
# ratios aimed at: training of Mamba and attention, two streams over a dense mask, decoding in bfloat16
MAMBA_AIM, ATTENTION_AIM, DENSE_AIM, DECODING_AIMS = 15.0, 1.1, 2.0, {"attention": 2.0, "mamba": 20.0}


@dataclass(frozen=True)
class Bench:
    """What is measured: models of preset `size`; training rows of `row_length` tokens, decoding behind `context`."""

    size: str
    protocol: Protocol
    row_length: int = 1024
    dense_length: int = 2048
    context: int = 16_384

    def rows(self) -> Iterator[dict]:
        """All rows of the table, in its order."""
        for dtype in DTYPES:
            for backbone in ("mamba", "attention"):
                yield self.one_stream(backbone, dtype)
            yield self.dense(dtype)
            for backbone in ("attention", "mamba"):
                yield self.decoding(backbone, dtype)

    def one_stream(self, backbone: str, dtype: torch.dtype) -> dict:
        """A training step of one stream, loss at every token, beside transformers' model of as many parameters."""
        subject = preset_subject(self.size, backbone)
        model = build(subject, dtype=torch.float32, device="cpu").train().requires_grad_(True)
        case = training_case(subject.config, batch=1, row_length=self.row_length)
        everywhere = torch.ones_like(case.masked)
        case = replace(case, masked=everywhere, weights=torch.ones(int(everywhere.sum())))
        peer = mamba2(subject.config) if backbone == "mamba" else llama(subject.config, length=self.row_length)
        calls = {
            "ours": one_stream_step(model, case, autocast=dtype),
            "theirs": peer_step(peer, case.clean, autocast=dtype),
        }
        aim = MAMBA_AIM if backbone == "mamba" else ATTENTION_AIM
        about = {"what": f"training, one stream of {self.row_length}", "model": backbone, "peer": peer.name}
        return about | self._compare(calls, dtype, aim=aim)

    def dense(self, dtype: torch.dtype) -> dict:
        """Two streams of attention beside the same through one dense mask."""
        subject = preset_subject(self.size, "attention")
        model = build(subject, dtype=torch.float32, device="cpu").train().requires_grad_(True)
        case = training_case(subject.config, batch=1, row_length=self.dense_length)
        calls = {
            "ours": two_stream_step(model, case, autocast=dtype),
            "theirs": dense_mask_step(model, case, autocast=dtype),
        }
        about = {"what": f"training, two streams of {self.dense_length}", "model": "attention", "peer": "dense mask"}
        return about | self._compare(calls, dtype, aim=DENSE_AIM)

    def decoding(self, backbone: str, dtype: torch.dtype) -> dict:
        """Seconds a token behind a long context: a block of STEPS steps beside Llama, one token at a time."""
        subject = preset_subject(self.size, backbone)
        config, generator = subject.config, torch.Generator().manual_seed(0)
        model = build(subject, dtype=dtype, device="cpu")
        state = model.start(1, self.context + 2 * config.block_length)
        ours = block_decoder(
            model, fill_random(state, length=self.context, generator=generator), steps=STEPS, generator=generator
        )
        beside = preset_subject(self.size, "attention").config
        peer = llama(beside, length=2 * self.context)
        decoder = LlamaDecoder(peer, context=self.context, dtype=dtype)

        def theirs() -> None:
            for _ in range(LLAMA_TOKENS):
                decoder()
            decoder.cut()

        tokens = {"ours": config.block_length, "theirs": LLAMA_TOKENS}
        about = {"what": f"decoding at {self.context}, a token", "model": backbone, "peer": peer.name}
        aim = DECODING_AIMS[backbone] if dtype == torch.bfloat16 else None
        return about | self._compare({"ours": ours, "theirs": theirs}, dtype, aim=aim, tokens=tokens)

    def _compare(
        self,
        calls: Mapping[str, Callable[[], object]],
        dtype: torch.dtype,
        *,
        aim: float | None,
        tokens: dict[str, int] | None = None,
    ) -> dict:
        times = interleave(calls, protocol=self.protocol)
        share = {name: 1 if tokens is None else tokens[name] for name in calls}
        wall, cpu = ({n: each(times[n]) / share[n] for n in calls} for each in (_wall, _cpu))
        return {
            "dtype": dtype_name(dtype),
            "ms": wall["ours"] * 1e3,
            "peer_ms": wall["theirs"] * 1e3,
            "ratio": wall["theirs"] / wall["ours"],
            "cpu_ratio": cpu["theirs"] / cpu["ours"],
            "aim": aim,
            "n": times["ours"].n,
            "load": times["ours"].load,
        }


def _wall(timing: Timing) -> float:
    return timing.p50


def _cpu(timing: Timing) -> float:
    return timing.cpu


def table(report: dict) -> str:
    """Markdown."""
    lines = [
        f"{report['machine']}, {report['cores']} cores, one thread, torch {report['torch']}, transformers "
        f"{report['transformers']} (plain torch paths), preset {report['size']}; {report['seconds']:.0f} s. Training: "
        "forward and backward, loss at every token. Decoding: greedy, random weights and cache.",
        "",
        "| what | ours | dtype | ms | peer | ms | peer over ours | by CPU time | aim | load |",
        "|---|---|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        aim = "" if row["aim"] is None else f"{row['aim']:.1f}"
        lines.append(
            f"| {row['what']} | {row['model']} | {row['dtype']} | {row['ms']:.2f} | {row['peer']} | {row['peer_ms']:.2f} "
            f"| {row['ratio']:.2f} | {row['cpu_ratio']:.2f} | {aim} | {row['load']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mezzotint.eval.bench_peers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", default="10m", help="preset (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="two samples each: a check that everything runs")
    options = parser.parse_args(arguments)
    return run_command(lambda: run(options), InputError)


def run(options: argparse.Namespace) -> int:
    """Measure, printing every row as it comes; JSON and table are rewritten after each."""
    try:
        import transformers
    except ImportError:
        raise InputError("the benchmark needs transformers: pip install 'mezzotint[eval]'") from None
    torch.set_num_threads(1)
    keep_freed_memory()
    started, rows = time.perf_counter(), []
    for row in Bench(options.size, QUICK if options.quick else FULL).rows():
        rows.append(row)
        print(f"{row['what']:34} {row['model']:10} {row['dtype']:9} {row['ratio']:.2f}", file=sys.stderr, flush=True)
        report = about_machine("cpu") | {"size": options.size, "transformers": transformers.__version__}
        report |= {"seconds": time.perf_counter() - started, "rows": rows}
        write_json(options.out / "peers.json", report)
        write_bytes(options.out / "peers.md", table(report).encode())
    print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
