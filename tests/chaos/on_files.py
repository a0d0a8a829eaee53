"""Trials with damaged files of runs, shards and sweeps, and with planted links."""

import json
import shutil
from pathlib import Path

from chaos.faults import damage
from chaos.judge import (
    FINISHED,
    IDENTICAL,
    REFUSED,
    Violation,
    content,
    is_identical,
    is_refusal,
    last_lines,
    no_traceback,
)
from chaos.kinds import kind
from chaos.lab import Trial
from chaos.setups import ONE, SWEEP, training


def files(folder: Path) -> list[str]:
    found = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    return sorted(str(p) for p in found if p.name != ".lock")


@kind("damaged-run", "a file of an interrupted run is damaged", per_round=6)
def damaged_run(t: Trial) -> str:
    t.setup_name = ONE.name
    folder, before = ONE.run_folder(t.folder), t.lab.interrupted
    shutil.copytree(before, folder)
    name = t.rng.choice(files(folder))
    t.note(damage(folder / name, t.rng))
    found = (folder / name).read_bytes() if (folder / name).exists() else b""
    words = training({"run.dir": str(folder.parent), "run.name": "run"})
    run = t.fork(*words)
    if run.codes == [FINISHED]:
        no_traceback(run.said, "because of a damaged file")
        expected = t.expected(ONE)
        if name == "metrics.jsonl":
            expected = {**expected, name: kept_as_found(before, found, expected[name], run.said)}
        is_identical(folder, expected)
        return IDENTICAL
    is_refusal(run.codes[0], run.said)
    if t.rng.random() < 0.3:
        t.note("the file is restored")
        shutil.copy(before / name, folder / name)
        run = t.fork(*words)
        if run.codes != [FINISHED]:
            raise Violation(f"the restored file is of no use: {last_lines(run.said)}")
        is_identical(folder, t.expected(ONE))
    return REFUSED


def kept_as_found(before: Path, found: bytes, expected: bytes, said: str) -> bytes:
    """metrics.jsonl is written for people and never read by a run: what stands before the checkpoint is
    kept as it is found, and what comes after it is complete. If it is too short, the run says so."""
    (last,) = sorted(before.glob("checkpoints/step-*"))[-1:]
    size = json.loads((last / "state.json").read_bytes())["state"]["progress"]["metrics_size"]
    if len(found) < size and "metrics.jsonl is shorter" not in said:
        raise Violation(f"nobody was told that metrics.jsonl was cut: {last_lines(said)}")
    return found[:size] + expected[size:]


@kind("damaged-result", "a file of a finished run is damaged", per_round=4)
def damaged_result(t: Trial) -> str:
    """Embedding with it is exact or refused; training it again ends well or is refused."""
    t.setup_name = ONE.name
    images, shards, tiny = t.lab.tiny
    folder = t.folder / "runs" / "tiny"
    shutil.copytree(tiny, folder)
    name = t.rng.choice(files(folder))
    t.note(damage(folder / name, t.rng))
    out, good = t.folder / "embedded", t.lab.embedded
    run = t.fork("dml/embed.py", folder, images, "--out", out, "--workers", 0)
    again = t.fork(*t.lab.tiny_training(shards, folder.parent))
    for program in (again, run):
        no_traceback(program.said, "because of a damaged file")
        if program.codes != [FINISHED]:
            is_refusal(program.codes[0], program.said)
    if run.codes != [FINISHED]:
        return REFUSED
    same = (out / "embeddings.npy").read_bytes() == (good / "embeddings.npy").read_bytes()
    if not same and name != "config.yaml":  # a text for people to change, which has no checksum
        raise Violation("other embeddings from a damaged run")
    return IDENTICAL


@kind("damaged-shards", "a file of the shards is damaged", per_round=4)
def damaged_shards(t: Trial) -> str:
    t.setup_name = ONE.name
    _, shards, tiny = t.lab.tiny
    copy = t.folder / "shards"
    shutil.copytree(shards, copy)
    t.note(damage(copy / t.rng.choice(files(copy)), t.rng))
    run = t.fork(*t.lab.tiny_training(copy, t.folder / "runs"))
    if run.codes != [FINISHED]:
        is_refusal(run.codes[0], run.said)
        return REFUSED
    is_identical(t.folder / "runs" / "tiny", content(tiny))
    return IDENTICAL


# what a run writes aside and then renames
WHOLE = ("config.yaml", "plan.json", "nearest.png", "model.safetensors", "result.json")


@kind("planted-link", "a symbolic link waits where a run will write", per_round=2)
def planted_link(t: Trial) -> str:
    t.setup_name = ONE.name
    _, shards, tiny = t.lab.tiny
    folder, victim = t.folder / "runs" / "tiny", t.folder / "victim"
    names = [".lock", *(f".{name}.writing" for name in WHOLE), "checkpoints/.writing"]
    link = folder / t.rng.choice(names)
    t.note(link.name)
    link.parent.mkdir(parents=True)
    aside = link.parent.name == "checkpoints"
    target = victim / "kept" if aside else victim
    target.parent.mkdir(exist_ok=True)
    target.write_text("precious")
    link.symlink_to(victim)
    run = t.fork(*t.lab.tiny_training(shards, t.folder / "runs"))
    kept = target.exists() and target.read_bytes() == b"precious"
    if not kept or (aside and files(victim) != ["kept"]):
        raise Violation(f"it wrote through the link {link.name}")
    if run.codes != [FINISHED]:
        is_refusal(run.codes[0], run.said)
        return REFUSED
    is_identical(folder, content(tiny))
    return IDENTICAL


ODD = [
    "",
    "{}",
    "[]",
    "null",
    "7",
    '"x"',
    "{" * 5000,
    "[" * 100_000,
    "9" * 10_000,
    "{}\n[]\n7\nnull\n",
]
ODD += [
    '{"step": "x"}',
    '{"step": null, "recall@1": {}}',
    '{"step": 1e999}',
    '{"step": -1, "times": "x"}',
]
ODD += ['{"reason": 5, "log": 7, "code": []}', '{"note": [1], "step": 1, "times": 1}']


@kind("damaged-sweep", "a small file of a run in a sweep is damaged: --status and the report", 10)
def damaged_sweep(t: Trial) -> str:
    """The run is shown as damaged, and the other one as usual."""
    t.setup_name = SWEEP.name
    shutil.copytree(t.lab.swept, t.folder / "runs" / "study")
    words = SWEEP.sweep(t.folder, t.lab.two_points(t.folder), ("a", "b"))
    run = t.folder / "runs" / "study" / t.rng.choice(["a-seed0", "b-seed0"])
    name = t.rng.choice(sorted({*files(run), "failed.json", "restarts.json"}))
    if t.rng.random() < 0.5 or not (run / name).exists():
        odd = t.rng.choice(ODD)
        (run / name).write_text(odd)
        t.note(f"{run.name}/{name}: {odd[:40]!r}")
    else:
        t.note(f"{run.name}/{damage(run / name, t.rng)}")
    status = t.fork(words[0], "--sweep", words[2], "--status")
    report = t.fork("launch/report.py", t.folder / "runs", "--out", t.folder / "report")
    for program in (status, report):
        no_traceback(program.said, "because of one damaged file")
        if program.codes != [FINISHED]:
            raise Violation(f"exit code {program.codes[0]}: {last_lines(program.said)}")
    other = "b-seed0" if run.name == "a-seed0" else "a-seed0"
    if other not in status.said:
        raise Violation(f"--status says nothing about the other run: {last_lines(status.said)}")
    return IDENTICAL
