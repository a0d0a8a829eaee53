"""Runs with two towers: views, pairs of features, pairs of images. Oracles: the run of one process, the run
that nothing interrupts, plain DDP, and naive loops over steps, pairs and neighbours."""

import json
import shutil
import signal
from contextlib import closing

import numpy as np
import pytest
import torch
from pictures import put, put_index
from runs import BASE, ICONS, Launched, checkpoints, content, lines, losses, result, train_several
from safetensors.torch import load_file
from servers import http

from dml import embed, search
from dml.config import ConfigError, load
from dml.data.ahead import Ahead
from dml.data.loader import loader
from dml.data.splits import read_splits, train_batches
from dml.errors import LaunchError
from dml.export import program as export
from dml.gpw import dense_loss_of_towers, make_loss
from dml.inference.trained import load_trained
from dml.look import program as look
from dml.models import make_towers
from dml.optim import make_optimizer
from dml.plan import cache_of, missing_files, plan
from shards.build import main as build
from shards.index import load_index
from shards.item import ShardError

pytestmark = [pytest.mark.training, pytest.mark.timeout(600)]

CLASSES, EACH, SIZES = 24, 4, {"x": 10, "y": 7}
ROWS = [(f"c{c:02d}", "train" if c < 16 else "test") for c in range(CLASSES) for _ in range(EACH)]


def vectors():
    """x and y of the same samples, as two encoders might see them."""
    rng = np.random.default_rng(0)
    z = np.repeat(rng.standard_normal((CLASSES, 6)), EACH, axis=0)
    z = z + 0.5 * rng.standard_normal(z.shape)
    made = {name: z @ rng.standard_normal((6, size)) for name, size in SIZES.items()}
    return {name: X.astype(np.float32) for name, X in made.items()}


def pack(root, X, rows=ROWS):
    root.mkdir(parents=True)
    np.save(root / "X.npy", X)
    put(root / "labels.csv", "\n".join(["label,split", *map(",".join, rows)]) + "\n")
    out = root.with_name(f"{root.name}-shards")
    assert build(["features", "--root", str(root), "--out", str(out), "--workers", "1"]) == 0
    return out


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pairs")
    return {name: pack(root / name, X) for name, X in vectors().items()}


COMMON = ["model.embedding_size=8", "batch.classes=6", "optim.schedule=constant", "optim.lr=1e-3"]
IMAGES = [*COMMON, "batch.per_class=2", "length.steps=3", "engine.precision=fp64"]
SAMPLE = ["batch.classes=12", "batch.per_class=1", "towers.labels=sample"]
HELD_OUT = ["eval.validation_classes=0.25", "eval.every_steps=2"]


def of_features(folders):
    return [
        *(f"data.shards={folders['x']}", f"towers.y={folders['y']}", "data.dataset=folder"),
        *("data.size=null", "model.backbone=none", "batch.per_class=2", "eval.ks=[1, 2]"),
        *(*COMMON, "length.steps=4"),
    ]


def runs_of(folders):
    plain, icons = of_features(folders), f"towers.y={ICONS}"
    exact = [*plain, "engine.precision=fp64"]
    siglip = ["loss.name=pairwise_sigmoid", "loss.learn=true"]
    return {
        "views": [*IMAGES, "towers.y=views"],
        "features": exact,
        "clip": [*exact, *SAMPLE, "loss.name=info_nce", *HELD_OUT],
        "siglip": [*exact, *SAMPLE, *siglip],
        "micro": [*exact, "engine.micro_batch=2"],
        "images": [*IMAGES, icons],
        "shared": [*IMAGES, icons, "towers.shared=true"],
        "plain": plain,
        "half": [*plain, "length.steps=2"],
        "rest": [*plain, "run.name=half"],
    }


SOME = {
    1: ("views", "features", "clip", "siglip", "images", "shared"),
    2: ("views", "features", "clip", "siglip", "images", "micro", "plain", "half", "rest"),
    3: ("views", "features", "clip", "siglip"),
}


@pytest.fixture(scope="module")
def runs(folders, tmp_path_factory):
    """Number of processes -> the folder with the runs."""
    found, wanted = {}, runs_of(folders)
    for processes in (1, 2, 3):
        folder = found[processes] = tmp_path_factory.mktemp(f"world{processes}")
        some = {name: wanted[name] for name in SOME[processes]}
        for name, ended in train_several(processes, folder, some).items():
            assert [code for code, _ in ended] == [0] * processes, (name, ended)
    return found


# ---- the same run ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOME[1][:-1])
def test_a_run_is_the_same_for_any_number_of_processes(runs, name):
    alone = losses(runs[1] / name)
    assert len({*alone}) == len(alone) >= 3, "nothing was learned"
    for processes in (2, 3) if name in SOME[3] else (2,):
        assert losses(runs[processes] / name) == pytest.approx(alone, rel=1e-10)
        found, expected = (load_file(runs[w] / name / "model.safetensors") for w in (processes, 1))
        for key, x in expected.items():
            torch.testing.assert_close(found[key], x, rtol=1e-7, atol=1e-10)
        scores = [
            {k: v for k, v in result(runs[w] / name).items() if "@" in k} for w in (processes, 1)
        ]
        assert scores[0] == scores[1]


def test_micro_batches_change_nothing(runs):
    assert losses(runs[2] / "micro") == pytest.approx(losses(runs[1] / "features"), rel=1e-10)


def test_features_are_trained_as_by_a_naive_loop(runs):
    """The whole matrix of similarities, plain autograd, torch's own Adam."""
    run = runs[1] / "features"
    config = load(run / "config.yaml")
    splits = read_splits(config)
    model = make_towers(config, splits.features, splits.y_features).double()
    own, optimizer = (
        train_batches(splits, config, model.spec, 0, 1),
        make_optimizer(config.optim, model),
    )
    loss, found = make_loss(config.loss.name, **config.loss.parameters), []
    X, Y = (torch.from_numpy(vectors()[name]).double() for name in "xy")
    for step in range(4):
        rows, labels = map(torch.from_numpy, own.batches(step))
        L = dense_loss_of_towers(loss, model.x(X[rows]), labels, model.y(Y[rows]), labels)
        optimizer.zero_grad()
        L.backward()
        optimizer.step()
        found.append(L.item())
    assert losses(run) == pytest.approx(found, rel=1e-10)
    for key, x in load_file(run / "model.safetensors").items():
        torch.testing.assert_close(x, model.state_dict()[key], rtol=1e-7, atol=1e-10)


def test_views_are_a_folder_that_is_its_own_partner_with_a_shared_encoder(runs):
    assert content(runs[1] / "views")[0] == content(runs[1] / "shared")[0]
    assert losses(runs[1] / "views") == losses(runs[1] / "shared")
    assert "y_to_x/recall@1" in result(runs[1] / "shared")
    first = losses(runs[1] / "images")[0]
    assert first != losses(runs[1] / "views")[0], "the encoders begin alike"


def test_what_siglip_learns_is_learned(runs):
    learned = load_file(checkpoints(runs[3] / "siglip")[-1] / "loss.safetensors")
    expected = load_file(checkpoints(runs[1] / "siglip")[-1] / "loss.safetensors")
    assert learned["learned.b"].item() != -10
    for key, x in expected.items():
        torch.testing.assert_close(learned[key], x, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", ["features", "clip", "views"])
def test_batches_are_a_function_of_seed_and_step(runs, name):
    """For any number of processes and loader workers; x has the crops that it has without a y."""
    config = load(runs[1] / name / "config.yaml")
    splits = read_splits(config)
    spec = make_towers(config, splits.features, splits.y_features).spec
    whole = train_batches(splits, config, spec, 0, 1)
    for (batch, labels), step in zip(loader(whole, range(3), workers=1), range(3), strict=True):
        parts = [train_batches(splits, config, spec, rank, 3)[step] for rank in range(3)]
        assert torch.equal(torch.cat([images for images, _ in parts]), batch)
        assert torch.equal(torch.cat([of for _, of in parts]), labels)
        assert labels.tolist() == whole.all_labels(step).tolist()
        x, y = whole.spec.split(batch)
        assert torch.equal(x, whole.x[step][0])
        rows, classes = whole.batches(step)
        if name == "views":
            assert (x != y).flatten(1).any(1).all(), "a view is the other one"
        else:
            assert np.array_equal(y.numpy(), vectors()["y"][rows])
            assert np.array_equal(labels, rows if name == "clip" else classes)


def test_the_shards_of_y_may_come_from_a_server(folders, tmp_path, monkeypatch):
    """The same batches, and what they need is downloaded ahead of them."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    found = []
    with http(folders["y"].parent) as server:
        address = f"towers.y={server.url}/{folders['y'].name}"
        for sets in ([], [address, f"data.cache={tmp_path}"]):
            config = config_of(folders, *sets)
            splits = read_splits(config)
            spec = make_towers(config, splits.features, splits.y_features).spec
            batches = train_batches(splits, config, spec, 0, 1)
            with closing(Ahead(batches, range(3), cache_of(config.data))) as ahead:
                assert (ahead.fetcher is not None) == bool(sets)
                found.append(list(loader(batches, range(3))))
    for ours, expected in zip(*found, strict=True):
        assert all(map(torch.equal, ours, expected))


# ---- resumed, killed, under ZeRO -------------------------------------------------------------------


def test_a_resumed_run_has_the_same_bits(runs):
    assert content(runs[2] / "half")[0] == content(runs[2] / "plain")[0]
    assert losses(runs[2] / "half") == losses(runs[2] / "plain")


def test_a_killed_run_has_the_same_bits_and_its_folder_may_move(runs, folders, tmp_path):
    sets = [*of_features(folders), "save.every_minutes=1e-6"]
    run = Launched(2, tmp_path, *sets)
    run.until(2).rank(1).send_signal(signal.SIGKILL)
    assert 0 not in run.end()
    moved = shutil.copytree(folders["y"], tmp_path / "moved")
    again = Launched(2, tmp_path, *sets, f"towers.y={moved}")
    assert again.end() == [0, 0], again.said
    assert "resuming after step" in again.said
    assert content(again.run)[0] == content(runs[2] / "plain")[0]
    assert losses(again.run) == losses(runs[2] / "plain")


def test_under_zero_it_is_the_same_run(runs, folders, tmp_path):
    """Also its evaluation, which embeds with one encoder at a time; and resumed at another stage."""
    for stage, steps in {"zero2": 2, "zero3": 4}.items():
        run = Launched(stage, tmp_path, *of_features(folders), f"length.steps={steps}")
        assert run.end() == [0, 0], run.said
    whole = runs[2] / "plain"
    assert losses(run.run) == pytest.approx(losses(whole), rel=1e-5)
    assert result(run.run)["recall@1"] == result(whole)["recall@1"]


# ---- the plan --------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_the_plan_says_what_is_sent(runs, processes):
    """Training knows all labels, so that they are not sent; here numbers have eight bytes."""
    folder = runs[processes] / "features"
    planned = json.loads((folder / "plan.json").read_text())
    rows, d, statistics = 2 * 12 // processes, 8, 4
    wider = rows * (4 * d + 4 * statistics)
    expected = planned["loss_bytes_sent"] + (processes - 1) * (wider - 8 * rows)
    timing = (folder / "timing.jsonl").read_text().splitlines()
    assert {json.loads(line)["bytes_sent"] for line in timing} == {expected}
    assert (expected > 0) == (processes > 1)
    if processes == 2:
        folder = runs[2] / "plain"
        sent = json.loads((folder / "timing.jsonl").read_text().splitlines()[-1])["bytes_sent"]
        assert sent == json.loads((folder / "plan.json").read_text())["loss_bytes_sent"] - 8 * rows


# ---- evaluation ------------------------------------------------------------------------------------


def recall(Q, G, right, k):
    """Ties count against the model."""
    hits = 0
    for i, q in enumerate(Q):
        S = [float(q @ g) for g in G]
        ahead = [s for j, s in enumerate(S) if not right(i, j)]
        best = max(s for j, s in enumerate(S) if right(i, j))
        hits += sum(s >= best for s in ahead) < k
    return hits / len(Q)


@pytest.mark.parametrize("name", ["features", "clip"])
def test_recall_in_both_directions_is_that_of_a_naive_loop(runs, name):
    run, test = runs[2] / name, [i for i, (_, split) in enumerate(ROWS) if split == "test"]
    with torch.no_grad():
        X, Y = (
            load_trained(run, tower)(torch.from_numpy(vectors()[tower][test])) for tower in "xy"
        )

    def right(i, j):
        return i == j if name == "clip" else ROWS[test[i]][0] == ROWS[test[j]][0]

    found = result(run)
    for k in (1, 2):
        there, back = recall(X, Y, right, k), recall(Y, X, right, k)
        assert found[f"x_to_y/recall@{k}"] == there
        assert found[f"y_to_x/recall@{k}"] == back
        assert found[f"recall@{k}"] == (there + back) / 2
    assert found["recall@2"] > 1.5 * (2 / 32 if name == "clip" else 4 / 32), "better than chance"


def test_queries_search_the_gallery_of_the_other_tower(tmp_path):
    rows = [
        (c, s if s == "train" else ("query", "gallery")[i % 2]) for i, (c, s) in enumerate(ROWS)
    ]
    made = {name: pack(tmp_path / name, X, rows) for name, X in vectors().items()}
    ended = train_several(1, tmp_path, {"run": of_features(made)})
    assert ended["run"][0][0] == 0, ended
    query, gallery = (
        [i for i, row in enumerate(rows) if row[1] == s] for s in ("query", "gallery")
    )
    encoders = {tower: load_trained(tmp_path / "run", tower) for tower in "xy"}

    def embedded(tower, some):
        with torch.no_grad():
            return encoders[tower](torch.from_numpy(vectors()[tower][some]))

    def right(i, j):
        return rows[query[i]][0] == rows[gallery[j]][0]

    found = result(tmp_path / "run")
    for q, g in ("xy", "yx"):
        expected = recall(embedded(q, query), embedded(g, gallery), right, 1)
        assert found[f"{q}_to_{g}/recall@1"] == expected
    with pytest.raises(LaunchError, match="holds no partner of a query; set"):
        read_splits(config_of(made, "towers.labels=sample"))


def test_the_best_step_is_chosen_by_the_mean_of_both_directions(runs):
    told = [line for line in lines(runs[2] / "clip") if line.get("split") == "validation"]
    assert [line["step"] for line in told] == [2, 4]
    for line in told:
        assert line["recall@1"] == (line["x_to_y/recall@1"] + line["y_to_x/recall@1"]) / 2
    best = max(told, key=lambda line: line["recall@1"])
    assert result(runs[2] / "clip")["validation_recall@1"] == best["recall@1"]


def test_views_are_evaluated_as_one_encoder(runs):
    assert "recall@1" in result(runs[1] / "views")
    assert not any("x_to_y" in key for key in result(runs[1] / "views"))
    for name in ("views", "images"):
        assert (runs[1] / name / "nearest.png").exists()


# ---- afterwards ------------------------------------------------------------------------------------


def test_texts_find_images_by_their_vectors(runs, folders, tmp_path, capsys):
    """x is embedded as a set, y is the query. Oracle: the layers of both heads."""
    run, out = runs[2] / "plain", tmp_path / "x"
    made = [str(run), str(folders["x"]), "--out", str(out), "--split", "test", "--workers", "0"]
    assert embed.main(made) == 0
    rows = load_index(folders["x"]).positions("test")
    with torch.no_grad():
        X, Y = (load_trained(run, t)(torch.from_numpy(vectors()[t][rows])) for t in "xy")
    np.testing.assert_allclose(np.load(out / "embeddings.npy"), X, rtol=1e-5, atol=1e-6)
    np.save(tmp_path / "texts.npy", vectors()["y"][rows[:5]])
    capsys.readouterr()
    query = [str(run), str(out), str(tmp_path / "texts.npy"), "--k", "1", "--json", "--tower", "y"]
    assert search.main(query) == 0
    found = [json.loads(line)["found"][0] for line in capsys.readouterr().out.splitlines()]
    nearest = (Y[:5] @ X.T).argmax(1)
    assert [each["image"] for each in found] == [f"{rows[i]:08d}" for i in nearest]
    # the vectors of y are not those that the encoder of x takes
    assert search.main(query[:-2]) == 2
    assert "the model takes vectors of 10 numbers, but" in capsys.readouterr().err
    of_y = [str(run), str(folders["y"]), "--out", str(tmp_path / "y"), "--tower", "y"]
    assert embed.main([*of_y, "--workers", "0"]) == 0
    assert json.loads((tmp_path / "y" / "info.json").read_text())["tower"] == "y"
    assert "tower" not in json.loads((out / "info.json").read_text())


def test_views_leave_an_ordinary_model(runs, tmp_path, capsys):
    run = runs[1] / "views"
    assert all(
        key.startswith(("backbone.", "head.")) for key in load_file(run / "model.safetensors")
    )
    load_trained(run)
    made = [str(run), str(ICONS), "--out", str(tmp_path / "out"), "--tower", "y"]
    assert embed.main(made) == 2
    assert "--tower y: " in capsys.readouterr().err


def test_each_encoder_is_exported_and_what_needs_one_is_refused(runs, tmp_path, capsys):
    run = runs[2] / "plain"
    assert export.main([str(run), "--torch", str(tmp_path / "y.pt2"), "--tower", "y"]) == 0
    Y = torch.from_numpy(vectors()["y"][:3])
    found = torch.export.load(tmp_path / "y.pt2").module()(Y)
    torch.testing.assert_close(found, load_trained(run, "y")(Y).detach(), atol=1e-6, rtol=0)
    images = str(runs[1] / "images")
    for main, words, sentence in (
        (
            export.main,
            [images, "--hf", str(tmp_path / "hf")],
            "has two encoders, and such a folder",
        ),
        (look.main, [images, "--out", str(tmp_path / "look")], "has two encoders, which find"),
    ):
        assert main(words) == 2
        assert sentence in capsys.readouterr().err


# ---- mistakes --------------------------------------------------------------------------------------


def config_of(folders, *sets):
    return load(BASE[1], [*BASE[3:], *of_features(folders), *sets])


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (["towers.y=views"], "are crops of images, but model.backbone=none takes features"),
        (["towers.y=null", "towers.labels=sample"], "has no effect without towers.y"),
        (["towers.y=null", "towers.shared=true"], "or towers.shared=false"),
        (
            ["model.backbone=convnet", "towers.y=views", "towers.shared=true"],
            "always have the same",
        ),
        (["data.shards=[a, b]"], "its rows belong with those of one folder, but data.shards has 2"),
        (["towers.y=null", "batch.per_class=1"], "must be at least 2: without two towers"),
        (
            ["loss.name=proxy_anchor"],
            "proxy_anchor compares samples with proxies, not with another",
        ),
        (["memory.size=100", "memory.from_step=1"], "one set of embeddings, not for two towers"),
        (["engine.kind=triton"], "compare a batch with itself, not two towers"),
        (["eval.frozen=true"], "cannot be compared with each other"),
    ],
)
def test_what_cannot_be_is_refused_at_planning(folders, sets, sentence):
    with pytest.raises(ConfigError) as refused:
        plan(config_of(folders, *sets))
    assert sentence in str(refused.value)


def test_the_rows_of_y_must_belong_with_those_of_x(folders, tmp_path):
    Y, other = vectors()["y"], [*ROWS]
    other[5], other[9] = ("c02", "train"), ("c01", "train")
    short = pack(tmp_path / "short", Y[:-4], ROWS[:-4])
    classes = pack(tmp_path / "classes", Y, other)
    splits = pack(tmp_path / "splits", Y, [(c, "test" if c == "c15" else s) for c, s in ROWS])
    for sets, sentence in (
        ([f"towers.y={short}"], r"but there are 92 rows instead of 96; build both from the same"),
        (
            [f"towers.y={classes}"],
            r"row 5 of .*classes-shards has the class 'c02', but row 5 .* 'c01'",
        ),
        ([f"towers.y={splits}"], r"row 60 of .*splits-shards has the split 'test', but .* 'train'"),
        ([f"towers.y={ICONS}"], "but there are 1200 rows instead of 96".replace("1200", r"[\d,]+")),
        (["towers.shared=true"], "one encoder cannot take vectors of 10 and of 7 numbers; set"),
    ):
        with pytest.raises(LaunchError, match=sentence):
            read_splits(config_of(folders, *sets))
    with pytest.raises(ShardError, match="nowhere is not there: make it with"):
        read_splits(config_of(folders, f"towers.y={tmp_path / 'nowhere'}"))
    (missing,) = missing_files(config_of(folders, f"towers.y={tmp_path / 'nowhere'}"))
    assert missing.startswith("towers.y = ")


def test_images_and_vectors_are_no_pair(folders, tmp_path):
    """Icons whose index is cut to the rows, splits and classes of the vectors."""
    index, icons = load_index(folders["x"]), shutil.copytree(ICONS, tmp_path / "icons")
    rows = load_index(icons).rows[: len(index.rows)].copy()
    for column in ("split", "label"):
        rows[column] = index.rows[column]
    put_index(icons, rows, splits=index.manifest["splits"], classes=list(index.class_names))
    with pytest.raises(
        LaunchError, match=r"has vectors of 10 numbers .* and .*icons has images; both"
    ):
        read_splits(config_of(folders, f"towers.y={icons}"))


def test_another_partner_is_another_run(runs, folders, tmp_path):
    """The folder may move, but not change."""
    shutil.copytree(runs[2] / "plain", tmp_path / "plain")
    other = pack(tmp_path / "other", vectors()["y"] + 1)
    sets = [*of_features(folders), f"towers.y={other}", "length.steps=6"]
    ((code, said),) = train_several(1, tmp_path, {"plain": sets})["plain"]
    assert code == 2
    assert "was trained on other shards" in said
    assert "Traceback" not in said


def test_the_plan_counts_both_towers(folders):
    """Twice what one batch sends and, by rows, computes; the similarities of both directions are held."""
    large = ["batch.classes=1000", "batch.per_class=4"]
    config, alone = (config_of(folders, *large, *more) for more in ([], ["towers.y=null"]))
    for processes in (1, 2, 4):
        two, one = (plan(each, processes) for each in (config, alone))
        assert two.loss_bytes_sent == 2 * one.loss_bytes_sent
        assert two.loss_memory > 1.4 * one.loss_memory
        products = 3 * 2 * 8 * 4000**2  # S and the gradients of both towers
        assert two.loss_flops == (products if processes == 1 else 2 * one.loss_flops)
    assert "two towers" in str(plan(config))
    assert "two towers" not in str(plan(alone))
