"""What a run writes and chooses, and what it says of mistakes, on the bundled icons.

The same run for any number of processes: test_train_processes. Interrupted runs: test_train_resume.
"""

import json
import shutil
import signal
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from fleet import ROOT, WORKERS
from pictures import make_folder, put_index
from runs import BASE, ICONS, TRAIN, Launched, content, lines, result, train, train_several
from safetensors.torch import load_file, save_file

from dml.config import load
from dml.data.batches import EvalBatches
from dml.inference.trained import load_trained
from dml.models import make_model
from dml.recall import recall_at_k
from dml.run_folder.tensorboard_log import NAMES
from dml.train import main
from shards.build import main as build
from shards.index import load_index

training = pytest.mark.training

# ---- what is written, and chosen -------------------------------------------------------------------

FINISHED = [
    "length.steps=20",
    "run.log_steps=2",
    "optim.lr=1e-3",
    "eval.validation_classes=0.2",
    "eval.every_steps=5",
    "eval.untrained=true",
    "eval.frozen=true",
]
# A learning rate too small to change anything: the first evaluation stays the best.
STALE = [
    "optim.lr=1e-12",
    "eval.validation_classes=0.2",
    "eval.every_steps=2",
    "eval.patience=3",
    "eval.ks=[10]",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of one process, with everything on and with nothing to learn."""
    folder = tmp_path_factory.mktemp("runs")
    wanted = {"finished": FINISHED, "stale": STALE}
    for ended in train_several(1, folder, wanted).values():
        assert [code for code, _ in ended] == [0], ended
    return {name: folder / name for name in wanted}


@pytest.fixture
def finished(runs):
    return runs["finished"]


@training
def test_the_folder_of_a_run(finished):
    assert {path.name for path in finished.iterdir()} >= {
        "config.yaml",
        "plan.json",
        "metrics.jsonl",
        "timing.jsonl",
        "result.json",
        "model.safetensors",
        "checkpoints",
        "projector_config.pbtxt",
    }
    assert json.loads((finished / "plan.json").read_text())["steps"] == 20
    steps = [line["step"] for line in lines(finished) if "loss" in line]
    assert steps == list(range(2, 21, 2))
    assert [(x["step"], x["split"]) for x in lines(finished) if "split" in x][:-1] == [
        (0, "test"),
        *((step, "validation") for step in (5, 10, 15, 20)),
    ]


@training
def test_the_best_step_by_the_validation_classes_is_reported(finished):
    found, told = result(finished), lines(finished)
    tried = {x["step"]: x["recall@1"] for x in told if x.get("split") == "validation"}
    best = max(tried, key=lambda step: (tried[step], -step))
    assert found["step"] == best
    assert found["validation_recall@1"] == tried[best]
    assert (told[-1]["step"], told[-1]["split"]) == (best, "test")
    assert told[-1]["recall@1"] == found["recall@1"]
    assert found["untrained"]["recall@1"] == told[0]["recall@1"]
    assert (found["images"], found["world_size"]) == (best * 48, 1)
    kept = load_file(finished / "checkpoints" / f"best-{best:08d}" / "model.safetensors")
    written = load_file(finished / "model.safetensors")
    assert all(torch.equal(x, kept[k]) for k, x in written.items())


def embedded(model, index, split, **options):
    """All images of a split at once, and their labels."""
    rows, labels = index.positions(split), index.labels(split)
    images, _ = EvalBatches(index, rows, labels, model.spec, len(rows))[0]
    with torch.no_grad():
        return model(images, **options), torch.from_numpy(labels)


@training
def test_the_reported_recall_is_that_of_the_written_model(finished):
    """Oracle: the model in the run's folder, on all test images at once."""
    expected = recall_at_k(*embedded(load_trained(finished), load_index(ICONS), "test"), [1, 10])
    found = result(finished)
    assert {k: found[f"recall@{k}"] for k in expected} == pytest.approx(expected, abs=0.003)


@training
def test_the_features_without_a_head_are_those_before_the_first_step(finished):
    """Oracle: the network of the same seed that nobody trained, its features on all test images."""
    config = load(finished / "config.yaml")
    model = make_model(config.model, config.data, config.run.seed).eval()
    X, y = embedded(model, load_index(ICONS), "test", head=False)
    assert X.shape[1] == model.feature_size
    expected, found = recall_at_k(X, y, [1, 10]), result(finished)["frozen"]
    assert {k: found[f"recall@{k}"] for k in expected} == pytest.approx(expected, abs=0.003)
    assert found["recall@1"] != result(finished)["untrained"]["recall@1"]


@training
def test_tensorboard_reads_every_scalar(finished):
    """All but those of a memory and of proxies, which the tests of these read."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(finished)).Reload()
    tags = found.Tags()
    others = {NAMES["anchors_with_memory"], NAMES["loss_gradient_norm"]}
    assert set(tags["scalars"]) >= {*NAMES.values()} - others
    assert set(tags["scalars"]) >= {"main/validation_recall@1", "main/test_recall@1"}
    assert set(tags["images"]) == {"validation/nearest", "test/nearest"}
    assert set(tags["histograms"]) == {
        "pairs/positive_similarities",
        "pairs/negative_similarities",
        "pairs/log10_weights",
    }
    written = [line["anchors_mined"] for line in lines(finished) if "loss" in line]
    shown = [event.value for event in found.Scalars("pairs/anchors_mined")]
    assert shown == pytest.approx(written, rel=1e-6)


def again(run):
    """The command of the finished run, for the folder that holds `run`."""
    return main([*BASE, f"run.dir={run.parent}", f"run.name={run.name}", *FINISHED])


@training
@pytest.mark.usefixtures("fresh_accelerate")
def test_a_finished_run_is_not_trained_again(finished, capsys):
    def written():
        files = (path for path in finished.rglob("*") if path.is_file())
        return {path: path.stat().st_mtime_ns for path in files if path.name != ".lock"}

    before = written()
    assert again(finished) == 0
    assert "is finished already" in capsys.readouterr().out
    assert written() == before


@training
@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("result_json", [None, ""])
def test_a_run_without_a_whole_result_evaluates_again(finished, tmp_path, result_json):
    """It was killed in its last evaluation, or the file was damaged later."""
    copy = tmp_path / "finished"
    shutil.copytree(finished, copy)
    (copy / "result.json").unlink()
    if result_json is not None:
        (copy / "result.json").write_text(result_json)
    (copy / "model.safetensors").unlink()
    assert again(copy) == 0
    assert {**result(copy), "seconds": 0} == {**result(finished), "seconds": 0}
    assert content(copy) == content(finished)


@training
def test_a_failing_decoration_is_only_a_warning(tmp_path):
    sets = ["length.steps=3", "batch.per_class=4", "batch.classes=12"]
    launched = Launched(1, tmp_path, *sets, program=(WORKERS / "undecorated.py",))
    assert launched.end() == [0], launched.said
    assert "warning: batch.per_class is 4, but 500 of 500 classes have fewer" in launched.said
    assert (
        "warning: no picture, or no projector in TensorBoard: RuntimeError('plain')"
        in launched.said
    )
    assert (launched.run / "nearest.png").exists()
    weights = (launched.run / "model.safetensors").read_bytes()
    assert result(launched.run)["model_sha256"] == sha256(weights).hexdigest()


@training
def test_queries_search_a_gallery(tmp_path):
    """As In-Shop. Oracle: recall_at_k of the written model's embeddings."""
    make_folder(tmp_path / "images", classes=6, splits=("train", "query", "gallery"))
    shards = tmp_path / "shards"
    assert build(["folder", "--root", str(tmp_path / "images"), "--out", str(shards)]) == 0
    sets = ["data.dataset=folder", f"data.shards={shards}", "batch.classes=6", "length.steps=3"]
    run = train(2, tmp_path / "runs", *sets, "eval.ks=[1,2,4]")
    model, index = load_trained(run), load_index(shards)
    queries, gallery = (embedded(model, index, split) for split in ("query", "gallery"))
    expected = recall_at_k(*queries, [1, 2, 4], *gallery)
    assert {k: result(run)[f"recall@{k}"] for k in expected} == expected


@training
def test_patience_ends_a_run_that_no_longer_improves(runs):
    run = runs["stale"]
    assert [x["step"] for x in lines(run) if x.get("split") == "validation"] == [2, 4, 6, 8]
    found = result(run)
    assert (found["step"], found["trained_steps"]) == (2, 8)
    assert {"recall@1", "recall@10"} <= found.keys(), "recall@1 is always reported"


# ---- mistakes ---------------------------------------------------------------------------------------


def refused(capsys, *sets, config=None):
    """The one sentence with which main refuses."""
    argv = list(BASE)
    if config is not None:
        argv[1] = str(config)
    assert main([*argv, *sets]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert err.startswith("dml/train.py: ")
    assert err.count("dml/train.py") == 1
    return err


@pytest.mark.usefixtures("fresh_accelerate")
class TestMistakes:
    def test_a_missing_config(self, capsys, tmp_path):
        assert "nowhere.yaml: No such file" in refused(capsys, config=tmp_path / "nowhere.yaml")

    def test_an_unknown_key(self, capsys):
        assert "loss.betta" in refused(capsys, "loss.betta=1")

    def test_shards_that_are_not_there(self, capsys, tmp_path):
        said = refused(capsys, f"run.dir={tmp_path}", f"data.shards={tmp_path}/none")
        assert f"{tmp_path}/none is not there: make it with shards/build.py" in said

    def test_weights_that_are_not_there(self, capsys, tmp_path):
        said = refused(capsys, f"run.dir={tmp_path}", "model.weights=nowhere.pth")
        assert f"model.weights = nowhere.pth ({Path.cwd()}/nowhere.pth): there is no such" in said

    def test_weights_of_another_architecture(self, capsys, tmp_path):
        other = tmp_path / "other.safetensors"
        save_file({"conv1.weight": torch.zeros(64, 3, 7, 7)}, other)
        said = refused(capsys, f"run.dir={tmp_path}", f"model.weights={other}")
        assert "other.safetensors" in said
        assert "convnet" in said

    def test_more_classes_than_there_are(self, capsys, tmp_path):
        said = refused(capsys, f"run.dir={tmp_path}", "batch.classes=501")
        assert "set batch.classes to at most 500" in said

    def test_a_folder_that_cannot_be_written(self, capsys, tmp_path):
        (tmp_path / "file").write_text("")
        said = refused(capsys, f"run.dir={tmp_path}/file")
        assert "cannot be written: Not a directory; set run.dir to a folder that can" in said

    @training
    def test_a_folder_of_another_config(self, capsys, finished):
        here = [f"run.dir={finished.parent}", "run.name=finished", *FINISHED]
        said = refused(capsys, *here, "optim.lr=0.5", "data.workers=3")
        assert "is a run of another config: " in said
        assert "optim.lr was 0.001 and is 0.5" in said
        assert "data.workers" not in said

    @training
    @pytest.mark.parametrize("other", ["run.seed=1", "model.embedding_size=16"])
    def test_checkpoints_of_another_config(self, capsys, finished, tmp_path, other):
        """In a folder that has lost its own config."""
        shutil.copytree(finished, tmp_path / "finished")
        for file in ("result.json", "config.yaml"):
            (tmp_path / "finished" / file).unlink()
        here = [f"run.dir={tmp_path}", "run.name=finished", *FINISHED]
        assert "were trained with other settings" in refused(capsys, *here, other)

    @training
    def test_a_folder_of_other_shards(self, capsys, finished, tmp_path):
        """Two images have changed places in the index."""
        shutil.copytree(finished, tmp_path / "finished")
        (tmp_path / "finished" / "result.json").unlink()
        shards = tmp_path / "shards"
        shutil.copytree(ICONS, shards)
        rows = np.load(shards / "index.npy")
        rows[:2] = rows[[1, 0]]
        put_index(shards, rows)
        here = [f"run.dir={tmp_path}", "run.name=finished", *FINISHED]
        assert "was trained on other shards" in refused(capsys, *here, f"data.shards={shards}")


# ---- mistakes that several processes must survive ---------------------------------------------------

# every process meets it, and the first one speaks
COMMON = {
    "batch": (["batch.per_class=4"], "64 images are not divisible by 3 processes"),
    "shards": (["data.shards=/nowhere"], "/nowhere is not there"),
    "folder": (["run.dir=/proc/nowhere"], "cannot be written"),
    "weights": (["model.weights=nowhere.pth"], "nowhere.pth"),
    "engine": (["engine.kind=triton"], "engine.kind=triton needs a CUDA GPU"),
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """One launch of three processes makes all mistakes of COMMON, one after another."""
    wanted = {name: sets for name, (sets, _) in COMMON.items()}
    return train_several(3, tmp_path_factory.mktemp("refusals"), wanted, timeout=120)


@training
@pytest.mark.parametrize("mistake", COMMON)
def test_all_processes_stop_and_the_first_one_speaks(refusals, mistake):
    codes, said = zip(*refusals[mistake], strict=True)
    assert codes == (2, 2, 2)
    assert COMMON[mistake][1] in said[0]
    assert [stderr.count("dml/train.py") for stderr in said] == [1, 0, 0]
    assert "Traceback" not in "".join(said)


@training
def test_a_mistake_that_one_process_meets_alone_ends_all(tmp_path):
    """Shards that are missing on the machine of one process."""
    shutil.copytree(ICONS, tmp_path / "0" / "shards")
    (tmp_path / "1").mkdir()
    machines = [tmp_path / "0", tmp_path / "1"]
    launched = Launched(2, tmp_path / "runs", "data.shards=shards", machines=machines)
    assert launched.end(timeout=100) == [2, 2], launched.said
    assert "shards is not there: make it with shards/build.py" in launched.said


@training
def test_a_config_that_one_machine_does_not_have_ends_all(tmp_path):
    machines = [tmp_path / "0", tmp_path / "1"]
    for machine in machines:
        machine.mkdir()
    (machines[0] / "own.yaml").write_text(
        (ROOT / "configs" / "icons_mini.yaml")
        .read_text()
        .replace("presets", f"{ROOT}/configs/presets")
    )
    program = (TRAIN, "--config", "own.yaml", "--set", f"data.shards={ICONS}")
    launched = Launched(2, tmp_path / "runs", machines=machines, program=program, base=())
    assert launched.end(timeout=100) == [2, 2], launched.said
    assert f"{machines[1]}/own.yaml: No such file" in launched.said


@training
def test_two_runs_do_not_share_a_folder(tmp_path):
    """The first one is stopped for a while, lest it ends before the other one begins."""
    launched = Launched(1, tmp_path).until(1)
    launched.processes[0].send_signal(signal.SIGSTOP)
    config = (launched.run / "config.yaml").read_bytes()
    other = Launched(1, tmp_path, "data.prefetch=7")
    assert other.end(timeout=100) == [2]
    assert "another process is training in" in other.said
    assert (launched.run / "config.yaml").read_bytes() == config
    launched.processes[0].send_signal(signal.SIGCONT)
    assert launched.end() == [0], launched.said


@training
def test_a_disk_that_fills_up_ends_all_processes(small_disk, tmp_path):
    """Too small for the second retrieval picture."""
    sets = [f"run.dir={small_disk('400k')}", "eval.every_steps=2", "eval.untrained=true"]
    launched = Launched(2, tmp_path, *sets)
    assert launched.end(timeout=100) == [2, 2], launched.said
    assert "cannot be written: No space left on device; make room" in launched.said
    assert "Traceback" not in launched.said, "also of TensorBoard's thread"


@training
@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_image_ends_all_processes(workers, tmp_path):
    """Some of the images that the second process reads."""
    shutil.copytree(ICONS, tmp_path / "shards")
    index = load_index(tmp_path / "shards")
    with open(index.shards[0], "r+b") as tar:
        for row in index.positions("train")[:700]:
            tar.seek(index.rows[row]["offset"])
            tar.write(b"damaged!")
    sets = [f"data.shards={tmp_path}/shards", f"data.workers={workers}"]
    launched = Launched(2, tmp_path, *sets)
    assert launched.end(timeout=100) == [2, 2], launched.said
    assert "is damaged, its checksum differs from that in the index: copy or build" in launched.said
    assert f"{index.shards[0]}: image 000" in launched.said
    assert "Traceback" not in launched.said
    assert launched.said.count("dml/train.py: ") == 1
