"""Write a trained model for programs that do not have dml.

    dml export runs/icons_mini --onnx model.onnx
    dml export runs/icons_mini --torch model.pt2
    dml export runs/icons_mini --hf my-model

All of them take N x size x size x 3 uint8 RGB images and give N x d unit vectors; a run on features takes
N x size float32 vectors, and has no --hf. How a photo becomes such
an image is stored with the model, as JSON and as a Python file that needs Pillow and numpy only:
in the metadata of the ONNX file, in the extra files of the torch file, in the folder beside the weights.

--hf writes a folder in the form of Hugging Face: model.safetensors, config.json, model.py, preprocess.py and
a model card with data, recipe and scores. Exit codes: 0 done, 2 a mistake in what was asked for.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from dml.errors import RunError, run_command
from shards.output import program_name, run_program


def main(argv: Sequence[str] | None = None) -> int:
    name = program_name("dml/export/program.py")
    parser = argparse.ArgumentParser(
        prog=name, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a finished training")
    parser.add_argument("--onnx", type=Path, metavar="FILE", help="an ONNX model")
    parser.add_argument(
        "--torch", type=Path, metavar="FILE", help="a program of torch.export, .pt2"
    )
    parser.add_argument("--hf", type=Path, metavar="DIR", help="a folder for Hugging Face")
    parser.add_argument(
        "--tower", choices=("x", "y"), help="which encoder of a RUN with two of them (default: x)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    args = parser.parse_args(argv)
    if not (args.onnx or args.torch or args.hf):
        parser.error("nothing to write: give --onnx, --torch or --hf")
    return run_command(name, lambda: export(args))


def export(args: argparse.Namespace) -> None:
    for option, file in (("--onnx", args.onnx), ("--torch", args.torch)):
        if file is not None:
            check_file(option, file, args.overwrite)
    if args.onnx and (find_spec("onnx") is None or find_spec("onnxscript") is None):
        raise RunError("--onnx needs onnx and onnxscript: pip install 'dml[onnx]'")

    # after parsing: --help needs no torch
    from dml.data.vectors import Features
    from dml.export.card import is_folder, write_folder
    from dml.export.graph import as_onnx, as_torch, exported
    from dml.inference.trained import load_trained, read_config
    from dml.inference.whole_folder import refuse_occupied
    from dml.run_folder.files import write_whole

    if args.hf:
        refuse_occupied(args.hf, is_folder, "a model", "dml export", args.overwrite, "--hf")
    config, model = read_config(args.run), load_trained(args.run, args.tower).float().cpu()
    if args.hf and isinstance(model.spec, Features):
        raise RunError(
            f"--hf {args.hf}: {args.run} was trained on features, and such a folder is for models of "
            "images; --onnx and --torch export it"
        )
    if args.hf and config.towers.two_encoders:
        raise RunError(
            f"--hf {args.hf}: {args.run} has two encoders, and such a folder is for models of one; "
            "--onnx and --torch export each of them"
        )
    program = exported(model)
    if args.onnx:
        write_whole(args.onnx, as_onnx(program, model.spec))
    if args.torch:
        write_whole(args.torch, as_torch(program, model.spec))
    if args.hf:
        write_folder(args.hf, args.run, config, program, model)
    for path in filter(None, (args.onnx, args.torch, args.hf)):
        print(path)


def check_file(option: str, file: Path, overwrite: bool) -> None:
    if not file.absolute().parent.is_dir():
        raise RunError(f"{option} {file}: there is no folder {file.parent}")
    if file.is_dir() or (file.exists() and not overwrite):
        what = "is a folder" if file.is_dir() else "exists: --overwrite replaces it"
        raise RunError(f"{option} {file} {what}, or give another name")


if __name__ == "__main__":
    run_program(main)
