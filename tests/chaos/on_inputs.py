"""Trials with hostile configs, shards, weights, images and embeddings: accepted, or refused in words.

Every program runs in a fork of the campaign with a limit on its memory, so that hundreds of them take a
minute.
"""

import os

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

GIGABYTES = 4  # that a program may take in addition to what it has after importing torch
SECONDS = 20  # of a processor
NO_MEMORY = "memory is full"  # a sentence, too, though it is not a mistake


def accepted_or_refused(run: Watched, problems: int | None = None) -> str:
    """problems: an exit code that means that problems were found and printed."""
    (code,) = run.codes
    no_traceback(run.said, "for a hostile input")
    if code == FINISHED:
        return IDENTICAL
    if code == UNEXPECTED and NO_MEMORY in run.said:
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
    return accepted_or_refused(program(t, "dml/plan.py", *words))


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
    if run.codes == [DIVERGED] and how.startswith("nan"):
        return REFUSED  # training diverged, and said so
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
