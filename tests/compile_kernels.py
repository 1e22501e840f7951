"""Compiles the Triton kernels for sm_90 with ptxas, which needs no GPU, and writes down shared memory and code size.

Run by tests/test_triton_compiles.py in a process of its own: under Triton's interpreter nothing is compiled.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mezzotint.models.ops import triton_attend, triton_block_step, triton_read, triton_scan

WIDTH = {"bf16": tl.bfloat16, "fp32": tl.float32}
REAL = {"eps": "fp32", "scale": "fp32"}  # scalars that are no int


def compile_kernel(kernel, narrow: str, wide: set[str], whole: set[str], constants: dict, options: dict) -> dict:
    """Compile as a launch would: pointers and sizes divisible by 16. narrow: type of pointers that are in neither set."""
    scalars = {"width", "tokens", "G", "H", "P", "N", "inner", "channels", "eps", "M", "m", "Z", "R"}
    scalars |= {"scale", "batch", "kv_heads", "rows", "tiles", "splits", "stride", "parts", "span"}
    scalars |= {name for name in kernel.arg_names if name.endswith(("_row", "_token", "_head", "_block"))}
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        pointer = "fp32" if name in wide else "i32" if name in whole else narrow
        signature[name] = REAL.get(name, "i32") if name in scalars else f"*{pointer}"
        if name not in REAL:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    sizes = {"shared": found.metadata.shared, "bytes": len(found.asm["cubin"])}
    return {"kernel": kernel.fn.__name__, "type": narrow} | sizes


def main() -> None:
    """The 3b preset: blocks of 32, heads of 64, states of 128."""
    step, read = triton_block_step, triton_read
    results = []
    for narrow, dot in WIDTH.items():
        common = {"WIDE": tl.float32, "BG": 32}
        products = {"BP": 64, "DOT": dot, "PRECISION": "tf32x3"}
        tight = {"num_warps": 8, "num_stages": 1}
        for clean, noisy in ((0, 1), (1, 0), (1, 1)):
            shape = common | {"CLEAN": clean, "CHECKED": True}
            wide = {"state", "out", "following", "dt_bias", "A_log", "skip"}
            results.append(
                compile_kernel(
                    step._step_kernel, narrow, wide, {"valid"}, shape | products | {"NOISY": noisy, "BN": 64}, tight
                )
            )
            if noisy:
                results.append(
                    compile_kernel(step._conv_kernel, narrow, set(), {"valid"}, shape | {"W": 4, "BC": 64}, {})
                )
        norm = {"BLOCK": 8192, "WIDE": tl.float32}
        results.append(compile_kernel(step._norm_kernel, narrow, {"gated", "weight"}, set(), norm, {"num_warps": 8}))
        wide = {"run", "dt", "clean_run", "states"}
        whole = {"frontiers", "starts"}
        results.append(compile_kernel(read._read_kernel, narrow, wide, whole, common | products | {"BN": 128}, tight))
        stages = 2 if narrow == "bf16" else 1
        for rows, own in ((32, True), (64, True), (128 if stages == 2 else 64, False)):
            # multi-head; five query heads on each of 8 key heads; a prefill
            sizes = {"BR": rows, "BK": 64, "BP": 128, "BG": 32, "OWN": own, "WIDE": tl.float32, "DOT": dot}
            part, warps = sizes | {"PRECISION": "tf32x3"}, 8 if rows > 64 else 4
            kernel, how = triton_attend._part_kernel, {"num_stages": stages, "num_warps": warps}
            results.append(compile_kernel(kernel, narrow, {"out", "lse"}, {"lo", "hi"}, part, how))
        join = {"BP": 128, "WIDE": tl.float32}
        results.append(
            compile_kernel(triton_attend._join_kernel, narrow, {"out", "lse"}, set(), join, {"num_warps": 1})
        )
        carry = {"BN": 32, "BP": 64, "WIDE": tl.float32}
        for kernel, wide in (
            (triton_scan._forward_kernel, {"decay", "state", "states"}),
            (triton_scan._backward_kernel, {"grad", "decay", "states", "dstate", "shares"}),
        ):
            results.append(compile_kernel(kernel, narrow, wide, set(), carry, {}))
    Path(sys.argv[1]).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
