"""A model as a graph: traced by torch.export, then written as ONNX, as torch's own file, or as Python."""

from __future__ import annotations

import io
import json
import logging
import warnings
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from dml import __version__
from dml.data.preprocessing import Input
from dml.data.vectors import Features
from dml.errors import RunError
from dml.export.preprocessing import FILE, description, source
from dml.models import Embedder

SPEC = "preprocessing.json"


def exported(model: Embedder) -> ExportedProgram:
    """The model for any number of images, or of vectors of features."""
    inputs = torch.zeros(2, *model.spec.shape, dtype=model.spec.tensor_dtype)
    with torch.no_grad():
        try:
            return torch.export.export(model.eval(), (inputs,), dynamic_shapes=({0: Dim("n")},))
        except Exception as error:  # noqa: BLE001  torch raises almost any exception
            reason = str(error).strip().splitlines()[0]
            raise RunError(f"torch.export cannot trace this model: {reason}") from None


def as_onnx(program: ExportedProgram, spec: Input | Features) -> bytes:
    """One file; the metadata says what the model takes, and how to prepare a photo."""
    logging.disable(logging.WARNING)  # that torchvision is not installed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the inside of torch.onnx
            made = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                input_names=["images" if isinstance(spec, Input) else "features"],
                output_names=["embeddings"],
            )
    finally:
        logging.disable(logging.NOTSET)
    assert made is not None
    proto = made.model_proto
    proto.producer_name, proto.producer_version = "dml", __version__
    for key, value in attached("preprocessing", spec).items():
        proto.metadata_props.add(key=key, value=value)
    data: bytes = proto.SerializeToString()
    return data


def as_torch(program: ExportedProgram, spec: Input | Features) -> bytes:
    """torch.export.load reads it; its extra files are what `as_onnx` has as metadata."""
    file = io.BytesIO()
    torch.export.save(program, file, extra_files=attached(SPEC, spec))
    return file.getvalue()


def attached(name: str, spec: Input | Features) -> dict[str, str]:
    """What goes with a model: a description of its input, and code that prepares a photo."""
    code = {FILE: source(spec)} if isinstance(spec, Input) else {}
    return {name: json.dumps(description(spec)), **code}


PYTHON = '''"""The model as a graph of torch's operators. Needs torch, safetensors, and model.safetensors beside it.

model = Model()
X = model(images)       N x size x size x 3 uint8 RGB -> N x d unit vectors; preprocess.py makes images
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import device, inf, nan  # names that the graph may use

INPUTS = {inputs}
CONSTANTS = {constants}


class Model(torch.nn.Module):
    """An input of the graph is a weight by its name in model.safetensors, a constant, or the images."""

    def __init__(self, weights=Path(__file__).with_name("model.safetensors")):
        super().__init__()
        self.weights = load_file(weights)

    @torch.no_grad()
    def forward(self, images):
        given = {{**self.weights, **CONSTANTS, "images": images}}
        (embeddings,) = graph(None, *(given[name] for name in INPUTS))
        return embeddings


{code}'''


def as_python(program: ExportedProgram) -> str:
    """A Python file that computes the model from model.safetensors, without dml."""
    inputs, constants = [], []
    for each in program.graph_signature.input_specs:
        if each.kind is InputKind.USER_INPUT:
            inputs.append("images")
        else:
            assert each.target is not None
            inputs.append(each.target)
        # a buffer that is not persistent is not among the weights
        if each.kind is InputKind.CONSTANT_TENSOR or each.persistent is False:
            constants.append(f"{each.target!r}: {literal(program.constants[str(each.target)])}")
    code = program.graph_module.code.strip().replace("def forward(self", "def graph(self", 1)
    return PYTHON.format(
        inputs=inputs, constants="{" + ", ".join(constants) + "}", code=code + "\n"
    )


def literal(x: Any) -> str:
    """A small tensor as code."""
    return f"torch.tensor({x.tolist()}, dtype={x.dtype})"
