"""`python -m tests.gpu.compiled`: the kernels of the head, compiled for an H100, which takes triton and no GPU. Prints their names."""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.gpu.pair import SOURCES

POINTERS = {"targets": "*i64"}  # the others: fp32


def main() -> None:
    sys.path[:0] = SOURCES
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from atropos_trainer_grpo import logprob_kernels as kernels

    compiled = []
    for kernel in (kernels.score_kernel, kernels.gradient_kernel):
        for dtype in ("bf16", "fp16", "fp32"):
            for switches in (True, False):
                signature: dict[str, str] = {}
                constants: dict[tuple[int], Any] = {}
                for place, name in enumerate(kernel.arg_names):
                    signature[name] = POINTERS.get(name, "*fp32")
                    if name.isupper():
                        signature[name] = "constexpr"
                        constants[(place,)] = kernels.BLOCK if name == "BLOCK" else switches
                    elif name in ("stride", "vocabulary"):
                        signature[name] = "i32"
                    elif name == "logits":
                        signature[name] = f"*{dtype}"
                target = GPUTarget("cuda", 90, 32)
                made = triton.compile(ASTSource(kernel, signature, constants), target, {"num_warps": kernels.WARPS})
                assert made.asm["cubin"]
                compiled.append(f"{kernel.__name__} {dtype} {switches}")
    print(json.dumps(compiled))


if __name__ == "__main__":
    main()
