"""Counts the bytes of a pass that is never computed: stand-ins for float tensors, and a ledger of which are alive."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode

from mezzotint.models.ops import cuda_attention, flash_cpu, flex_backend, slabs, ssd_parts, swiglu

_DEVICE_OF = torch.ops.prim.device.default
_INDEX = torch.ops.aten.index.Tensor
_CAST = torch.ops.aten._to_copy.default


class Ledger(TorchDispatchMode):
    """Inside `with ledger:` float tensors have shape, type and lifetime but no memory; integers and booleans are real.

    So a training pass runs as written, geometry and all, and `live` holds the bytes of all float tensors that are alive,
    `peak` the most they were since `start_phase`. What an operation needs inside itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.casts: dict[int, int] = {}  # bytes of the casts of weights that are alive, by storage
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._storages: dict[int, Any] = {}
        self._weights: set[int] = set()

    @property
    def cast_bytes(self) -> int:
        """Bytes of the copies in another type that autocast has made of weights and that are alive."""
        return sum(self.casts.values())

    def start_phase(self) -> int:
        """Begin a new peak; returns the bytes alive now."""
        self.peak = self.live
        return self.live

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A stand-in, entered in the ledger."""
        with self._fake:
            value = torch.empty(*shape, dtype=dtype)
        self._enter(value)
        return value

    def materialize(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        """Stand-ins for the parameters of a module on the meta device, and for their gradients: later micro-batches add
        to what the first has left."""
        for part in module.modules():
            for name, old in part.named_parameters(recurse=False):
                new = nn.Parameter(self.empty(*old.shape, dtype=dtype))
                new.grad = self.empty(*old.shape, dtype=dtype)
                self._weights.add(new.untyped_storage()._cdata)
                setattr(part, name, new)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF:
            return torch.device("cpu")
        kwargs = kwargs or {}
        if FakeTensor not in types and not self._makes_floats(func, args, kwargs):
            return func(*args, **kwargs)
        if func is _INDEX:
            args = (args[0], _positions(args[1]))
        result = self._stand_ins(func, args, kwargs)
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, FakeTensor):
                self._enter(value)
        if func is _CAST and args[0].untyped_storage()._cdata in self._weights:
            self.casts[result.untyped_storage()._cdata] = result.untyped_storage().nbytes()
        return result

    def _stand_ins(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The operation on shapes. Where stand-ins are all there is, without FakeTensorMode's search for a rule: most of
        a plan's time was spent in it, and most operations only look at the same memory in another way."""
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, (Tensor, list, tuple))]
        if not all(_is_plain(value) for value in tensors) or "device" in kwargs:
            with self._fake:
                return func(*args, **kwargs)
        with in_kernel_invocation_manager(self._fake):
            result = func(*args, **kwargs)
        if isinstance(result, (tuple, list)):
            return type(result)(self._as_stand_in(value) for value in result)
        return self._as_stand_in(result)

    def _as_stand_in(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value  # an operation in place returns its own argument
        return FakeTensor(self._fake, value, torch.device("cpu"))

    def _makes_floats(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Does a call make a float tensor out of nothing? Of which type is only known by trying."""
        if "device" not in kwargs or (args and isinstance(args[0], Tensor)):
            return False
        with self._fake:
            return func(*args, **kwargs).is_floating_point()

    def _enter(self, value: Tensor) -> None:
        storage = value.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            return
        self.live += size
        self.peak = max(self.peak, self.live)

        def leave(_: Any) -> None:
            self.live -= size
            self.casts.pop(key, None)
            del self._storages[key]

        self._storages[key] = weakref.ref(storage, leave)


def _is_plain(value: Any) -> bool:
    """A stand-in, or a sequence without tensors."""
    if isinstance(value, Tensor):
        return isinstance(value, FakeTensor)
    return not any(isinstance(part, Tensor) and not isinstance(part, FakeTensor) for part in value)


def _positions(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Masks as the positions they stand for, so that the result has a size."""
    found: list[Tensor | None] = []
    for index in indices:
        found += index.nonzero().unbind(1) if index is not None and index.dtype == torch.bool else [index]
    return found


class _Flex(torch.autograd.Function):
    """What FlexAttention keeps: queries, keys, values, its output and a float32 log-sum-exp of every query."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        q, k, v, _, lse = ctx.saved_tensors
        delta = torch.empty_like(lse)  # sum of grad * out, made first
        grads = tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
        del delta
        return grads


class _Scan(torch.autograd.Function):
    """What `ssd_parts` keeps and makes in a scan, without operations for every chunk: they are most of a plan's time."""

    @staticmethod
    def forward(ctx: Any, update: Tensor, decay: Tensor, state: Tensor) -> Tensor:
        states = state.new_empty(len(state), update.shape[1] + 1, *state.shape[1:])
        ctx.save_for_backward(decay, states)
        ctx.update_dtype = update.dtype
        return states

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        decay, _ = ctx.saved_tensors
        dupdate, ddecay = grad.new_empty(grad[:, 1:].shape, dtype=ctx.update_dtype), torch.empty_like(decay)
        dstate = grad[:, 0].clone()
        dstate.clone()  # of one chunk beside that of the next
        return dupdate, ddecay, dstate


@contextmanager
def kernels_of(device: str) -> Iterator[None]:
    """Operations go the way they go on `device`, though stand-ins say that they are on the CPU.

    On 'cuda': attention is FlexAttention's, the SSD takes all blocks at once, and the MLP's gate casts nothing. Whoever
    adds a CUDA backend of training to the table of operations says here what it keeps.
    """
    if device == "cpu":
        yield
        return
    patches: list[tuple[Any, str, Any]] = [
        (flash_cpu, "declined", lambda *_: "planned for a GPU"),
        (ssd_parts, "SLAB_ELEMENTS", sys.maxsize),
        (ssd_parts, "_StateScan", _Scan),
        (slabs, "ELEMENTS", sys.maxsize),
        (swiglu, "plain", lambda _: True),
        (cuda_attention, "serves", lambda device, dtype, *, cached: not cached),
        (flex_backend, "plan_flex", lambda lo, hi, **sizes: flex_backend.FlexPlan(None, None, compiled=False)),
        (flex_backend, "attend", lambda q, k, v, plan: _Flex.apply(q, k, v)),
    ]
    before = [getattr(module, name) for module, name, _ in patches]
    for module, name, value in patches:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(patches, before):
            setattr(module, name, value)
