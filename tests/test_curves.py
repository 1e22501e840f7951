"""The points that are drawn, by hand; and figures of several runs, short, long and damaged ones."""

import json
from pathlib import Path

import pytest

from mezzotint.models.errors import InputError
from mezzotint.training.curves import PANELS, Panel, curve, names, plot, smooth, window_of

LOSS, BOUND, NORM = PANELS[:3]


def records(steps: int) -> list[dict]:
    """A record each step; the third has a loss and a norm that are not finite."""
    found = []
    for step in range(1, steps + 1):
        lost = step == 3
        values = {"loss": None if lost else 5 - step / steps, "gradient_norm": None if lost else float(step % 7)}
        rates = {"unique_tokens_per_second": 100.0 + step, "utilization": 0.3, "lr": 1e-3}
        found.append({"kind": "train", "step": step, "tokens": 256 * step} | values | rates)
        if step % 10 == 0:
            found.append({"kind": "validation", "step": step, "nats_per_token": 3.0, "nats_per_token_error": 0.5})
    return found


def write(folder: Path, found: list[dict]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in found) + '{"kind": "tr')
    return folder


def test_points_are_those_of_the_records():
    loss = curve(records(20), LOSS, against="steps")
    assert loss.x == [step for step in range(1, 21) if step != 3] and loss.y[0] == 5 - 1 / 20
    bound = curve(records(20), BOUND, against="tokens")
    assert (bound.x, bound.y, bound.error) == ([2560, 5120], [3.0, 3.0], [0.5, 0.5])
    norm = curve(records(20), NORM, against="tokens")
    assert norm.x == [256 * step for step in range(1, 21) if step != 3 and step % 7]  # no logarithm of 0
    assert curve(records(20), Panel("train", "other", "other"), against="steps").x == []


def test_smoothing_is_a_mean_of_the_last_values_and_its_window_a_hundredth():
    assert smooth([1.0, 2.0, 6.0, 10.0], 2) == [1.0, 1.5, 4.0, 8.0]
    assert smooth([1.0, 2.0], 1) == [1.0, 2.0] and smooth([], 3) == []
    assert window_of(curve(records(1001), LOSS, against="steps")) == 10
    assert window_of(curve(records(20), LOSS, against="steps")) == 1


def test_names_are_as_short_as_they_differ():
    assert names([Path("/a/x/run"), Path("/a/y/run")]) == ["x/run", "y/run"]
    assert names([Path("/a/one"), Path("/b/two"), Path("/a/one")]) == ["one", "two", "one"]


@pytest.mark.parametrize("against", ["tokens", "steps"])
def test_a_figure_holds_every_run_and_says_how_it_was_smoothed(tmp_path, monkeypatch, against):
    from matplotlib import pyplot

    figures, close = [], pyplot.close
    monkeypatch.setattr(pyplot, "close", figures.append)
    runs = [write(tmp_path / "long", records(400)), write(tmp_path / "short", records(5))]
    out = plot(runs, tmp_path / "figures" / "curves.png", against=against)
    assert out.read_bytes().startswith(b"\x89PNG") and [p.name for p in out.parent.iterdir()] == ["curves.png"]
    (figure,) = figures
    close(figure)
    loss, bound = figure.axes[:2]
    legend = [text.get_text() for text in loss.get_legend().get_texts()]
    assert legend == ["long, mean of the last 4 records", "short, every record"]
    raw, bold, short = loss.get_lines()
    scale = 256 if against == "tokens" else 1
    assert list(raw.get_xdata()) == [scale * step for step in range(1, 401) if step != 3]
    assert bold.get_ydata()[-1] == pytest.approx(sum(5 - step / 400 for step in (397, 398, 399, 400)) / 4)
    assert len(short.get_xdata()) == 4
    assert len(bound.containers) == 1, "the short run has no bound"
    assert figure.axes[4].get_xlabel() == against
    assert "pale: every record; bold: mean" in figure.get_suptitle()


def test_what_cannot_be_drawn_is_a_sentence(tmp_path):
    good, empty = write(tmp_path / "good", records(3)), write(tmp_path / "empty", [])
    for folder in (empty, tmp_path / "nowhere"):
        with pytest.raises(InputError, match=f"{folder.name} holds no training records"):
            plot([good, folder], tmp_path / "c.png")
    with pytest.raises(InputError, match=r"--out .*c\.pdf must end in \.png"):
        plot([good], tmp_path / "c.pdf")
    with pytest.raises(InputError, match="--x hours must be one of tokens, steps"):
        plot([good], tmp_path / "c.png", against="hours")
    assert not list(tmp_path.glob("c.*"))
