"""One glance at run folders of every kind: running, done, dead, damaged, empty; and the words of the command line."""

import os
import sys
import time
from pathlib import Path

from mezzotint.launch import train as command
from mezzotint.training import lock, outcome
from mezzotint.training.checkpoint import seal, write_synced
from mezzotint.training.glance import ago
from mezzotint.training.metrics import Log, LogConfig
from mezzotint.training.status import size, status

TRAIN = {"lr": 3e-4, "unique_tokens_per_second": 1234.4, "utilization": 0.4, "seconds_left": 7200.0}
SPLIT = {"seconds_per_step": 2.5, "seconds_data": 0.01, "seconds_forward": 1.0, "seconds_backward": 1.25}
BOUND = {"nats_per_token": 2.5, "nats_per_token_error": 0.25, "bits_per_byte": 1.25, "bits_per_byte_error": 0.125}


def run_folder(folder: Path, *, steps: int = 100) -> Path:
    """Thirty steps of two starts, a bound, a skipped step and two spikes."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"run: {folder}\nsteps: {steps}\n")
    log = Log(folder, first_step=0, config=LogConfig(tensorboard=False), recipe={})
    for step in range(1, 31):
        if step in (1, 11):
            log.write("start", step - 1, {"world": 2, "seconds": float(step)})
        values = {"loss": None if step == 29 else float(step), "gradient_norm": 0.5, "tokens": step * 1000}
        log.write("train", step, TRAIN | SPLIT | values | {"memory_bytes": 8 * 10**9, "seconds": 3600.0 * step / 30})
        for name, at in (("skipped", (29,)), ("spike", (7, 20))):
            if step in at:
                log.write("event", step, {"event": name, "seconds": 1.0})
    log.write("validation", 30, BOUND | {"seconds": 3600.0})
    log.close()
    for step in (20, 30):
        checkpoint(folder, step)
    return folder


def checkpoint(folder: Path, step: int) -> None:
    beside = folder / "checkpoints" / f"step-{step}.tmp"
    beside.mkdir(parents=True)
    entry = write_synced(beside / "weights", bytes(1_000_000))
    seal(beside, {"weights": entry}, beside.with_suffix(""))


def lines_of(text: str) -> dict[str, str]:
    """Subject -> text; the first line under ''."""
    first, *rest = text.splitlines()
    return {"": first} | {line.split()[0]: line.split(maxsplit=1)[1] for line in rest}


def test_a_run_at_a_glance(tmp_path):
    text, faults = status([run_folder(tmp_path / "run")])
    found = lines_of(text)
    assert not faults
    assert found[""] == f"{tmp_path}/run: died without a word: start it again to go on"
    assert found["step"] == "30 of 100 (30.0%)"
    assert found["time"] == "01:00:00 of training in 2 start(s), 02:00:00 left"
    assert found["tokens"] == "30,000"
    mean = (sum(range(11, 31)) - 29) / 19  # of the last 20 records one has no loss
    assert found["loss"] == f"{mean:.4f} nats/token, mean of the last 19 record(s); gradient norm 0.5000, rate 3.00e-04"
    assert found["bound"] == "2.5000 ± 0.2500 nats/token, 1.2500 ± 0.1250 bits/byte (step 30)"
    assert found["rate"].startswith("1,234 tokens/s, 40.0% of peak, 2.5 s a step: data 0.01, forward 1, backward 1.25")
    assert found["memory"] == "8.00 GB at most on a rank"
    assert found["checkpoint"] == "step-30, written 0 s ago"
    assert found["disk"].startswith("2.0") and found["disk"].endswith("MB")
    assert found["skipped"] == "1, the last at step 29" and found["spikes"] == "2, the last at step 20"


def test_who_runs_it_and_how_it_ended(tmp_path):
    folder = run_folder(tmp_path / "run")
    with lock.hold(folder):
        first = status([folder])[0].splitlines()[0]
        assert first == f"{folder}: running as process {os.getpid()} on {os.uname().nodename}, last record 0 s ago"
    assert "died without a word" in status([folder])[0]  # asking did not take the lock, nor keep it
    (folder / "lock").write_text('{"host": "far", "pid": 7}')
    assert "died without a word, unless it runs on far and its lock does not reach here" in status([folder])[0]
    for code, words in ((0, "done"), (85, "stopped and saved"), (86, "diverged"), (87, "hung"), (1, "crashed")):
        outcome.write(folder, code=code, step=42, reason="for a reason")
        first, step, *_ = status([folder])[0].splitlines()
        assert first == f"{folder}: {words} 0 s ago: for a reason" and "42 of 100" in step


def test_the_newest_checkpoint_is_a_complete_one(tmp_path):
    folder = run_folder(tmp_path / "run")
    hour = time.time() - 5400
    os.utime(folder / "checkpoints" / "step-20", (hour, hour))
    (folder / "checkpoints" / "step-30" / "weights").write_bytes(b"short")
    (folder / "checkpoints" / "step-40.tmp").mkdir()
    assert lines_of(status([folder])[0])["checkpoint"] == "step-20, written 90 min ago"
    (folder / "checkpoints" / "step-20" / "manifest.json").write_text("{")
    assert lines_of(status([folder])[0])["checkpoint"] == "none"


def test_several_runs_are_a_table_and_what_is_none_a_sentence(tmp_path):
    first, second = run_folder(tmp_path / "one"), run_folder(tmp_path / "two", steps=30)
    outcome.write(second, code=0, step=30, reason="all steps done")
    (tmp_path / "empty").mkdir()
    text, faults = status([first, tmp_path / "empty", second, tmp_path / "nowhere"])
    head, one, two = text.splitlines()
    assert head.split()[:4] == ["run", "state", "step", "tokens"]
    assert one.split()[0] == str(first) and "30/100" in one and "1.2500" in one and "02:00:00" in one
    assert two.split()[:2] == [str(second), "done"] and "30/30" in two and " - " in two
    assert one.index("30/100") + 6 == two.index("30/30") + 5, "columns are not aligned"
    assert [fault.split(": ")[0] for fault in faults] == [
        f"{tmp_path}/empty holds neither a readable config.yaml nor records in metrics.jsonl",
        f"{tmp_path}/nowhere is no folder",
    ]


def test_damaged_folders_say_what_they_still_know(tmp_path):
    folder = run_folder(tmp_path / "run")
    (folder / "config.yaml").write_text("steps: [")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 31}\n{"kind": "train", "step": "x"}\n\x00\x00{"ki')
    (folder / "outcome.json").write_text("{}")
    (folder / "lock").write_text("")
    found = lines_of(status([folder])[0])
    assert found["step"] == "31" and found["tokens"] == "30,000" and "died" in found[""]
    (folder / "metrics.jsonl").unlink()
    assert "no run folder" in status([folder])[1][0]
    (folder / "config.yaml").write_text("steps: 50\n")
    (folder / "checkpoints").rename(folder / "elsewhere")
    assert lines_of(status([folder])[0]).items() >= {"": f"{folder}: not started", "step": "0 of 50 (0.0%)"}.items()


def test_times_and_sizes_in_words():
    assert [ago(x) for x in (-1, 99, 130, 7200, 200_000, None)] == [
        "0 s ago",
        "99 s ago",
        "2 min ago",
        "2 h ago",
        "2 days ago",
        "some time ago",
    ]
    assert [size(x) for x in (10, 2_500_000, 3 * 10**9, 5 * 10**12)] == ["0.0 kB", "2.50 MB", "3.00 GB", "5.00 TB"]


def run(monkeypatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["mezzotint-train", *words])
    return command.main()


def test_the_command_looks_at_runs(tmp_path, monkeypatch, capsys):
    folder = run_folder(tmp_path / "run")
    assert run(monkeypatch, "status", str(folder)) == 0
    assert "30 of 100" in capsys.readouterr().out
    assert run(monkeypatch, "status", str(folder), str(tmp_path / "nowhere")) == 2
    printed = capsys.readouterr()
    assert (
        "30/100" in printed.out
        and printed.err
        == f"error: {tmp_path}/nowhere is no folder: give a run folder, the one that `run:` in the recipe names\n"
    )
    assert run(monkeypatch, "plot", str(folder), "--out", str(tmp_path / "c.png")) == 0
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert run(monkeypatch, "plot", str(tmp_path)) == 2
    assert "holds no training records" in capsys.readouterr().err


def test_everything_else_is_a_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    seen = []
    monkeypatch.setattr(
        "mezzotint.training.config.load_recipe", lambda name, over: seen.append((name, over)) or "config"
    )
    monkeypatch.setattr("mezzotint.training.loop.train", lambda config, profile: 85 if profile else 0)
    monkeypatch.setattr("mezzotint.training.plan.plan", lambda config, gpus, gpu: f"{config} {gpus} {gpu}")
    assert run(monkeypatch, "debug", "optim.lr=1", "steps=2") == 0
    assert run(monkeypatch, "--local_rank=1", "./status.yaml") == 0  # as DeepSpeed's launcher calls it
    assert run(monkeypatch, "plot.yaml", "--profile") == 85
    assert run(monkeypatch, "3b", "--plan", "--gpus", "64", "--gpu", "h200") == 0
    assert capsys.readouterr().out == "config 64 h200\n"
    assert seen == [("debug", ["optim.lr=1", "steps=2"]), ("./status.yaml", []), ("plot.yaml", []), ("3b", [])]
