"""Results files as the commands write them, made up: rows of retrieval, bound, lm-eval and speed."""

from __future__ import annotations

import random
from pathlib import Path

from mezzotint.eval.results import ResultsFile

TRAINED = 256


def retrieval_row(subject: str, length: int, index: int, *, correct: bool, needle: bool = True, **changed) -> dict:
    """Identity and values of one sample of a passkey, ten depths in turn."""
    identity = {
        "task": "retrieval/passkey", "subject": subject, "length": length, "depth": round(index % 10 / 9, 6), "index": index,
        "seed": 0, "needle": needle, "options": {"digits": 5, "haystack": "noise"}, "vocabulary": "v1",
        "decoding": "threshold=0.9 temperature=0", "draws": 32, "dtype": "float32", "device": "cpu",
    }  # fmt: skip
    values = {
        "correct": correct, "part": float(correct), "substring": float(correct or index % 5 == 0),
        "argmax": 0.5 + correct / 2, "nats": 1.0 - correct + 0.1 * (index % 3), "answer_tokens": 5, "fill": 0.99,
        "prompt_tokens": length - 8,
        "prompt": f"hash-{length}-{index}-{needle}", "written": "12345" if correct else "", "wanted": ["12345"],
        "ended": correct, "nfe": 4, "seconds": 0.1, "trained": TRAINED, "positions": "rope",
    }  # fmt: skip
    return {"identity": identity | changed.pop("identity", {}), "status": "ok", "values": values | changed}


def retrieval_rows(subject: str, shares: dict[int, float], *, samples: int = 40, needle: bool = True) -> list[dict]:
    """`samples` rows a length, of which the given share is right, drawn alike for all subjects."""
    rows = []
    for length, share in shares.items():
        rng = random.Random(length)
        for index in range(samples):
            rows.append(retrieval_row(subject, length, index, correct=rng.random() < share, needle=needle))
    return rows


def bound_rows(subject: str, *, worse: float = 0.0, rows: int = 12, text: str = "t1") -> list[dict]:
    out = []
    for number in range(rows):
        rng = random.Random(number)
        parts = [
            [edge, tokens * (2.0 + worse + rng.random() / 5), tokens]
            for edge, tokens in ((0, 64), (64, 64), (128, 128))
        ]
        levels = [[i / 10, 25.6 * (i / 10 + worse), 25.6] for i in range(10)]
        levels[0] = [0.0, 0.0, 0.0]  # few draws leave bins empty
        identity = {
            "task": "bound", "subject": subject, "draws": 32, "design": "balanced-1", "seed": 0, "dtype": "float32",
            "device": "cpu", "text": text, "row_length": 256, "row": number,
        }  # fmt: skip
        values = {
            "nats": sum(nats for _, nats, _ in parts), "tokens": 256, "bytes": 900, "documents": 1, "monte_carlo_error": 0.5,
            "by_position": parts, "by_level": levels,
        }  # fmt: skip
        out.append({"identity": identity, "status": "ok", "values": values})
    return out


def harness_rows(subject: str, *, right: int, documents: int = 50) -> list[dict]:
    identity = {"task": "lm-eval/piqa", "subject": subject, "lm_eval": "0.4.13", "limit": None, "decoding": "Threshold"}
    share = right / documents
    values = {
        "metric": "acc", "value": share, "stderr": 0.05, "n": documents, "task_version": 1.0, "num_fewshot": 0,
        "prompts": "h1",
        "metrics": {"acc": {"value": share, "stderr": 0.05}, "bits_per_byte": {"value": 1.5, "stderr": None}},
        "samples": {
            "acc": [float(i < right) for i in range(documents)],
            "nats": [100.0 - right + i % 3 for i in range(documents)], "tokens": [50.0] * documents,
        },
    }  # fmt: skip
    return [{"identity": identity, "status": "ok", "values": values}]


def speed_rows(subject: str, *, growth: float, fits: int = 65536, batches: tuple[int, ...] = (1,)) -> list[dict]:
    """Cells of 1k to 256k: 10 ms and `growth` ms a thousand tokens; larger contexts than `fits` did not fit."""
    out = []
    for context in (1024, 16384, 65536, 262144):
        for batch in batches:
            identity = {
                "task": "speed", "subject": subject, "context": context, "batch": batch, "mode": "eager", "dtype": "float32",
                "device": "cpu", "machine": "A processor", "threads": 1, "prefill_chunk": 512, "protocol": "full",
            }  # fmt: skip
            values: dict = {
                "parameters": 10**7, "weight_bytes": 4 * 10**7, "state_bytes": batch * context * 100,
                "needed_bytes": 4 * 10**7 + batch * context * 100, "available_bytes": 10**10,
                "floor_h100_s": 1e-5, "floor_h100_fits": True, "floor_h200_s": 8e-6, "floor_h200_fits": context < 200_000,
            }  # fmt: skip
            status = "ok" if context <= fits else "skipped_predicted_oom"
            if status == "ok":
                step = batch * (0.010 + growth * context / 1024 / 1000)
                for name, scale in (
                    ("denoise", 1.0),
                    ("advance", 1.9),
                    ("commit", 1.0),
                    ("prefill", 9.0),
                    ("block", 9.0),
                ):
                    values |= {f"{name}_p10_s": 0.9 * step * scale, f"{name}_s": step * scale}
                    values |= {f"{name}_p90_s": 1.1 * step * scale, f"{name}_cpu_s": step * scale, f"{name}_n": 30}
                values |= {"floor_s": step / 2, "load": 0.5, "peak_bytes": values["needed_bytes"] + 10**6, "torch": "2"}
                values |= {f"tokens_per_s_{steps}": batch * 32 / steps / step for steps in (4, 8, 16, 32)}
                values |= {
                    "prefill_tokens_per_s": 512 / step,
                    "first_block_8_s": context * step,
                    "block_tokens_per_s": 3 / step,
                }
                values |= {"process_decode_peak_bytes": 4 * 10**8, "process_prefill_peak_bytes": 5 * 10**8}
            out.append({"identity": identity, "status": status, "values": values})
    return out


def write_results(path: Path, rows: list[dict], *, fingerprint: str = "f1") -> Path:
    """A results file of the subjects of `rows`."""
    names = {row["identity"]["subject"]: fingerprint for row in rows}
    with ResultsFile(path, subjects=names) as results:
        for row in rows:
            results.append(row["identity"], status=row["status"], values=row["values"])
    return path
