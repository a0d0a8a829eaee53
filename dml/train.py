"""Train an embedding, from shards to Recall@K.

    accelerate launch dml/train.py --config configs/sop_bs1000.yaml
    accelerate launch --multi_gpu --num_processes 8 dml/train.py --config ... --set loss.beta=40

The same command again continues a run that was interrupted; the number of processes may change.
Exit codes: 0 finished, 2 a mistake in what was asked for, 3 diverged, 75 interrupted by a
signal and ready to be continued.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dml.config import Config, add_arguments, load, to_dict
from dml.errors import ConfigError
from dml.plan import built_sizes, plan

if TYPE_CHECKING:
    from accelerate import Accelerator

    from dml.distributed.signals import Interrupt

FINISHED, MISTAKE, DIVERGED, INTERRUPTED = 0, 2, 3, 75  # 75: EX_TEMPFAIL of sysexits.h, try again
HISTOGRAMS = 10  # one every so many lines of metrics
PROJECTED = 1000  # images in TensorBoard's projector


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="dml/train.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    config, problem = None, None
    try:
        config = load(arguments.config, arguments.set)
        plan(config, int(os.environ.get("WORLD_SIZE", "1")), *built_sizes(config))
    except ValueError as error:  # ConfigError, or ShardError for damaged shards
        if "RANK" not in os.environ:  # alone: answered at once, without torch
            return complain(error, MISTAKE)
        problem = error
    return train(config, problem)


def complain(error: Exception, code: int) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(f"dml/train.py: {error}", file=sys.stderr, flush=True)
    return code


def train(config: Config | None, problem: ValueError | None = None) -> int:
    """One run, or what is left of it, on all processes that were launched; returns the exit code.

    problem: what is wrong with the config, perhaps on this process's machine alone.
    """
    from dml.distributed.processes import leave_group, make_accelerator, together
    from dml.distributed.signals import Interrupt, Interrupted
    from dml.errors import CheckpointError, LaunchError, ModelError, NotFiniteError, RunError
    from shards.item import ShardError

    mistakes = (ConfigError, ShardError, ModelError, RunError, CheckpointError, LaunchError)
    interrupt = Interrupt()
    with interrupt, ExitStack() as to_the_end:
        try:
            accelerator = make_accelerator(config.engine.precision if config else "fp32")
            with together(accelerator, *mistakes):
                if problem:
                    raise problem
            assert config is not None
            run(config, accelerator, interrupt, to_the_end, mistakes)
            code = FINISHED
        except mistakes as error:
            code = complain(error, MISTAKE)
        except NotFiniteError as error:
            code = complain(error, DIVERGED)
        except Interrupted as error:
            code = complain(error, INTERRUPTED)
        leave_group()  # only here, where all processes have ended alike: it may wait for them
        return code


def run(
    config: Config,
    accelerator: "Accelerator",
    interrupt: "Interrupt",
    to_the_end: ExitStack,
    mistakes: tuple[type[Exception], ...],
) -> None:
    import torch
    from tqdm import tqdm

    from dml.data.batches import Batches, TrainBatches, held_out
    from dml.data.deck import mix
    from dml.data.loader import attempts, loader
    from dml.distributed.collectives import Wire
    from dml.distributed.full_state import read_weights, write_slots, write_weights
    from dml.distributed.processes import from_first, settle_buckets, together
    from dml.distributed.signals import CONTINUE, FAIL, LEAVE, SAVE, Interrupted
    from dml.errors import LaunchError, NotFiniteError, RunError
    from dml.evaluate import Evaluation, Evaluator, Subset, evaluation_due, of_test_split
    from dml.gpw import GlobalPairLoss, make_loss
    from dml.gpw.global_loss import triton_problem
    from dml.gpw.monitor import pair_report
    from dml.models import make_model
    from dml.optim import learning_rate, make_optimizer, set_learning_rate
    from dml.run_folder.clock import Clock
    from dml.run_folder.folder import hold, is_finished, open_folder, write_plan
    from dml.run_folder.journal import Journal
    from dml.run_folder.result import write_result
    from dml.run_folder.saver import MODEL, OPTIMIZER, Keeper, Progress, last_checkpoint
    from dml.step import update
    from shards.index import load_index
    from shards.item import ShardError

    rank, processes = accelerator.process_index, accelerator.num_processes
    first, device, seed = accelerator.is_main_process, accelerator.device, config.run.seed
    folder = Path(config.run.dir, config.run.name)  # only the first process looks into it
    say = tqdm.write if first else lambda text: None

    # ---- build ------------------------------------------------------------------------------------
    with together(accelerator, *mistakes):
        index = load_index(config.data.shards)
        rows, labels = index.positions("train"), index.labels("train")
        numbers = plan(config, processes, len(set(labels.tolist())), len(rows))
        model: Any = make_model(config.model, config.data, seed)
        if config.model.batchnorm == "synced" and processes > 1 and device.type == "cpu":
            raise LaunchError(
                "torch synchronises BatchNorm on GPUs only; set model.batchnorm=frozen"
            )
        pair_loss = make_loss(config.loss.name, **config.loss.parameters)
        if config.engine.kind == "triton":
            dtype = torch.float64 if config.engine.precision == "fp64" else torch.float32
            if cannot := triton_problem(pair_loss, dtype, device):
                raise LaunchError(cannot)
        if first:
            open_folder(config)
            to_the_end.enter_context(hold(folder))
    if from_first(accelerator, first and is_finished(folder)):
        say(f"{folder} is finished already: see its result.json")
        return
    spec, shards = model.spec, index.manifest["index"]["sha256"]
    if config.engine.precision == "fp64":
        model = model.double()
    held = held_out(labels, config.eval.validation_classes, seed)
    batches = Batches(
        rows[~held], labels[~held], config.batch.classes, config.batch.per_class, seed
    )
    subsets = {"validation": Subset(rows[held], labels[held]), "test": of_test_split(index)}

    # ---- resume: the run's own last checkpoint, else the weights of the config, else from scratch -
    last, damaged = last_checkpoint(accelerator, folder / "checkpoints", shards)
    for sentence in damaged:
        say(f"a damaged checkpoint is passed over: {sentence}")
    progress = Progress(**last.state["progress"]) if last else Progress()
    if last:
        model.load_state_dict(last.tensors[MODEL])
        say(f"continuing {folder} after step {progress.step:,}")
    optimizer: Any = make_optimizer(config.optim, model)
    model, optimizer = accelerator.prepare(model, optimizer)
    if last:
        write_slots(accelerator, model, optimizer, last.tensors[OPTIMIZER], progress.step)
    del last
    settle_buckets(model, torch.zeros(2, spec.size, spec.size, 3, dtype=torch.uint8, device=device))

    # ---- what the loop needs ----------------------------------------------------------------------
    journal = Journal(folder, progress.step, progress.metrics_size) if first else None
    with together(accelerator, RunError):
        if journal and journal.problem:
            raise journal.problem
        if journal:
            write_plan(folder, numbers)
            say(f"{numbers}\n{'folder':<25}  {folder}")
            if journal.metrics.lost:
                say("metrics.jsonl is shorter than at the checkpoint: lines of it are lost")
    keeper = Keeper(accelerator, folder / "checkpoints", shards, model, optimizer, progress.step)
    clock = Clock(device)
    loss_fn = GlobalPairLoss(pair_loss, config.engine.tile, kind=config.engine.kind)
    report_wire = Wire()
    loading = config.data.workers, config.data.prefetch

    def pause(problem: Exception | None, due: bool = False) -> bool:
        """Between two batches: fail together, or leave together, or agree whether to save."""
        problem = problem or (journal.problem if journal else None)
        answer = interrupt.agree(device, FAIL if problem else SAVE if due else CONTINUE)
        if answer == FAIL:
            with together(accelerator, ShardError, RunError):
                if problem:
                    raise problem
        if answer == LEAVE:
            raise Interrupted
        return answer == SAVE

    def save() -> None:
        if journal:
            progress.metrics_size = journal.size()
        keeper.save(progress)

    def evaluate(which: str, step: int) -> Evaluation:
        found = evaluator(model, subsets[which])
        scores = "  ".join(f"{name} {score:.2%}" for name, score in found.scores.items())
        say(f"step {step:,}  {which}: {scores}")
        if journal and found.picture:
            journal.evaluation(step, which, found.scores, found.picture)
        return found

    evaluator = Evaluator(
        accelerator,
        index,
        spec,
        tuple(
            sorted({1, *config.eval.ks})
        ),  # Recall@1 chooses the step, and is what people ask for
        config.engine.micro_batch or min(256, numbers.images_per_process),
        *loading,
        pause,
    )
    own_batches = TrainBatches(index, batches, spec, rank, processes)
    coming = attempts(loader(own_batches, range(progress.step, numbers.steps), *loading))
    hide = None if first else True  # None: unless on a terminal
    bar = tqdm(total=numbers.steps, initial=progress.step, unit="step", disable=hide)
    started, spoken = time.monotonic() - progress.seconds, time.monotonic()

    # ---- the loop ---------------------------------------------------------------------------------
    try:
        while True:
            which = evaluation_due(config.eval, progress.step, numbers.steps)
            if which and progress.evaluated != progress.step:
                scores = evaluate(which, progress.step).scores
                progress.evaluated = progress.step
                if progress.step == 0:
                    progress.untrained = scores
                elif which == "validation" and progress.improves(scores["recall@1"]):
                    keeper.save_best(progress)
            if progress.step == numbers.steps or progress.stale == config.eval.patience:
                break

            with clock("data"):
                batch, problem = next(coming)
            if pause(problem, keeper.age() > 60 * config.save.every_minutes):
                save()

            images, targets = (x.to(device, non_blocking=True) for x in batch)
            torch.manual_seed(mix(seed, progress.step, rank) >> 1)  # for layers with dropout
            lr = learning_rate(config.optim, progress.step, numbers.steps)
            set_learning_rate(optimizer, lr)
            done = update(
                accelerator,
                model,
                loss_fn,
                optimizer,
                images,
                targets,
                config.engine.micro_batch,
                clock,
            )
            progress.step += 1
            progress.without_pairs += done.loss == 0  # no anchor had anything to learn from
            progress.seconds = time.monotonic() - started
            bar.update()

            if progress.step % config.run.log_steps == 0:
                report = pair_report(
                    pair_loss, done.embeddings, targets, config.engine.tile, report_wire
                )
                if journal:
                    metrics = {
                        "images": progress.step * numbers.batch_size,
                        "loss": done.loss,
                        "lr": lr,
                        "gradient_norm": done.gradient_norm,
                        "anchors_mined": report.anchors,
                        "positives_per_anchor": report.positives,
                        "negatives_per_anchor": report.negatives,
                        "steps_without_pairs": progress.without_pairs / progress.step,
                    }
                    timing = clock.timing(numbers.batch_size, loss_fn.wire.bytes_sent)
                    journal.training(progress.step, metrics, timing)
                    if progress.step % (HISTOGRAMS * config.run.log_steps) == 0:
                        journal.pairs(progress.step, report)
                    bar.set_postfix(loss=f"{done.loss:.4f}")
                    if bar.disable and time.monotonic() - spoken > 60:  # a sign of life
                        spoken = time.monotonic()
                        speed = f"{timing['images_per_second']:,.0f} images/s"
                        say(f"step {progress.step:,}  loss {done.loss:.4f}  {speed}")

        # ---- the end ------------------------------------------------------------------------------
        save()
        step = progress.step
        if progress.best_step is not None:
            step = progress.best_step
            write_weights(accelerator, model, keeper.best(step))
        found = evaluate("test", step)
        weights = read_weights(accelerator, model)
        result = {
            **found.scores,
            "step": step,
            "images": step * numbers.batch_size,
            "trained_steps": progress.step,
            "steps_without_pairs": progress.without_pairs / progress.step,
            "validation_recall@1": progress.best_recall if step == progress.best_step else None,
            "untrained": progress.untrained,
            "seed": seed,
            "seconds": round(time.monotonic() - started, 3),
            "world_size": processes,
        }
        with together(accelerator, *mistakes):
            if journal and found.picture:
                some = evaluator.thumbnails(subsets["test"], found.embeddings, PROJECTED)
                journal.hparams(to_dict(config), found.scores)
                journal.projector(*some)
                if journal.problem:
                    raise journal.problem
                write_result(folder, weights, found.picture, result)
        if progress.untrained:
            untrained, trained = progress.untrained["recall@1"], found.scores["recall@1"]
            say(f"Recall@1 of the test classes: {untrained:.1%} untrained, {trained:.1%} trained")
        say(f"{folder}: nearest.png, result.json; tensorboard --logdir {config.run.dir}")
    except Interrupted:
        save()
        signal = interrupt.received or "a signal to another process"
        raise Interrupted(
            f"stopped by {signal} after step {progress.step:,} of {numbers.steps:,}; the same "
            "command continues"
        ) from None
    except NotFiniteError as error:
        raise NotFiniteError(
            f"training diverged between step {keeper.step:,}, of the last checkpoint, and step "
            f"{progress.step + 1:,}: {error}; lower optim.lr, or look at the images of these steps"
        ) from None
    finally:
        bar.close()
        if journal:
            journal.close()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # At the interpreter's own end the threads of gloo now and then abort a process whose work is done.
    os._exit(code)
