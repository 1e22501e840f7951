"""What a captured pass is given instead of copies from the host; the captures themselves need a CUDA device."""

import pytest
import torch
from support import generator, tiny_config

from mezzotint.eval.cells import Cell, SpeedConfig
from mezzotint.eval.fill import fill_random
from mezzotint.eval.speed_cell import Rates, measure_cell
from mezzotint.eval.speed_graph import HostCopies, graph_passes
from mezzotint.eval.speed_passes import passes
from mezzotint.eval.subjects import build, preset_subject
from mezzotint.models.denoiser import Denoiser
from mezzotint.models.errors import InputError
from mezzotint.models.state import State

CARD = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and none is here")


class Copies(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts copies from the CPU to another device, and reads of values there, which a capture forbids."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        away = isinstance(result, torch.Tensor) and result.device.type != "cpu"
        if away and any(tensor.device.type == "cpu" and tensor.dim() for tensor in tensors):
            self.copies.append(str(func))
        if func is torch.ops.aten._local_scalar_dense.default and tensors[0].device.type != "cpu":
            self.copies.append(str(func))
        return result


@pytest.mark.parametrize("inference", (False, True))
@pytest.mark.parametrize("pattern", ("A", "M", "MMAM"))
@pytest.mark.parametrize("name", ("denoise", "advance", "commit"))
def test_a_replayed_pass_takes_nothing_from_the_host(pattern, name, inference, monkeypatch):
    """On the meta device, which has no values but makes the same calls as a card (and knows no autocast)."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    config = tiny_config(pattern)
    with torch.device("meta"):
        model = Denoiser(config)
    state = model.start(2, 20)
    filled = State(state.layers, torch.full((2,), 16), state.max_length, state.block_length)
    with torch.inference_mode(inference), torch.no_grad():
        call = passes(model, filled, chunk=8, generator=generator(1))[name]
        with HostCopies() as copies:
            call()
        assert copies.kept, "a pass without copies from the host needs no help"
        with Copies() as seen, copies.replay():
            call()
    assert seen.copies == [] and copies.used


def test_a_pass_that_copies_something_else_is_refused():
    def copy(*shapes: tuple[int, ...]) -> None:
        for shape in shapes:
            torch.zeros(shape).to("meta")

    with HostCopies() as copies:
        copy((2,), (3,))
    assert [tuple(kept.shape) for kept in copies.kept] == [(2,), (3,)]
    with copies.replay():
        copy((2,))
    assert not copies.used
    for shapes in (((3,),), ((2,), (3,), (3,))):
        with pytest.raises(RuntimeError, match="copies other values"), copies.replay():
            copy(*shapes)
    with HostCopies() as nothing:
        torch.zeros(2).to(torch.float64)
        torch.zeros(2, device="meta").to(torch.float64)
    assert nothing.kept == []


def test_graphs_need_a_card():
    with pytest.raises(InputError, match="captured on a CUDA device"):
        SpeedConfig(modes=("eager", "cudagraph"))


@pytest.mark.gpu
@CARD
@pytest.mark.parametrize("backbone", ("attention", "mamba", "hybrid"))
def test_graphs_give_the_logits_of_the_passes(backbone):
    model = build(preset_subject("debug", backbone), dtype=torch.float32, device="cuda")
    state = fill_random(model.start(2, 80), length=64, generator=generator(2))
    with torch.inference_mode():
        calls = passes(model, state, chunk=16, generator=generator(3))
        graphs = graph_passes(calls)
        for _ in range(3):
            torch.testing.assert_close(graphs["denoise"](), calls["denoise"](), rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@CARD
@pytest.mark.parametrize("mode", ("eager", "cudagraph"))
def test_a_cell_is_measured_on_a_card(mode):
    subject = preset_subject("debug", "hybrid")
    cell = Cell(subject, 64, 2, SpeedConfig(device="cuda", quick=True, modes=(mode,)), mode)
    model = build(subject, dtype=torch.bfloat16, device="cuda")
    values = measure_cell(model, cell, rates=Rates(1e12, 1e14))
    assert 0 < values["denoise_p10_s"] <= values["denoise_s"] <= values["denoise_p90_s"]
    assert values["allocated_decode_peak_bytes"] <= values["reserved_decode_peak_bytes"]
    assert values["peak_bytes"] <= 1.5 * values["allocated_decode_peak_bytes"]
