"""Records stand once each in every log whatever was killed and resumed; their rates, times and time left, by hand."""

import json
import math
import os
import resource
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from training_support import recipe

from mezzotint.models.errors import InputError
from mezzotint.training import meter as meter_module
from mezzotint.training import peak
from mezzotint.training.append import Appended
from mezzotint.training.distributed import Ranks
from mezzotint.training.loop import train
from mezzotint.training.meter import Meter
from mezzotint.training.metrics import Log, LogConfig, Work, duration, progress_line, read_records
from mezzotint.training.noise import NoiseSource
from mezzotint.training.objective import BlockSums
from mezzotint.training.pace import Costly, Pace
from mezzotint.training.run import Step

CPU = torch.device("cpu")


class FakeWandb(types.ModuleType):
    """A server and its client: takes rows of rising steps, keeps those whose upload was done when the client died."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.rows: dict[str, dict[int, dict]] = {}  # what the server has, by run id
        self.inits: list[dict] = []
        self.fault = ""

    def init(self, **options):
        if self.fault:
            raise RuntimeError(self.fault)
        self.inits.append(options)
        name = options.get("id") or f"id{len(self.rows)}"
        resumed = name in self.rows and options.get("resume") == "allow"
        return FakeRun(self.rows.setdefault(name, {}), name, resumed)

    def teardown(self) -> None:
        pass


class FakeRun:
    offline = False

    def __init__(self, rows: dict, name: str, resumed: bool) -> None:
        self.rows, self.id, self.resumed, self.held = rows, name, resumed, []
        self.starting_step = max(rows, default=-1) + 1

    def log(self, row: dict, step: int) -> None:
        assert not self.held or step > self.held[-1][0], "steps must rise"
        assert step >= self.starting_step, f"step {step} is already there"
        self.held.append((step, row))

    def upload(self, count: int | None = None) -> None:
        for step, row in self.held[:count]:
            self.rows[step] = row

    finish = upload


def board_rows(folder) -> list[tuple[str, int, float]]:
    """What TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tb"))
    events.Reload()
    return [(tag, event.step, event.value) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)]


def write_steps(log: Log, first: int, last: int) -> None:
    """Steps first+1 .. last as the loop writes them: a training record each, a bound every fifth."""
    for step in range(first + 1, last + 1):
        log.write("train", step, {"loss": 1.0 / step, "text": "word", "seconds": float(step)})
        if step % 5 == 0:
            log.write("validation", step, {"bound": float(step), "seconds": step + 0.5})


def test_three_resumes_lose_and_repeat_nothing_in_any_log(tmp_path, monkeypatch):
    """Killed, each time some steps beyond its checkpoint, with a half-written line, and wandb behind by some rows."""
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = LogConfig(wandb="project")
    for first, last, uploaded in ((0, 13, 7), (10, 22, 3), (20, 27, 0)):
        log = Log(tmp_path, first_step=first, config=config, recipe={"steps": 30})
        log.write("start", first, {"seconds": float(first)})
        write_steps(log, first, last)
        log._boards[1]._run.upload(uploaded)  # the rest dies with the process
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "train", "st')
        newest = max((tmp_path / "tb").iterdir())
        newest.write_bytes(newest.read_bytes()[:-9])  # half of the last event
    log = Log(tmp_path, first_step=25, config=config, recipe={"steps": 30})
    assert log.seconds_before == 25.5
    write_steps(log, 25, 30)
    log.close()

    records = read_records(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(1, 31))
    assert [r["step"] for r in records if r["kind"] == "validation"] == list(range(5, 31, 5))
    shown = board_rows(tmp_path)
    assert [step for tag, step, _ in shown if tag == "train/loss"] == list(range(1, 31))
    assert [value for tag, _, value in shown if tag == "validation/bound"] == list(range(5, 31, 5))
    assert {tag for tag, _, _ in shown} == {"train/loss", "train/seconds", "validation/bound", "validation/seconds"}
    (rows,) = wandb.rows.values()
    assert list(rows) == list(range(1, 31))
    assert rows[7]["train/loss"] == 1 / 7 and rows[25]["validation/bound"] == 25.0
    assert [options.get("id") for options in wandb.inits] == [None, "id0", "id0", "id0"]


def test_a_run_that_dies_three_times_beyond_its_checkpoints_has_every_record_once(tmp_path, monkeypatch):
    from training_support import corpus, recipe

    from mezzotint.training.loop import train

    held_out = {"folder": str(corpus() / "heldout"), "every": 3, "rows": 4}
    log = {"every": 1, "tensorboard": True, "peak_tflops": 1.0}
    config = recipe(tmp_path, steps=12, checkpoint={"every": 4}, validation=held_out, log=log)
    write, deaths = Log.write, [("train", 6), ("validation", 9), ("train", 11)]

    def die(self, kind, step, values):
        write(self, kind, step, values)
        if deaths and (kind, step) == deaths[0]:
            deaths.pop(0)
            raise RuntimeError("killed")

    monkeypatch.setattr(Log, "write", die)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="killed"):
            train(config)
    assert train(config) == 0
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    trains = [r for r in records if r["kind"] == "train"]
    assert [r["step"] for r in trains] == list(range(1, 13))
    assert [r["step"] for r in records if r["kind"] == "validation"] == [3, 6, 9, 12]
    assert [r["step"] for r in records if r["kind"] == "start"] == [0, 4, 8, 8]
    assert all(r["seconds_left"] is not None and r["seconds_forward"] > 0 for r in trains[1:])
    shown = board_rows(tmp_path / "run")
    for kind in ("train", "validation"):
        expected = [r for r in records if r["kind"] == kind]
        tags = {tag for tag, _, _ in shown if tag.startswith(kind)}
        assert {f"{kind}/loss", f"{kind}/bits_per_byte"} & tags
        for tag in tags:
            name = tag.removeprefix(f"{kind}/")
            points = [(r["step"], r[name]) for r in expected if r.get(name) is not None]
            assert [(step, pytest.approx(value, rel=1e-6)) for t, step, value in shown if t == tag] == points, tag


HISTORY_OF_WANDB = """
import glob, struct, sys
from wandb.proto.wandb_internal_pb2 import Record
for path in glob.glob(sys.argv[1] + "/wandb/offline-run-*/*.wandb"):
    data, at, part = open(path, "rb").read(), 7, b""
    while at + 7 <= len(data):  # blocks of 32 KiB, pieces of records in them
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part, at = part + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):
            record, part = Record.FromString(part), b""
            if record.WhichOneof("record_type") == "history":
                print(record.history.step.num)
"""


@pytest.mark.slow
def test_real_wandb_offline_holds_every_step_once_after_kills(tmp_path):
    pytest.importorskip("wandb", reason="the extra `watch` is not installed")
    start = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_metrics import Log, LogConfig, write_steps
first, last = int(sys.argv[1]), int(sys.argv[2])
log = Log(Path({str(tmp_path)!r}), first_step=first, config=LogConfig(tensorboard=False, wandb="p"), recipe={{}})
write_steps(log, first, last)
if last < 30:
    os.kill(os.getpid(), signal.SIGKILL)
log.close()
"""
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    for first, last in ((0, 13), (10, 22), (20, 30)):
        subprocess.run([sys.executable, "-c", start, str(first), str(last)], env=environment, timeout=120, check=False)
    found = subprocess.run(
        [sys.executable, "-c", HISTORY_OF_WANDB, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert list(map(int, found.stdout.split())) == list(range(1, 31))


def test_a_start_from_nothing_with_another_recipe_is_another_wandb_run(tmp_path, monkeypatch):
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for lr in (1, 1, 2):
        log = Log(tmp_path, first_step=0, config=LogConfig(tensorboard=False, wandb="p"), recipe={"lr": lr})
        write_steps(log, 0, 3)
        log.close()
    assert {name: list(rows) for name, rows in wandb.rows.items()} == {"id0": [1, 2, 3], "id1": [1, 2, 3]}


def test_wandb_is_asked_for_in_a_sentence_and_later_lost_in_another(tmp_path, monkeypatch, capsys):
    config, record = LogConfig(tensorboard=False, wandb="p"), {"loss": 1.0, "seconds": 1.0}
    monkeypatch.setitem(sys.modules, "wandb", None)  # not installed
    with pytest.raises(InputError, match=r"log\.wandb needs the package wandb .*mezzotint\[watch\]"):
        Log(tmp_path, first_step=0, config=config, recipe={})
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    wandb.fault = "no API key\nat all"
    with pytest.raises(InputError, match=r"wandb does not start \(no API key\): run `wandb login`"):
        Log(tmp_path, first_step=0, config=config, recipe={})
    wandb.fault = ""
    log = Log(tmp_path, first_step=0, config=config, recipe={})
    log.write("train", 1, record)
    log._boards[0]._run.log = None  # its process was killed: calling it raises
    log.write("train", 2, record)
    log.write("train", 3, record)
    log.close()
    wandb.fault = "no network"  # at a later start that is no reason to end a run
    log = Log(tmp_path, first_step=3, config=config, recipe={})
    log.write("train", 4, record)
    log.close()
    assert capsys.readouterr().out.count("warning: wandb is gone") == 2
    assert [r["step"] for r in read_records(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    wandb.fault = ""
    log = Log(tmp_path, first_step=4, config=config, recipe={})
    log.close()
    assert list(wandb.rows["id0"]) == [1, 2, 3, 4]


@pytest.fixture
def full_disk():
    """A limit of a file's size in place of a disk's: writes beyond it are cut short, then fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_a_full_disk_does_not_take_is_written_later(tmp_path, capsys, full_disk):
    log = Log(tmp_path, first_step=0, config=LogConfig(), recipe={})
    write_steps(log, 0, 2)
    sizes = [path.stat().st_size for path in (tmp_path / "metrics.jsonl", *(tmp_path / "tb").iterdir())]
    full_disk(min(sizes) + 20)
    write_steps(log, 2, 6)
    full_disk(resource.RLIM_INFINITY)
    assert [r["step"] for r in read_records(tmp_path / "metrics.jsonl")] == [1, 2]
    write_steps(log, 6, 7)
    log.close()
    assert [r["step"] for r in read_records(tmp_path / "metrics.jsonl") if r["kind"] == "train"] == list(range(1, 8))
    assert [step for tag, step, _ in board_rows(tmp_path) if tag == "train/loss"] == list(range(1, 8))
    printed = capsys.readouterr().out
    assert printed.count("metrics.jsonl cannot be written (") == 1 and printed.count("warning") == 2


def test_a_piece_is_whole_or_not_there(tmp_path, capsys, full_disk):
    file = Appended(tmp_path / "file")
    file.add(b"one\n")
    full_disk(6)
    file.add(b"two\n")
    assert (tmp_path / "file").read_bytes() == b"one\n"
    full_disk(resource.RLIM_INFINITY)
    file.add(b"three\n")
    file.close()
    assert (tmp_path / "file").read_bytes() == b"one\ntwo\nthree\n"
    assert "file cannot be written" in capsys.readouterr().out


def test_records_are_valid_json_whatever_the_loss_is(tmp_path):
    log = Log(tmp_path, first_step=0, config=LogConfig(tensorboard=False), recipe={})
    log.write("train", 1, {"loss": math.nan, "gradient_norm": math.inf, "lr": 0.5, "seconds": 1.0})
    log.close()

    def refuse(word: str):
        raise AssertionError(word)

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line, parse_constant=refuse)
    assert (record["loss"], record["gradient_norm"], record["lr"]) == (None, None, 0.5)


def test_pace_counts_bounds_and_saves_as_often_as_they_still_come():
    pace = Pace(steps=100, bounds=Costly(25), saves=Costly(30), guess=7.0)
    assert pace.seconds_left(0) == 700  # the pace of an earlier start
    pace.add(10, 20.0)
    assert pace.seconds_left(10) == 90 * 2
    pace.bounds.add(1000.0)  # at 25
    pace.add(40, 80.0)
    assert pace.seconds_left(50) == 50 * 2 + 3 * 1000  # at 50, after its record, at 75 and 100
    assert pace.seconds_left(51) == 49 * 2 + 2 * 1000
    pace.saves.add(30.0, pace.saves.due(0, 59, last=100))  # one save, at 30
    assert pace.saves.due(0, 100, last=100) == 4  # 30, 60, 90, and the last step
    assert pace.seconds_left(61) == 39 * 2 + 2 * 1000 + 2 * 30
    assert pace.seconds_left(100) == 1000 + 30  # of the last step itself
    assert Pace(steps=9, bounds=Costly(0), saves=Costly(3)).seconds_left(1) is None
    assert [duration(x) for x in (None, 59.9, 3661, 90_000)] == ["-", "00:00:59", "01:01:01", "1.0 days"]


class Clock:
    """time.perf_counter of the modules that ask for it."""

    def __init__(self, monkeypatch) -> None:
        self.now = 1000.0
        for module in (meter_module, sys.modules["mezzotint.training.stopwatch"]):
            monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)


class FakeRanks:
    """Two ranks of which this is the main one; the other one reports what the test says."""

    rank, world, main, device = 0, 2, True, CPU

    def __init__(self) -> None:
        self.other = 0.0

    def sum(self, values):
        return values.double() + self.other

    def total(self, value: float) -> torch.Tensor:
        return torch.tensor(value + self.other)

    def alone(self, work):
        return Ranks.alone(self, work)

    def say(self, sentence: str) -> None:
        print(sentence)


def fake_run(folder, ranks, *, steps: int = 100):
    """What a Meter reads of a run."""
    values = types.SimpleNamespace
    config = values(
        steps=steps,
        rows_per_step=4,
        micro_rows=2,
        data=values(row_length=32),
        engine=values(precision="float32"),
        log=LogConfig(every=2, tensorboard=False, peak_tflops=1e-9),
        validation=values(every=50),
        checkpoint=values(every=50),
    )
    plan = values(config=config, noise=values(row_blocks=4), held_out=None)
    return values(plan=plan, ranks=ranks, folder=folder)


def a_step(loss: float, **changes) -> Step:
    source = NoiseSource(seed=2, rows_per_step=2, row_blocks=4, slots=4, block_length=4)
    noise = source.draw(step=0, first_row=0, blocks=torch.tensor([4, 4]))
    sums = BlockSums(torch.full((2, 4), 2.0 * loss), torch.full((2, 4), 2))
    values = {"loss": loss, "gradient_norm": 1.0, "lr": 0.1, "rows_hash": 7, "stop": False, "shares": []}
    return Step(**(values | {"work": Work(100.0, 50.0, 3000.0), "details": [(noise, sums)]} | changes))


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A meter at step 0, its clock, its ranks and its folder."""
    monkeypatch.setattr(meter_module, "strict", types.SimpleNamespace(unstructure=lambda config: {}))
    monkeypatch.setattr(meter_module, "peak_memory", lambda device: 5000)
    clock, ranks = Clock(monkeypatch), FakeRanks()
    return Meter(fake_run(tmp_path, ranks), 0), clock, ranks, tmp_path


def test_a_record_holds_rates_times_and_losses_of_the_steps_since_the_last_one(made, capsys):
    meter, clock, ranks, folder = made
    for loss in (3.0, 5.0):
        with meter.watch.split("data"):
            clock.now += 1
        with meter.watch.split("forward"):
            clock.now += 2
        clock.now += 0.5
        meter.add(a_step(loss))
    ranks.other = torch.zeros(36 + 14, dtype=torch.float64)
    ranks.other[36 + 7 : 36 + 14] = torch.tensor([6.0, 0, 0, 0, 0, 0, 9000])  # data, ..., memory of the other rank
    meter.log(2, a_step(5.0))
    record = next(r for r in read_records(folder / "metrics.jsonl") if r["kind"] == "train")
    assert record["step"] == 2 and record["loss"] == 5.0 and record["tokens"] == 2 * 4 * 32
    assert record["unique_tokens_per_second"] == 200 / 7 and record["supervised_tokens_per_second"] == 100 / 7
    assert record["utilization"] == pytest.approx(6000 / 7 / (1000 * 2))
    assert record["seconds"] == 7 and record["seconds_per_step"] == 3.5
    # two steps, two ranks: this one waited 2 s for data, the other one 6 s; forward 4 s here, 0 s there
    assert (record["seconds_data"], record["seconds_data_slowest"], record["seconds_forward"]) == (2.0, 3.0, 1.0)
    assert record["seconds_other"] == 3.5 - 2.0 - 1.0
    assert "seconds_save" not in record and record["memory_bytes"] == 9000
    positions = {name: value for name, value in record.items() if name.startswith("nll_position_")}
    assert positions == dict.fromkeys([f"nll_position_{x}" for x in ("0.000", "0.250", "0.500", "0.750")], 4.0)
    assert sum(name.startswith("nll_level_") and value is None for name, value in record.items()) == 2  # 8 levels drawn
    # the first step of a start is not the pace: the second took 3.5 s
    assert record["seconds_left"] == 98 * 3.5
    assert capsys.readouterr().out.endswith("00:05:43 left\n")


def test_skipped_steps_and_spikes_are_on_the_disk_at_once_and_spoil_no_record(made):
    meter, clock, ranks, folder = made
    clock.now += 1
    meter.add(a_step(math.nan, skipped=True, gradient_norm=math.inf, bad_rows=(5, 9)))
    events = [r for r in read_records(folder / "metrics.jsonl") if r["kind"] == "event"]
    assert [(e["event"], e["step"], e["loss"], e["rows"]) for e in events] == [("skipped", 1, None, [5, 9])]
    clock.now += 1
    meter.add(a_step(2.0, spike="loss 2, 9.0 standard deviations"))
    meter.log(2, a_step(2.0))
    meter.close()
    last = read_records(folder / "metrics.jsonl")
    assert [r["kind"] for r in last] == ["start", "event", "event", "train", "end"]
    assert last[2]["reason"].startswith("loss 2") and (last[3]["skipped_steps"], last[3]["spikes"]) == (1, 1)
    assert last[3]["nll_position_0.000"] == 2.0
    again = Meter(fake_run(folder, ranks), 2)  # counts go on
    clock.now += 1
    again.add(a_step(math.nan, skipped=True))
    assert again._counts == {"skipped": 2, "spike": 1}


def test_time_left_after_a_resume_a_long_bound_and_a_save(made, monkeypatch):
    _, clock, ranks, folder = made
    ranks.world = 1
    meter = Meter(fake_run(folder, ranks), 0)
    meter._pace.bounds.every = 50
    for step in range(1, 51):
        clock.now += 600 if step == 1 else 2  # the first one compiles
        meter.add(a_step(1.0))
        if step % 10 == 0:
            meter.log(step, a_step(1.0))
    result = types.SimpleNamespace(record=dict, nats_per_token=1.0, nats_per_token_error=0.1)
    result.bits_per_byte = result.bits_per_byte_error = 1.0

    def slow(held_out):
        clock.now += 4000
        return result

    monkeypatch.setattr(meter, "_bound", slow)
    assert meter.validate(50, "rows")
    with meter.watch.split("save"):
        clock.now += 100
    for _ in range(10):
        clock.now += 2
        meter.add(a_step(1.0))
    meter.log(60, a_step(1.0))
    trains = [r for r in read_records(folder / "metrics.jsonl") if r["kind"] == "train"]
    assert [r["seconds_left"] for r in trains[:-1]] == [(100 - r["step"]) * 2 for r in trains[:-1]]
    assert trains[-1]["seconds_left"] == 40 * 2 + 4000 + 100  # a bound and a save are still to come, at the end
    assert trains[-1]["seconds_per_step"] == 12.0 and trains[-1]["seconds_other"] == 2.0
    assert (trains[-1]["seconds_save"], trains[-1]["seconds_validate"]) == (10.0, 400.0)

    meter.close()
    again = Meter(fake_run(folder, ranks), 50)
    again._pace.bounds.every = 50
    clock.now += 900  # compiles again
    again.add(a_step(1.0))
    again.log(51, a_step(1.0))
    for _ in range(9):
        clock.now += 3
        again.add(a_step(1.0))
    again.log(60, a_step(1.0))
    trains = [r for r in read_records(folder / "metrics.jsonl") if r["kind"] == "train"][-2:]
    assert trains[0]["seconds_left"] == 49 * 2 + 4000  # the pace and the bound of the start before
    assert trains[1]["seconds_left"] == 40 * 3 + 4000
    assert trains[1]["unique_tokens_per_second"] == 900 / 27


def test_a_bound_that_was_stopped_is_not_written_down(made, monkeypatch):
    meter, _, _, folder = made
    monkeypatch.setattr(meter, "_bound", lambda held_out: None)
    assert meter.validate(10, "rows") is False
    assert [r["kind"] for r in read_records(folder / "metrics.jsonl")] == ["start"]


def test_logs_that_cannot_be_opened_end_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(meter_module, "strict", types.SimpleNamespace(unstructure=lambda config: {}))

    def refuse(*arguments, **options):
        raise InputError("metrics cannot be opened")

    monkeypatch.setattr(meter_module, "Log", refuse)
    ranks = FakeRanks()
    with pytest.raises(InputError, match="metrics cannot be opened"):
        Meter(fake_run(tmp_path, ranks), 0)
    ranks.main, ranks.other = False, 1.0
    with pytest.raises(SystemExit):
        Meter(fake_run(tmp_path, ranks), 0)


def test_peak_memory_grows_with_what_is_held():
    """In a process of its own: this one may have held more before, and the peak would not move."""
    code = """
import torch
from mezzotint.training.meter import peak_memory
before = peak_memory(torch.device("cpu"))
held = torch.ones(300 * 2**20, dtype=torch.uint8)
print(before, peak_memory(torch.device("cpu")))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
    before, after = map(int, found.split())
    assert before + 250 * 2**20 < after < before + 400 * 2**20


def test_the_line_a_user_watches():
    values = {"loss": 2.34567, "lr": 1e-3, "gradient_norm": 0.5, "unique_tokens_per_second": 12345.6}
    values |= {"supervised_tokens_per_second": 999.4, "utilization": 0.421}
    line = progress_line(7, 20, values, None)
    assert line.startswith("step 7/20  loss 2.3457  lr 1.00e-03  grad 0.50  12,346 tok/s  999 supervised/s")
    assert line.endswith("42% of peak  - left")


@pytest.mark.parametrize(("key", "value"), [("every", 0), ("wandb", ""), ("peak_tflops", 0.0)])
def test_bad_values_are_named(key, value):
    with pytest.raises(InputError, match=f"log.{key} is"):
        LogConfig(**{key: value})


def test_a_processor_that_is_slow_in_bfloat16_is_told_so_and_no_other(tmp_path, monkeypatch, capsys):
    rates = {torch.float32: 30e9, torch.bfloat16: 1e9}
    monkeypatch.setattr(peak, "product_rate", lambda device, dtype, **how: rates[dtype])
    assert "30 times slower" in peak.slow_bfloat16(torch.device("cpu"))
    assert peak.slow_bfloat16(torch.device("cuda")) == ""
    assert train(recipe(tmp_path, "engine.precision=autocast", "steps=1", f"run={tmp_path / 'narrow'}")) == 0
    assert "engine.precision=float32" in capsys.readouterr().out
    assert train(recipe(tmp_path, "steps=1", f"run={tmp_path / 'wide'}")) == 0
    assert "bfloat16" not in capsys.readouterr().out
    rates[torch.bfloat16] = 20e9
    assert peak.slow_bfloat16(torch.device("cpu")) == ""


def test_the_rate_of_products_is_measured():
    rate = peak.product_rate(torch.device("cpu"), torch.float32, size=128, seconds=0.01)
    assert 1e7 < rate < 1e14
