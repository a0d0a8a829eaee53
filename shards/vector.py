"""A vector of features as shards store it: a .npy file of one dimension, float16 or float32."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shards.item import ShardError

MAGIC = b"\x93NUMPY"
DTYPES = ("<f4", "<f2")
LONGEST = 2**20  # numbers in a vector


@dataclass(frozen=True)
class Form:
    """How the vectors of a dataset look: all have the same form. header: the bytes before the numbers."""

    size: int
    dtype: str
    header: bytes

    @property
    def bytes(self) -> int:
        """Of a whole file."""
        return len(self.header) + self.size * np.dtype(self.dtype).itemsize


def is_vector(data: bytes) -> bool:
    return data.startswith(MAGIC)


def form_of(data: bytes) -> Form:
    """The form of a .npy file; ShardError says in a few words what is wrong with it."""
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }
        shape, _, dtype = read[version](file)
    # numpy reads the header with Python's parser, which raises many kinds of errors on damaged bytes
    except Exception as error:  # noqa: BLE001
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ShardError(f"is a damaged .npy file ({reason})") from None
    if dtype.str not in DTYPES or len(shape) != 1 or not 1 <= shape[0] <= LONGEST:
        raise ShardError(
            f"is a .npy file of {dtype} with the shape {shape}, not one vector of float16 or float32"
        )
    form = Form(shape[0], dtype.str, data[: file.tell()])
    if len(data) != form.bytes:
        raise ShardError(f"is a .npy file of {len(data)} bytes instead of {form.bytes}")
    return form


def decoded(data: bytes) -> NDArray[Any]:
    """The vector of a .npy file; ShardError if it is damaged, or if it holds NaN or infinity."""
    form = form_of(data)
    vector = np.frombuffer(data, form.dtype, offset=len(form.header))
    if not np.isfinite(vector).all():
        raise ShardError("is a vector with NaN or infinity")
    return vector


def encoded(vector: NDArray[Any]) -> bytes:
    """The bytes of a .npy file."""
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(vector), (1, 0), allow_pickle=False)
    return file.getvalue()
