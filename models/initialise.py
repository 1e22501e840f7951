"""All initialisation, in one function."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .config import ModelConfig

DT_RANGE = (1e-3, 1e-1)
A_RANGE = (1.0, 16.0)
DRAWS = {nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_}


class Undrawn(TorchFunctionMode):
    """Inside `with Undrawn():` modules are made without the values of torch.nn.init, which `initialise` overwrites.

    On the meta device those draws would also import torch's compiler: two seconds of every command.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DRAWS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, generator: torch.Generator | None = None) -> None:
    """Fill every parameter of a Denoiser, by name.

    | parameter | values | source |
    |---|---|---|
    | matrices, embedding | normal, std init_std | GPT-2 |
    | o_proj, down_proj, out_proj | normal, std init_std / sqrt(2 layers) | GPT-2: residual branches |
    | conv1d | uniform, bound 1/sqrt(d_conv), weight and bias | Mamba-2 |
    | A_log | log of uniform [1, 16] | Mamba-2 |
    | dt_bias | inverse softplus of log-uniform [1e-3, 1e-1] | Mamba-2 |
    | D, norms | ones | |
    """
    residual = config.init_std / math.sqrt(2 * len(config.pattern))
    for name, parameter in model.named_parameters():
        kind = name.split(".")[-1]
        if kind == "A_log":
            parameter.uniform_(*A_RANGE, generator=generator).log_()
        elif kind == "dt_bias":
            low, high = (math.log(x) for x in DT_RANGE)
            step = parameter.uniform_(low, high, generator=generator).exp_()
            parameter.copy_(step + torch.log(-torch.expm1(-step)))
        elif ".conv1d." in name:
            bound = 1 / math.sqrt(config.d_conv)
            parameter.uniform_(-bound, bound, generator=generator)
        elif kind == "D" or parameter.ndim == 1:
            parameter.fill_(1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
            parameter.normal_(0.0, residual, generator=generator)
        else:
            parameter.normal_(0.0, config.init_std, generator=generator)
