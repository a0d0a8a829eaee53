"""Trials with hostile configs, shards, weights, images and embeddings: accepted, or refused in words.

Every program runs in a fork of the campaign with a limit on its memory, so that hundreds of them take a
minute.
"""

import os
from pathlib import Path

from chaos import hostile
from chaos.judge import (
    DIVERGED,
    FINISHED,
    IDENTICAL,
    REFUSED,
    UNEXPECTED,
    Violation,
    is_refusal,
    no_traceback,
)
from chaos.kinds import kind
from chaos.lab import Trial
from chaos.running import Watched
from chaos.setups import CONFIG
from dml.config.sections import KEYS

GIGABYTES = 4  # that a program may take in addition to what it has after importing torch
SECONDS = 20  # of a processor
NO_MEMORY = "memory is full"  # a sentence, too, though it is not a mistake


def accepted_or_refused(run: Watched, problems: int | None = None) -> str:
    """problems: an exit code that means that problems were found and printed."""
    (code,) = run.codes
    no_traceback(run.said, "for a hostile input")
    if code == FINISHED:
        return IDENTICAL
    if (code == UNEXPECTED and NO_MEMORY in run.said) or (code == DIVERGED and run.said):
        return REFUSED
    if code != problems:
        is_refusal(code, run.said)
    return REFUSED


def program(t: Trial, *words: object) -> Watched:
    run = t.fork(*words, gigabytes=GIGABYTES)
    if run.children[0].seconds > SECONDS:
        raise Violation(f"{run.children[0].seconds:.0f} s for a hostile input")
    return run


@kind("hostile-config", "a config made to do harm", 40)
def hostile_config(t: Trial) -> str:
    words, how = hostile.config(t.folder, t.rng, CONFIG)
    t.note(how)
    if t.rng.random() < 0.2:
        path = words[words.index("--config") + 1]
        if t.rng.random() < 0.5:
            Path(t.folder / "study.yaml").write_text(f"base: {path}\n")
            path = t.folder / "study.yaml"
        t.note("as a sweep")
        return accepted_or_refused(program(t, "launch/slurm.py", "--sweep", path, "--dry-run"))
    return accepted_or_refused(program(t, "dml/plan.py", *words))


# Not these: a run may be as long as it likes, and so many workers would be started.
LONG = ("length.", "data.workers", "data.prefetch")


@kind("hostile-value", "a training with one odd value in its config", 6)
def hostile_value(t: Trial) -> str:
    _, shards, _ = t.lab.tiny
    key = t.rng.choice([key for key in KEYS if not key.startswith(LONG)])
    odd = {key: hostile.setting(t.rng)}
    t.note(str(odd)[:100])
    run = program(t, *t.lab.tiny_training(shards, t.folder / "runs", **odd))
    return accepted_or_refused(run)


@kind("hostile-shards", "shards made to do harm", 10)
def hostile_shards(t: Trial) -> str:
    _, good, _ = t.lab.tiny
    t.note(hostile.shards(t.folder / "shards", t.rng, good))
    if t.rng.random() < 0.5:
        run = program(t, "shards/verify.py", t.folder / "shards", "--workers", 1)
        return accepted_or_refused(run, problems=1)
    words = t.lab.tiny_training(t.folder / "shards", t.folder / "runs")
    return accepted_or_refused(program(t, *words))


@kind("hostile-weights", "weights made to do harm", 10)
def hostile_weights(t: Trial) -> str:
    _, shards, tiny = t.lab.tiny
    trap = t.folder / "unpickled"
    path, how = hostile.weights(t.folder, t.rng, tiny / "model.safetensors", trap)
    t.note(how)
    words = t.lab.tiny_training(shards, t.folder / "runs", **{"model.weights": str(path)})
    run = program(t, *words)
    if trap.exists():
        raise Violation("the file was unpickled: its program ran")
    return accepted_or_refused(run)


@kind("hostile-images", "a folder of damaged and lying images", 10)
def hostile_images(t: Trial) -> str:
    _, _, tiny = t.lab.tiny
    t.note(hostile.images(t.folder / "images" / "train", t.rng))
    hostile.images(t.folder / "images" / "test", t.rng)
    where, out = t.folder / "images", t.folder / "out"
    words = ["--out", out, "--workers", 1]
    if t.rng.random() < 0.5:
        words = ["shards/build.py", "folder", "--root", where, *words]
        words += t.rng.choice([[], ["--bad", "skip"]])
    else:
        words = ["dml/embed.py", tiny, where, "--out", out, "--workers", 0]
        words += t.rng.choice([[], ["--skip-unreadable"]])
    t.note(words[0])
    verdict = accepted_or_refused(program(t, *words))
    if verdict == REFUSED and out.exists():
        raise Violation(f"refused, but {sorted(os.listdir(out))} is left")
    return verdict


@kind("hostile-embeddings", "embeddings made to do harm", 10)
def hostile_embeddings(t: Trial) -> str:
    images, _, tiny = t.lab.tiny
    t.note(hostile.embeddings(t.folder / "embedded", t.rng, t.lab.embedded))
    query = next(images.rglob("*.png"))
    return accepted_or_refused(program(t, "dml/search.py", tiny, t.folder / "embedded", query))
