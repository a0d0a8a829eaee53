"""What a finished run leaves: the trained model, a picture, the scores."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from safetensors.torch import save
from torch import Tensor

from dml.errors import RunError
from dml.run_folder.files import write_json, write_whole
from dml.run_folder.folder import RESULT


def write_result(
    folder: Path, weights: Mapping[str, Tensor], picture: Image.Image, result: Mapping[str, Any]
) -> None:
    """Write the trained model and the picture, then the scores."""
    try:
        png = io.BytesIO()
        picture.save(png, "PNG", optimize=True)
        write_whole(folder / "nearest.png", png.getvalue())
        model = save({name: x.contiguous().cpu() for name, x in weights.items()})
        write_whole(folder / "model.safetensors", model)
        write_json(folder / RESULT, result)
    except OSError as error:
        raise RunError(
            f"the result of {folder} cannot be written: {error.strerror}; the same command tries "
            "again"
        ) from None
