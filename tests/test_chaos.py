"""The campaign of faults (tests/chaos): a short one with fixed seeds, and that it can fail.

Oracle: the same runs, undisturbed. The campaign is a program of its own because it forks.
"""

import json
import random
import subprocess
import sys
from itertools import islice

import pytest
from chaos import hostile
from chaos.campaign import draw, row, table, violations
from chaos.faults import damage
from chaos.judge import (
    IDENTICAL,
    SKIPPED,
    VIOLATION,
    Outcome,
    Violation,
    is_identical,
    is_refusal,
    no_traceback,
    nothing_half_written,
)
from chaos.kinds import KINDS
from chaos.running import Watched
from chaos.shim import compile_shim, failing_disk, jumping_clock
from chaos.soak import growing
from fleet import ROOT, environment

# All set-ups but ZeRO-2 and Slurm, which are slow to start.
SHORT = [
    *(
        "kill-rank:3",
        "kill-rank:5",
        "kill-worker:1",
        "kill-launcher:7",
        "signal:4",
        "signal-twice:0",
    ),
    *("failing-disk:5", "two-at-once:2", "damaged-run:1", "damaged-run:2", "damaged-result:1"),
    *("damaged-shards:1", "planted-link:1", "hostile-shards:1", "hostile-shards:2"),
    *(f"{name}:{seed}" for name in ("damaged-sweep", "hostile-weights") for seed in range(2)),
    *(f"{name}:{seed}" for name in ("hostile-images", "hostile-embeddings") for seed in range(2)),
    *(f"hostile-config:{seed}" for seed in range(12)),
]


@pytest.mark.training
@pytest.mark.timeout(900)
def test_a_short_campaign_finds_no_violation():
    """About three minutes on two cores."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.chaos", "--replay", *SHORT],
        cwd=ROOT,
        env=environment(TMPDIR="/tmp"),  # on a disk; it has a /dev/shm of its own
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout}{ended.stderr}"
    assert f"| all | {len(SHORT)} |" in ended.stdout or "skipped: " in ended.stdout


# ---- a campaign is a function of its seed ---------------------------------------------------------


def test_the_seed_says_which_trials_are_drawn():
    first, again, other = (list(islice(draw(seed, list(KINDS)), 1000)) for seed in (1, 1, 2))
    assert first == again != other
    assert {trial.split(":")[0] for trial in first} == set(KINDS)


@pytest.mark.parametrize("make", [hostile.laughing, hostile.doubling, hostile.one_value])
def test_a_trial_replays_its_input(tmp_path, make):
    texts = []
    for name in ("a", "b"):
        path = tmp_path / name / "x.yaml"
        path.parent.mkdir()
        make(path, random.Random(5), ROOT / "configs" / "icons_mini.yaml")
        texts.append(path.read_bytes())
    assert texts[0] == texts[1]


def test_damage_changes_a_file(tmp_path):
    path = tmp_path / "file"
    for seed in range(50):
        path.write_bytes(b"some content" * 100)
        damage(path, random.Random(seed))
        assert not path.exists() or path.read_bytes() != b"some content" * 100


# ---- every violation is seen ----------------------------------------------------------------------

TRACEBACK = f'Traceback (most recent call last):\n  File "{ROOT}/dml/train.py", line 1, in main\n'


def finished(folder, metrics=b'{"step": 1}\n', weights=b"w", recall=0.5):
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes(metrics)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "result.json").write_text(json.dumps({"recall@1": recall, "seconds": 3}))
    return folder


EXPECTED = {
    "metrics.jsonl": b'{"step": 1}\n',
    "model.safetensors": b"w",
    "result.json": b'{"recall@1": 0.5}',
}


def test_an_identical_result_is_one(tmp_path):
    is_identical(finished(tmp_path / "run"), EXPECTED)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"metrics": b""}, "0 lines instead of 1"),
        ({"metrics": b'{"step": 2}\n'}, "line 1 is"),
        ({"weights": b"v"}, "model.safetensors"),
        ({"recall": 0.4}, "result.json"),
    ],
)
def test_a_changed_result_is_seen(tmp_path, change, words):
    with pytest.raises(Violation, match=words):
        is_identical(finished(tmp_path / "run", **change), EXPECTED)


def test_a_half_written_file_is_seen(tmp_path):
    (tmp_path / "checkpoints" / ".writing").mkdir(parents=True)
    with pytest.raises(Violation, match=r"checkpoints/\.writing"):
        nothing_half_written(tmp_path)


@pytest.mark.parametrize(
    ("code", "said", "words"),
    [
        (2, f"{TRACEBACK}ValueError", "a traceback"),
        (1, "dml/train.py: no such file", "exit code 1"),
        (2, "", "without a sentence"),
        (2, "x" * 10**6, "1,000,000 characters"),
    ],
)
def test_a_bad_refusal_is_seen(code, said, words):
    is_refusal(2, "dml/train.py: there is no such file")
    with pytest.raises(Violation, match=words):
        is_refusal(code, said)


def test_a_launchers_traceback_is_not_ours():
    said = (
        'Traceback (most recent call last):\n  File "/x/bin/accelerate", line 8\nChildFailedError: '
    )
    no_traceback(f"{said}\ndml/train.py FAILED", "")
    with pytest.raises(Violation):
        no_traceback(f"{said}\n[rank1]: {TRACEBACK.splitlines()[1]}", "")


def test_a_hang_and_a_leftover_process_are_seen(tmp_path):
    """The second: a grandchild in a session of its own, whose parent has ended."""
    hang = Watched(tmp_path / "hang")
    hang.start(["sleep", "60"], {})
    with pytest.raises(Violation, match=r"a hang after 1 s.*sleep 60"):
        hang.end(hang=1)
    rest = Watched(tmp_path / "rest")
    rest.start(["sh", "-c", "setsid sleep 60 & sleep 0.2"], {})
    with pytest.raises(Violation, match=r"a leftover process after 1 s.*sleep 60"):
        rest.end(hang=1)
    assert hang.living() == rest.living() == []


def test_it_took_too_long_to_end(tmp_path):
    slow = Watched(tmp_path / "slow")
    slow.start(["sleep", "0.5"], {})
    with pytest.raises(Violation, match="to end"):
        slow.end(prompt=0.1)


def test_what_grows_is_seen():
    flat = [
        {"seconds": t, "RSS of rank 0": 100 + t % 3, "descriptors of rank 0": 9} for t in range(40)
    ]
    assert growing(flat) == []
    leaks = [{**each, "RSS of rank 0": 100 + each["seconds"]} for each in flat]
    assert growing(leaks) == ["RSS of rank 0 grows from 114.5 to 134.5 MiB"]
    leaks = [{**each, "descriptors of rank 0": 9 + each["seconds"] // 20} for each in flat]
    assert growing(leaks) == ["descriptors of rank 0 grows from 9.0 to 10.0"]


# ---- the shim -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    return compile_shim(tmp_path_factory.mktemp("shim"))


WRITES = """
import os, sys
for n in range(5):
    try:
        with open(sys.argv[1] + "/x", "ab", buffering=0) as file:
            file.write(b"x")
            os.fsync(file.fileno())
        os.replace(sys.argv[1] + "/x", sys.argv[1] + "/x")
        print(n, "ok")
    except OSError as error:
        print(n, error.strerror)
"""


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "open"])
@pytest.mark.parametrize(("times", "bad"), [(1, {2}), (0, {2, 3, 4})])
def test_the_third_call_fails(shim, tmp_path, call, times, bad):
    under, log = tmp_path / "under", tmp_path / "log"
    under.mkdir()
    for folder, expected in ((under, bad), (tmp_path, set())):
        env = failing_disk(shim, under, log, call, 3, "EIO", times)
        command = [sys.executable, "-c", WRITES, str(folder)]
        said = subprocess.run(
            command, env=environment(**env), check=True, text=True, capture_output=True
        ).stdout
        answers = ["Input/output error" if n in expected else "ok" for n in range(5)]
        assert said.splitlines() == [f"{n} {answer}" for n, answer in enumerate(answers)]
    assert len(log.read_text().splitlines()) == len(bad)


@pytest.mark.parametrize(("after", "jump"), [(1, -3600), (3600, 0)])
def test_the_clock_jumps(shim, after, jump):
    """Beside a clock of the kernel that the shim leaves alone; after an hour, so not yet."""
    coarse = 5  # CLOCK_REALTIME_COARSE of Linux: the time of the last tick
    code = f"import time; time.sleep(2.1); print(time.time() - time.clock_gettime({coarse}))"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(**jumping_clock(shim, after, -3600)),
        check=True,
        text=True,
        capture_output=True,
    )
    assert jump - 5 < float(ended.stdout) < jump + 5


# ---- the table ------------------------------------------------------------------------------------


def test_the_table_and_the_line_that_replays():
    outcomes = [
        Outcome("kill-rank:1", IDENTICAL, "one process"),
        Outcome("kill-rank:2", VIOLATION, "accelerate", "a hang"),
        Outcome("clock:3", SKIPPED, "accelerate", "no compiler"),
    ]
    assert row("x", outcomes[:2]) == "| x | 2 | 1 | 0 | 1 |"
    text = table(outcomes)
    assert "| `kill-rank`: kill -9 of a training process | 2 | 1 | 0 | 1 |" in text
    assert "clock" not in text
    assert "| accelerate | 1 | 0 | 0 | 1 |" in text
    assert violations(outcomes) == ["python -m tests.chaos --replay kill-rank:2\n    a hang"]
