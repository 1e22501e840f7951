"""CUDA graphs of the passes: each is captured once at a fixed context and replayed, so that launching costs nothing.

A pass reads small index tensors that the host computes; a graph cannot copy from ordinary host memory, nor needs to at a
fixed context. So the copies of one ordinary run are kept on the card, and the run that is captured is given them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WARMUPS = 3  # ordinary runs before a capture, as torch's guide to graphs asks: libraries set themselves up in them


class HostCopies(TorchDispatchMode):
    """Keeps the results of all copies from the CPU to another device, in order; once `replay` is called, gives them out.

    The run that is given them must make the same copies in the same order; RuntimeError where it makes others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self._place: int | None = None

    def replay(self) -> HostCopies:
        self._place = 0
        return self

    @property
    def used(self) -> bool:
        """Whether the replay gave out every copy."""
        return self._place == len(self.kept)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not _leaves_host(args, kwargs):
            return func(*args, **kwargs)
        if self._place is None:
            self.kept.append(func(*args, **kwargs))
            return self.kept[-1]
        if self._place >= len(self.kept) or self.kept[self._place].shape != args[0].shape:
            raise RuntimeError("the pass copies other values from the host than when it was recorded")
        self._place += 1
        return self.kept[self._place - 1]


def _leaves_host(args, kwargs) -> bool:
    """Whether an operation on a CPU tensor is told of another device: the only ones are copies."""
    if not args or not isinstance(args[0], Tensor) or args[0].device.type != "cpu":
        return False
    told = (x.device if isinstance(x, Tensor) else x for x in tree_leaves((args[1:], kwargs)))
    return any(isinstance(device, torch.device) and device.type != "cpu" for device in told)


def capture(call: Callable[[], object]) -> Callable[[], object]:
    """`call` as a replay of its graph. Raises RuntimeError where it cannot be captured.

    The result of a replay is the tensors of the capture, written anew.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARMUPS):
            call()
        with HostCopies() as copies:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), copies.replay():
        result = call()
    if not copies.used:
        raise RuntimeError("the pass copies fewer values from the host than when it was recorded")

    def replay() -> object:
        _ = copies  # the graph reads what they hold
        graph.replay()
        return result

    return replay


def graph_passes(calls: dict[str, Callable[[], object]]) -> dict[str, Callable[[], object]]:
    """denoise, advance and commit as graphs, the others as they are.

    Raises RuntimeError where a graph's logits are not those of the ordinary pass.
    """
    graphs = dict(calls)
    for name in ("denoise", "advance", "commit"):
        wanted = _logits(calls[name]())
        graphs[name] = capture(calls[name])
        found = _logits(graphs[name]())
        torch.cuda.synchronize()
        if wanted is not None and (found is None or not torch.allclose(found, wanted, rtol=1e-2, atol=1e-2)):
            raise RuntimeError(f"the graph of {name} gives other logits than the pass itself")
    return graphs


def _logits(result: object) -> Tensor | None:
    """The finite part of a pass's logits; None for a commit, which has none."""
    logits = result[0] if isinstance(result, tuple) else result
    return logits.clone().nan_to_num(neginf=0.0) if isinstance(logits, Tensor) else None
