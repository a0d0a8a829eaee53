"""Compiles the Triton kernels for GPUs, which need not be there: python triton_compile.py OUT 80 90"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dml.gpw.engine import triton_kept, triton_ms

KERNELS = {
    triton_ms.hardest_positive: triton_ms.Blocks().how,
    triton_ms.negatives: triton_ms.Blocks().how,
    triton_ms.positives: triton_ms.Blocks().how,
    triton_ms.weights: triton_ms.Blocks().how,
    triton_kept.row_statistics: triton_kept.Block().how | {"MINED": True},
    triton_kept.weights_in_place: triton_kept.Block().how,
}
# For sm_100, LLVM pairs some multiply-adds of a block (fma.rn.f32x2), and registers are moved for that: 79% to
# 81% with the first choice of blocks. In a block of more dimensions the moves are a smaller share.
FEWER_MOVES = triton_ms.Blocks(BLOCK_D=64).how
TYPES = {
    **dict.fromkeys(("own", "start", "end"), "*i64"),
    **dict.fromkeys(("R", "m", "d"), "i32"),
    **dict.fromkeys(("alpha", "beta", "lam", "eps"), "fp32"),
}
SIXTEEN = [["tt.divisibility", 16]]  # how Triton notes d = 512, and where torch puts a tensor


def compile_for(kernel, how, capability):
    sizes = {name: value for name, value in how.items() if name in kernel.arg_names}
    options = {name: value for name, value in how.items() if name not in kernel.arg_names}
    types = {**TYPES, **dict.fromkeys(sizes, "constexpr")}
    signature = {name: types.get(name, "*fp32") for name in kernel.arg_names}
    divisible = {(i,): SIXTEEN for i, name in enumerate(signature) if name in ("X", "S", "d")}
    return triton.compile(
        ASTSource(kernel, signature, sizes, divisible),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )


def cuobjdump(cubin, option):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def stack(cubin):
    """Bytes per thread that are kept outside of its registers."""
    return int(cuobjdump(cubin, "-res-usage").split("STACK:")[1].split()[0])


def multiply_adds(cubin):
    """Multiply-adds per instruction of the inner loop: of the loops that have most of them, where there
    are most per instruction. FFMA2 makes two. A loop is what lies between a jump backwards and where it
    goes."""
    lines = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", cuobjdump(cubin, "-sass"))
    code = [(int(address, 16), text) for address, text in lines]
    loops = []
    for address, text in code:
        jump = re.search(r"\bBRA(?:\.\w+)* .*?`?\(?(?:\.L_x_\d+|0x([0-9a-f]+))", text)
        if jump is None or jump[1] is None or int(jump[1], 16) >= address:
            continue
        loop = [t for a, t in code if int(jump[1], 16) <= a <= address]
        loops.append((sum(2 if "FFMA2" in t else "FFMA" in t for t in loop), len(loop)))
    most = max((number for number, _ in loops), default=0)
    return max((number / length for number, length in loops if 2 * number >= most), default=0.0)


def compiled(capability):
    found = {}
    for kernel, how in KERNELS.items():
        compiled = compile_for(kernel, how, int(capability))
        cubin = compiled.asm["cubin"]
        found[kernel.__name__] = {
            "cubin": len(cubin),
            "stack": stack(cubin),
            "shared": compiled.metadata.shared,
            "ptx": compiled.asm["ptx"],
        }
        if "BLOCK_D" not in how:  # its inner loop is no product
            continue
        if capability == "100":
            cubin = compile_for(kernel, FEWER_MOVES, int(capability)).asm["cubin"]
            found[kernel.__name__]["stack"] = max(found[kernel.__name__]["stack"], stack(cubin))
        found[kernel.__name__]["multiply_adds"] = multiply_adds(cubin)
    return found


def main(out, *capabilities):
    Path(out).write_text(json.dumps({each: compiled(each) for each in capabilities}))


if __name__ == "__main__":
    main(*sys.argv[1:])
