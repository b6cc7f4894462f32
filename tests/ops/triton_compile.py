"""Compile every kernel to machine code for sm_90, which needs no GPU; run by `test_tssa_triton`.

    python tests/ops/triton_compile.py [--quick]

Signatures are those the launches make; prints a line for each kernel.
"""

import sys

from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rankwise.ops import triton_chunks as chunks
from rankwise.ops import triton_passes as passes

COMMON = {"mask": "*i1", "first": "*i64", "last": "*i64", "row_of": "*i64", "decay": "*fp64", "eps": "fp32"}
HALF = {"w", "d_output", "out"}  # in the dtype of w


def compiled(kernel, half, width, **switches):
    block = max(16, 1 << (width - 1).bit_length())
    most = 32 if switches.get("DECAYED") else 64
    constants = {
        "BT": max(16, min(most, 4096 // block)),
        "BK": block,
        "MASKED": True,
        "DECAYED": False,
    } | switches
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("H", "K"):
            signature[name] = "i32"
        else:
            partial = name == "out" and kernel.fn.__name__ == "output_back_kernel"
            signature[name] = COMMON.get(name, half if name in HALF and not partial else "*fp32")
    source = ASTSource(kernel, signature, constexprs=constants)
    return triton_compile(source, target=GPUTarget("cuda", 90, 32))


def carried(**switches):
    kernel = chunks.carry_kernel
    constants = {"BX": 64} | switches
    types = {"ages": "*i64", "chunks": "i32", "decay": "*fp64", "H": "i32", "X": "i32"}
    signature = {n: "constexpr" if n in constants else types.get(n, "*fp32") for n in kernel.arg_names}
    return triton_compile(
        ASTSource(kernel, signature, constexprs=constants), target=GPUTarget("cuda", 90, 32)
    )


def main():
    plain = [chunks.sums_kernel, passes.score_kernel, passes.output_kernel]
    back = [passes.output_back_kernel, passes.score_back_kernel]
    both = [
        passes.project_kernel,
        passes.scale_kernel,
        passes.scale_back_kernel,
        passes.token_back_kernel,
    ]
    jobs = [(carried, {"BACKWARD": b}) for b in (False, True)]
    sizes = [("*bf16", 32)] if "--quick" in sys.argv else [("*bf16", 64), ("*fp32", 48), ("*fp32", 256)]
    for half, width in sizes:
        rest = {"half": half, "width": width}
        jobs += [(compiled, {"kernel": k, "WEIGHTED": True, "DECAYED": True} | rest) for k in plain]
        jobs += [
            (compiled, {"kernel": k, "FINISH": d, "DECAYED": d} | rest) for k in back for d in (False, True)
        ]
        jobs += [(compiled, {"kernel": k, "FINISH": True, "DECAYED": False} | rest) for k in back]
        jobs += [(compiled, {"kernel": k, "half": half, "width": width}) for k in both]
    for run, options in jobs:
        made = run(**options)
        assert made.asm["cubin"]
        kernel = options.pop("kernel", chunks.carry_kernel).fn.__name__
        print(f"compiled {kernel} {options}: {len(made.asm['cubin'])} bytes")


if __name__ == "__main__":
    main()
