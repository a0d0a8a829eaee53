"""Compiles the Triton kernels for a GPU, which need not be there: python triton_compile.py 80 OUT"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dml.gpw.engine import triton_ms

KERNELS = [
    triton_ms.hardest_positive,
    triton_ms.negatives,
    triton_ms.positives,
    triton_ms.weights,
]
TYPES = {
    **dict.fromkeys(("own", "start", "end"), "*i64"),
    **dict.fromkeys(("R", "m", "d"), "i32"),
    **dict.fromkeys(("alpha", "beta", "lam", "eps"), "fp32"),
}
SIXTEEN = [["tt.divisibility", 16]]  # how Triton notes d = 512, and where torch puts a tensor


def compile_for(kernel, capability):
    sizes = triton_ms.Blocks().sizes
    types = {**TYPES, **dict.fromkeys(sizes, "constexpr")}
    signature = {name: types.get(name, "*fp32") for name in kernel.arg_names}
    divisible = {(i,): SIXTEEN for i, name in enumerate(signature) if name in ("X", "d")}
    return triton.compile(
        ASTSource(kernel, signature, sizes, divisible),
        target=GPUTarget("cuda", capability, 32),
        options=triton_ms.OPTIONS,
    )


def stack(cubin):
    """Bytes per thread that are kept outside of its registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(usage.split("STACK:")[1].split()[0])


def main(capability, out):
    found = {}
    for kernel in KERNELS:
        compiled = compile_for(kernel, int(capability))
        found[kernel.__name__] = {
            "cubin": len(compiled.asm["cubin"]),
            "stack": stack(compiled.asm["cubin"]),
            "shared": compiled.metadata.shared,
            "ptx": compiled.asm["ptx"],
        }
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
