"""Whether Triton can run a kernel here: it needs a C compiler and Python's headers on every node."""

from __future__ import annotations

from importlib.util import find_spec

import torch


def probe(device: torch.device) -> str | None:
    """Compile and run a tiny kernel. Why that failed, in a sentence; None if it did not."""
    if find_spec("triton") is None:
        return "the package triton is missing (pip install triton)"
    x = torch.zeros(1, device=device)
    try:
        from dml.gpw.engine.triton_weights import add_one

        with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
            add_one[1,](x)
        right = x.item() == 1
    except Exception as error:  # noqa: BLE001  of the compiler, the driver or Triton
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"Triton cannot run a kernel: {reason}"
    return None if right else "a kernel of Triton gives a wrong result"
