"""Study of cache policies on small trained models: where the approximate caches win, and where the exact one does.

    python eval/studies/caches.py                  all of it: teach what is missing, ask, table and figure
    python eval/studies/caches.py --parts affix    some parts: affix, packet, recall, text
    python eval/studies/caches.py --report         the table and the figure of what there is
    python eval/studies/caches.py --dry-run        the commands alone

affix: ACache on a bidirectional model, the shared part at three places and at several ratios of anchors. packet: KV Packet
on the same task and model, documents read alone with and without trained soft tokens. recall: all policies on four models of
that task. text: all policies on four models of the default corpus, at several lengths. Everything goes on where it stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import caches_report  # beside this file
from caches_task import Recall
from caches_teach import PATTERNS, Lesson, teach_recall
from teaching import Setting, call, train

from mezzotint.data.cli import run_command
from mezzotint.data.errors import InputError
from mezzotint.eval.cells import parse_counts

FOLDER = Path(__file__).with_name("caches")  # of the table and the figure
PARTS = ("affix", "packet", "recall", "text")
RATIOS = "0/0.125/0.25/0.5/0.75/1"
SHARED = 6  # entries of the shared part
DOCUMENTS = 2  # of KV Packet, which hold all entries
BIDIRECTIONAL = (
    "fast:mode=prefix/dual",
    "entropy:threshold=0.1/1",
    "dllm",
    "polestar",
    "acache:ratio=0/0.25",
    "bicache",
)
CAUSAL = ("fast:mode=dual", "fork", "drop:keep=0.5")
SUB_BLOCK = 4  # tokens that a block is decoded in, for the dual cache inside a block
TEXT_STEPS = 300
NEW_TOKENS = 64  # of text
TEXT_ENTROPY = "entropy:threshold=3/5/7/8"  # nats; a uniform guess has 7.6, and such a model is never sure
TEXT = {
    "row": ("model.backbone=attention", "model.pattern=AAAA", "model.block=row"),
    "attention": ("model.backbone=attention", "model.pattern=AAAA"),
    "mamba": ("model.backbone=mamba", "model.pattern=MMMM"),
    "hybrid": ("model.backbone=hybrid", "model.pattern=MMMA"),
}
SMALL = ("model.d_model=96", "model.d_ff=256", "model.n_heads=3", "model.n_kv_heads=3", "optim.warmup_steps=30")


@dataclass(frozen=True, kw_only=True)
class Study:
    """Where things go and how much is asked."""

    setting: Setting
    samples: int
    lengths: str  # of text

    @property
    def out(self) -> Path:
        return self.setting.out

    def results(self, name: str) -> Path:
        return self.out / "answers" / f"{name}.jsonl"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; exit code 2 with a sentence where a step fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/caches"), metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--parts", default=",".join(PARTS), metavar="LIST", help="default: %(default)s")
    parser.add_argument(
        "--samples", type=int, default=400, metavar="N", help="prompts of affix and packet (default: 400)"
    )
    parser.add_argument("--lengths", default="256,512,1k", metavar="LIST", help="of text (default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="write the table and the figure, run nothing")
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, metavar="DIR", help="of both (default: beside this file)"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run none")
    given = parser.parse_args(arguments)
    return run_command(lambda: _main(given))


def _main(given: argparse.Namespace) -> int:
    parts = given.parts.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise InputError(f"no part {unknown[0]!r} in the study; one of {', '.join(PARTS)}")
    if given.samples < 20 or given.samples % 20:
        raise InputError(f"--samples is {given.samples}; give a multiple of 20")
    if min(parse_counts(given.lengths)) <= NEW_TOKENS:
        raise InputError(f"--lengths {given.lengths} leaves no prompt before {NEW_TOKENS} new tokens; take longer ones")
    setting = Setting(out=given.out, block=16, minutes=0, samples=0, dry_run=given.dry_run)
    study = Study(setting=setting, samples=given.samples, lengths=given.lengths)
    if not given.report:
        steps = {"affix": ask_affixes, "packet": ask_packets, "recall": ask_recall, "text": ask_text}
        for part in parts:
            steps[part](study)
    if not given.dry_run:
        print(caches_report.write(given.out / "answers", given.folder))
    return 0


def task_of(kind: str) -> Recall:
    """A bidirectional row has more questions: a block-causal one asks those of one block."""
    return Recall(asked=8 if kind == "row" else 4)


def taught(study: Study, kind: str) -> Path:
    release = study.out / "recall" / kind
    return release if study.setting.dry_run else teach_recall(kind, Lesson(task=task_of(kind)), release)


def _prompts(
    study: Study, name: str, task: Recall, count: int, *, seed: int, shared: tuple[tuple[int, int], ...]
) -> Path:
    path = study.out / "prompts" / f"{name}.jsonl"
    return path if study.setting.dry_run else task.write_prompts(path, count, seed=seed, shared=shared)


def ask_affixes(study: Study) -> None:
    """The shared part before, between and behind the request's own entries, from direct reuse to full recomputation."""
    release, task = taught(study, "row"), task_of("row")
    for place, span in task.places(SHARED).items():
        prompts = _prompts(study, place, task, study.samples, seed=10, shared=(span,))
        _compare(study, f"affix-{place}", release, (f"acache:ratio={RATIOS}",), prompts, study.samples, batch=20)


def ask_packets(study: Study) -> None:
    """All entries in documents that are read alone; their soft tokens are trained on rows of other seeds."""
    release, task = taught(study, "row"), task_of("row")
    each = task.keys // DOCUMENTS
    spans = tuple((number * each, (number + 1) * each) for number in range(DOCUMENTS))
    # prompts of seed 11 were looked at while the soft tokens were chosen; 900 steps on 8 and 8 of them came to nothing
    prompts = _prompts(study, "packets", task, study.samples, seed=21, shared=spans)
    run, text = study.out / "adapters", study.out / "data" / "recall"
    if not study.setting.dry_run:
        task.write_text(text, 20_000, seed=12)
    adapters = run / "adapters.safetensors"
    if not adapters.exists():
        shape = ["--row-length", str(task.length), "--documents", str(DOCUMENTS)]
        share = ["--share", f"{(task.keys + 0.5) / task.length:.4f}", "--header", "4", "--trailer", "4"]
        how = ["--steps", "300", "--rows-per-step", "16", "--lr", "1e-2", "--run", str(run)]
        call(
            study.setting, "mezzotint.launch.train", "adapters", str(release), "--data", str(text), *shape, *share, *how
        )
    _compare(study, "packets", release, ("packet", f"packet:adapters={adapters}"), prompts, study.samples, batch=20)


def ask_recall(study: Study) -> None:
    """Every policy that has an object, one request at a time."""
    for kind in PATTERNS:
        task, release = task_of(kind), taught(study, kind)
        span = (0, task.keys if kind != "row" else SHARED)
        prompts = _prompts(study, kind, task, 100, seed=13, shared=(span,))
        policies = BIDIRECTIONAL if kind == "row" else CAUSAL
        _compare(study, f"recall-{kind}", release, policies, prompts, 100, batch=1)


def _compare(
    study: Study, name: str, release: Path, policies: tuple[str, ...], prompts: Path, samples: int, *, batch: int
) -> None:
    asked = ["--prompts", str(prompts), "--samples", str(samples), "--batch", str(batch), "--block", "16"]
    how = ["--policies", *policies, "--draws", "4" if batch == 1 else "0", "--out", str(study.results(name))]
    call(study.setting, "mezzotint.eval", "caches", str(release), *asked, *how)


def ask_text(study: Study) -> None:
    """Four models of the default corpus; half of every prompt is a prefix that requests share."""
    place = study.out / "text"
    data = _corpus(study, place)
    for name, own in TEXT.items():
        run, release = place / "runs" / name, place / "releases" / f"text-{name}"
        sources = [f"data.sources=[[{data / 'train'},1.0]]", f"validation.folder={data / 'heldout'}"]
        shape = [f"run={run}", f"steps={TEXT_STEPS}", *own, *SMALL, *sources]
        train(study.setting, run, ["mezzotint.launch.train", "demo", *shape], steps=TEXT_STEPS)
        if not (release / "training.yaml").exists():
            call(study.setting, "mezzotint.launch.export", str(run), str(release), "--overwrite")
        policies = (*BIDIRECTIONAL, TEXT_ENTROPY) if name == "row" else CAUSAL
        batch = "1" if name == "row" else "1,8"  # together they share the prefix
        _continue(study, f"text-{name}", release, data, policies, "--shared", "prefix=0.5", "--batch", batch)
        if name == "attention":  # a Mamba layer reads a block as one run
            policies = ("fast:mode=dual:refresh=0/2",)
            _continue(study, f"sub-{name}", release, data, policies, "--sub-block", str(SUB_BLOCK))


def _continue(study: Study, name: str, release: Path, data: Path, policies: tuple[str, ...], *how: str) -> None:
    asked = ["--data", str(data / "heldout"), "--lengths", study.lengths, "--new-tokens", str(NEW_TOKENS)]
    rules = ["--samples", "8", "--policies", *policies, "--reveal", "threshold=0.5", "--out", str(study.results(name))]
    call(study.setting, "mezzotint.eval", "caches", str(release), *asked, *how, *rules)


def _corpus(study: Study, place: Path) -> Path:
    """The default corpus as the demo prepares it."""
    share = ["--corpus", "stdlib", "--heldout", "0.03"]
    tokenizer, data = place / "tokenizer", place / "data"
    if not (tokenizer / "tokenizer.model").exists():
        call(
            study.setting, "mezzotint.data", "train-tokenizer", *share, "--vocab-size", "2048", "--out", str(tokenizer)
        )
    call(study.setting, "mezzotint.data", "prepare", *share, "--tokenizer", str(tokenizer), "--out", str(data))
    return data


if __name__ == "__main__":
    raise SystemExit(main())
