"""`mezzotint-export`: a run folder becomes a release folder, loaded again and compared before it gets its name."""

from __future__ import annotations

import argparse
import glob
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from mezzotint.data.cli import run_command
from mezzotint.models.errors import InputError

if TYPE_CHECKING:
    from mezzotint.data.tokenizer import Tokenizer
    from mezzotint.launch.model_card import Facts
    from mezzotint.models.config import ModelConfig
    from mezzotint.models.denoiser import Denoiser

DTYPES = ("float32", "bfloat16", "float16")
AUTO_MAP = {
    "AutoConfig": "hf.MezzotintConfig",
    "AutoModel": "hf.MezzotintModel",
    "AutoModelForMaskedLM": "hf.MezzotintModel",
}


def main(arguments: list[str] | None = None) -> int:
    """The command; exit code 2 on bad input."""
    parser = argparse.ArgumentParser(
        prog="mezzotint-export",
        description="Turn the newest checkpoint of a run into a folder that mezzotint-eval and transformers can load.",
    )
    parser.add_argument("run", metavar="RUN_FOLDER", help="run folder of mezzotint-train, e.g. runs/demo/runs/mamba")
    parser.add_argument("out", metavar="OUT", help="release folder to make; an existing one only with --overwrite")
    parser.add_argument(
        "--ema",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="export the averaged weights, or not; without it they are used if the run kept them",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (time scales stay float32)")
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer file or prepared folder, if the data has moved")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is a release")
    given = parser.parse_args(arguments)

    from safetensors import SafetensorError

    return run_command(lambda: _export(given), InputError, SafetensorError)  # a full disk is the latter


def _export(given: argparse.Namespace) -> int:
    import torch

    from mezzotint.data.tokenizer import load_tokenizer
    from mezzotint.launch.model_card import Facts
    from mezzotint.models.denoiser import Denoiser
    from mezzotint.training import checkpoint, strict

    run = Path(given.run)
    folder = checkpoint.newest(run, print) if run.is_dir() else None
    if folder is None:
        raise InputError(f"{run} is no run folder with a checkpoint: train first")
    state = checkpoint.read_state(folder)
    recipe = strict.parse_yaml(state.recipe, source=f"the recipe in {folder}")
    ema = state.ema_updates > 0 if given.ema is None else given.ema
    config, weights = checkpoint.read_weights(folder, ema=ema)
    with torch.device("meta"):
        model = Denoiser(config)
    model.load_state_dict(weights, assign=True)
    tokenizer = load_tokenizer(given.tokenizer or recipe["data"]["sources"][0][0])
    _check_tokenizer(tokenizer, config, state.tokenizer_hash)
    trained = {
        "optimizer steps": state.step,
        "rows seen": f"{state.next_row:,} of {recipe['data']['row_length']} tokens",
        "averaged weights": f"yes (decay {recipe['ema_decay']})" if ema else "no",
        "seed": state.seed,
        "data, hash": f"`{state.data_hash}`",
        "tokenizer, hash": f"`{state.tokenizer_hash}`",
        **_last_validation(run, state.step),
    }
    facts = Facts(trained=trained, dtype=given.dtype)
    difference = write_release(given.out, model, tokenizer, recipe=state.recipe, facts=facts, overwrite=given.overwrite)
    print(f"{given.out}: step {state.step}, reloaded; largest difference of a logit {difference:.3g}")
    return 0


def write_release(
    out: str | Path, model: Denoiser, tokenizer: Tokenizer, *, recipe: str, facts: Facts, overwrite: bool = False
) -> float:
    """Write a release of `model` to `out`, whole or not at all; the largest difference of a logit after loading it.

    recipe: YAML, becomes training.yaml. Raises InputError if `out` exists (unless `overwrite`), and if the loaded model
    differs by more than the dtype explains.
    """
    import dataclasses

    import torch

    from mezzotint.launch.bundle import bundle_files
    from mezzotint.launch.model_card import model_card
    from mezzotint.launch.release_tokenizer import write_tokenizer
    from mezzotint.models.weights import load_model, save_weights

    out = Path(out)
    if out.exists() and not overwrite:
        raise InputError(f"{out} exists: give another folder, or --overwrite")
    if out.exists() and not (out / "training.yaml").is_file():
        raise InputError(f"{out} is no release folder, and --overwrite replaces nothing else: give another folder")
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    _sweep(out)
    beside = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    try:
        beside.mkdir()
        note = write_tokenizer(tokenizer, beside)
        about = {"architectures": ["MezzotintModel"], "auto_map": AUTO_MAP}
        save_weights(model, beside, dtype=getattr(torch, facts.dtype), about=about)
        for name, text in bundle_files().items():
            (beside / name).write_text(text, encoding="utf-8")
        (beside / "generation_config.json").write_text(_generation_config(model.config), encoding="utf-8")
        (beside / "training.yaml").write_text(recipe, encoding="utf-8")
        card = model_card(model.config, dataclasses.replace(facts, tokenizer_note=note))
        (beside / "README.md").write_text(card, encoding="utf-8")
        difference = _compare(model, load_model(beside, dtype=model.embed.weight.dtype))
        allowed = 1e-5 if facts.dtype == "float32" else 0.5
        if not difference <= allowed:
            raise InputError(
                f"the model loaded again from {beside} differs by {difference:.3g} in a logit; nothing was released"
            )
        _put(beside, out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return difference


def _compare(model: Denoiser, loaded: Denoiser) -> float:
    """Largest difference of a logit over three blocks of random tokens, half of them masked."""
    import torch

    config = model.config
    g = torch.Generator().manual_seed(0)
    clean = torch.randint(config.vocab_size, (2, 2 * config.block_length), generator=g)
    noisy = torch.randint(config.vocab_size, (2, 3, config.block_length), generator=g)
    noisy = noisy.masked_fill(torch.rand(noisy.shape, generator=g) < 0.5, config.mask_token_id)
    device = model.embed.weight.device
    frontiers = torch.arange(3).expand(2, -1)
    with torch.no_grad():
        want = model(clean.to(device), noisy.to(device), frontiers).double().cpu()
        got = loaded(clean, noisy, frontiers).double()
    finite = want.isfinite()
    if not torch.equal(finite, got.isfinite()):
        return float("inf")
    return (want - got)[finite].abs().max().item()


def _generation_config(config: ModelConfig) -> str:
    values = {
        "do_sample": True,
        "max_new_tokens": 128,
        "reveal": f"topk={max(config.block_length // 4, 1)}",
        "temperature": 1.0,
        "top_p": 1.0,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    return json.dumps(values, indent=2) + "\n"


def _check_tokenizer(tokenizer: Tokenizer, config: ModelConfig, trained_with: str) -> None:
    path = tokenizer.files[0]
    if tokenizer.sha256 != trained_with:
        raise InputError(
            f"{path} is not the tokenizer the run was trained with (its hash differs): name it with --tokenizer"
        )
    own = (config.mask_token_id, config.eos_token_id, config.pad_token_id)
    if tokenizer.vocab_size > config.vocab_size or (tokenizer.mask_id, tokenizer.eos_id, tokenizer.pad_id) != own:
        raise InputError(f"{path} has other ids than the model: it was trained with another tokenizer")


def _last_validation(run: Path, step: int) -> dict[str, str]:
    """The bound of the last validation up to `step` in metrics.jsonl, if there was one."""
    from mezzotint.training.metrics import read_records

    path = run / "metrics.jsonl"
    records = read_records(path) if path.is_file() else []
    kept = [record for record in records if record["kind"] == "validation" and record["step"] <= step]
    units = {"bits_per_byte": "bits/byte", "nats_per_token": "nats/token"}
    return {
        f"held-out bound, {unit}": f"{kept[-1][name]:.4f} ± {kept[-1][name + '_error']:.4f} (step {kept[-1]['step']})"
        for name, unit in units.items()
        if kept
    }


def _sweep(out: Path) -> None:
    """Remove what exports to `out` left behind that were killed."""
    for kind in ("tmp", "old"):
        for left in out.parent.glob(f"{glob.escape(out.name)}.{kind}-*"):
            try:
                os.kill(int(left.name.rpartition("-")[2]), 0)  # asks whether the process is there
            except ProcessLookupError:
                shutil.rmtree(left, ignore_errors=True)
            except (ValueError, OSError):
                pass  # not ours, or somebody else's


def _put(beside: Path, out: Path) -> None:
    """Give `beside` the name `out`; an older folder of that name is gone only once the new one stands."""
    old = out.with_name(f"{out.name}.old-{os.getpid()}")
    if out.exists():
        out.rename(old)
    beside.rename(out)
    shutil.rmtree(old, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
