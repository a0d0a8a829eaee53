"""What a user may have meant by a key that does not exist: other programs use other words."""

from collections.abc import Iterable

from dml.config.sections import KEYS
from dml.rules import did_you_mean, shown

# a word of other programs -> the key, or keys, of ours
SYNONYMS = {
    **dict.fromkeys(("learning_rate", "base_lr", "initial_lr"), "optim.lr"),
    **dict.fromkeys(("optimizer", "optimiser"), "optim.name"),
    **dict.fromkeys(("scheduler", "lr_scheduler"), "optim.schedule"),
    **dict.fromkeys(("wd", "decay"), "optim.weight_decay"),
    **dict.fromkeys(("warmup", "num_warmup_steps"), "optim.warmup_steps"),
    **dict.fromkeys(("batch_size", "bs", "batch.size"), "batch.classes and batch.per_class"),
    **dict.fromkeys(("num_classes", "classes_per_batch"), "batch.classes"),
    **dict.fromkeys(("samples_per_class", "images_per_class", "num_instances"), "batch.per_class"),
    **dict.fromkeys(("num_epochs", "max_epochs", "epoch"), "length.epochs"),
    **dict.fromkeys(("num_steps", "max_steps", "iterations", "max_iter", "iters"), "length.steps"),
    **dict.fromkeys(("num_workers", "dataloader_num_workers"), "data.workers"),
    **dict.fromkeys(("image_size", "img_size", "crop_size", "input_size"), "data.size"),
    **dict.fromkeys(("data_dir", "data_root", "data_path"), "data.shards"),
    **dict.fromkeys(("arch", "architecture", "network", "model_name"), "model.backbone"),
    **dict.fromkeys(("pretrained", "checkpoint"), "model.weights"),
    **dict.fromkeys(("embedding_dim", "embed_dim", "dims"), "model.embedding_size"),
    **dict.fromkeys(("margin", "threshold", "lambda"), "loss.lam"),
    "epsilon": "loss.eps",
    **dict.fromkeys(("base", "inherit", "defaults"), "extends"),
    **dict.fromkeys(("mixed_precision", "amp", "fp16", "bf16", "dtype"), "engine.precision"),
    **dict.fromkeys(("output_dir", "out_dir", "logdir", "save_dir"), "run.dir"),
    **dict.fromkeys(("eval_steps", "eval_every", "eval_interval"), "eval.every_steps"),
    **dict.fromkeys(("log_every", "log_interval", "logging_steps"), "run.log_steps"),
    **dict.fromkeys(("micro_batch_size", "gradient_accumulation_steps"), "engine.micro_batch"),
}


def suggestion(word: object, choices: Iterable[str] = (), prefix: str = "") -> str:
    """`did you mean X? `, or nothing. word: a key, or section.key, that does not exist. choices: the
    names that could stand in its place; prefix: what stands before them."""
    text = word if isinstance(word, str) else shown(word)
    key = text.rpartition(".")[2]
    usual = text.lower().replace("-", "_")
    meant = SYNONYMS.get(usual) or SYNONYMS.get(usual.rpartition(".")[2])
    elsewhere = [path for path in KEYS if path.endswith(f".{key}")]
    if meant is None and len(elsewhere) == 1:
        meant = elsewhere[0]
    return f"did you mean {meant}? " if meant else did_you_mean(key, choices, prefix)
