"""Weight-only int8 for decoding: linear layers keep 8 bits a weight and a scale a row; the one file that imports torchao."""

from __future__ import annotations

import functools
import logging
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from .denoiser import Denoiser
from .errors import InputError


@functools.cache
def load() -> tuple[Any, str]:
    """torchao's quantization module, or None and why not."""
    try:
        logging.getLogger("torchao").setLevel(logging.ERROR)  # it tells of every extension that it was built without
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchao import quantization
    except Exception as error:
        return None, f"torchao cannot be imported ({type(error).__name__}: {error})"
    return quantization, ""


@torch.no_grad()
def quantize(model: Denoiser) -> Denoiser:
    """Replace the weights of all linear layers of the stack, in place, and return the model; activations stay as they are.

    Embedding, tied head, norms, convolutions and what sets time scales stay. A row's weights are rounded to 255 steps of
    its own, so that a product is off by about 0.5% of its size. Raises InputError where torchao is missing.
    """
    quantization, missing = load()
    if missing:
        raise InputError(f"int8 weights need torchao: {missing}; install it with `pip install torchao`")
    configuration = quantization.Int8WeightOnlyConfig(set_inductor_config=False)
    quantization.quantize_(model, configuration, filter_fn=lambda module, name: isinstance(module, nn.Linear))
    return model


def weight_bytes(model: nn.Module) -> int:
    """Bytes that the parameters hold, whatever they are made of: 8-bit values and their scales count, not what they mean."""
    return sum(_bytes(parameter) for parameter in model.parameters())


def _bytes(parameter: Tensor) -> int:
    flatten = getattr(parameter, "__tensor_flatten__", None)  # a tensor made of others names them
    if flatten is None:
        return parameter.nbytes
    return sum(_bytes(part) for name in flatten()[0] if (part := getattr(parameter, name)) is not None)
