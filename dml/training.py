"""The story of a run: build, resume, loop, finish.

Every process runs this at the same time. `team` is what a process knows of the others, and the only
way in which they fail, save or leave together. Only the first process looks into the run's folder.
"""

from contextlib import ExitStack, closing

from dml.config import Config
from dml.distributed.full_state import read_weights, write_weights
from dml.distributed.signals import Interrupted
from dml.distributed.team import Team
from dml.errors import NotFiniteError
from dml.evaluate import evaluation_due
from dml.optim import learning_rate, set_learning_rate
from dml.run_folder.folder import is_of_length, sound_result
from dml.run_folder.result import result_of, summary, write_result
from dml.running.build import Run
from dml.step import seed_random_layers, update


def train(config: Config, team: Team, cleanup: ExitStack) -> None:
    """Train what the config asks for, or what is left of it.

    cleanup: closed when all processes have ended; the run's folder is reserved until then.
    """
    run = Run(config, team, cleanup)
    result = team.from_first(sound_result(run.folder) if team.first else None)
    if result is not None and is_of_length(result, run.plan.steps):
        team.say(
            f"{run.folder} is finished already: see its result.json; a larger length trains it longer"
        )
        return
    team.meet()
    run.resume()
    with closing(run.journal), closing(run.reporter), closing(run.saver), closing(run.coming):
        try:
            loop(run)
            finish(run)
        except Interrupted as stopped:
            run.saver.save()
            run.saver.settle()
            done = f"after step {run.progress.step:,} of {run.plan.steps:,}"
            raise Interrupted(f"{stopped} {done}") from None
        except NotFiniteError as error:
            since = f"step {run.saver.step:,}, of the last checkpoint"
            raise NotFiniteError(
                f"training diverged between {since}, and step {run.progress.step + 1:,}: {error}; lower "
                "optim.lr, or look at the images of these steps"
            ) from None


def loop(run: Run) -> None:
    """Evaluate where it is due, meet the others, update and prepare the next batch meanwhile; until the
    last step."""
    config, team, progress, steps = run.config, run.team, run.progress, run.plan.steps
    model, saver = run.model, run.saver
    if config.eval.frozen and progress.step == 0:
        split = "test" if config.eval.test else "validation"
        progress.frozen = run.evaluator.frozen(model, split)
    run.coming.start(run.clock)
    due = 60 * config.save.every_minutes  # seconds
    prepared = run.coming.prepare(progress.step, saver.age() > due)

    def meanwhile() -> None:
        nonlocal prepared
        prepared = run.coming.prepare(progress.step + 1, saver.age() > due)

    while True:
        if progress.step == steps:
            saver.save()  # before the last evaluation, which a longer run does not have
        which = evaluation_due(config.eval, progress.step, steps)
        if which and progress.evaluated != progress.step:
            scores = run.evaluator(model, which, progress.step).scores
            if progress.is_best(which, scores):
                saver.save_best()
        if progress.step == steps or progress.stale == config.eval.patience:
            return

        assert prepared is not None
        if prepared.meeting.end():
            saver.save()
        images, labels = run.coming.arrived(prepared)
        seed_random_layers(config.run.seed, progress.step, team.rank)
        lr = learning_rate(config.optim, progress.step, steps)
        set_learning_rate(run.optimizer, lr)
        if run.loss_optimizer is not None:
            set_learning_rate(run.loss_optimizer, lr)
        done = update(
            team.accelerator,
            model,
            run.loss_fn,
            run.optimizer,
            images,
            labels,
            config.engine.micro_batch,
            run.clock,
            all_labels=prepared.all_labels,
            identities=prepared.identities,
            meanwhile=meanwhile,
            loss_optimizer=run.loss_optimizer,
        )
        progress.count(done.loss, run.clock.total())
        metrics = {"loss": done.loss, "lr": lr, "gradient_norm": done.gradient_norm}
        if done.loss_gradient_norm is not None:
            metrics["loss_gradient_norm"] = done.loss_gradient_norm
        run.reporter.report(metrics, done.embeddings, labels)


def finish(run: Run) -> None:
    """Evaluate the test classes with the best step by the validation classes, or else the last; write the
    result."""
    config, team, progress, folder = run.config, run.team, run.progress, run.folder
    run.saver.save()
    if progress.best_step is not None:
        write_weights(team.accelerator, run.model, run.saver.best())
    found = run.evaluator(run.model, "test", progress.final_step) if config.eval.test else None
    weights = read_weights(team.accelerator, run.model)
    progress.seconds = run.clock.total()
    result = result_of(found.scores if found else {}, progress, run.plan, config.run.seed)
    run.saver.settle()
    with team.together():
        run.journal.sync()  # all metrics are on disk before the run counts as finished
    with team.together():
        if team.first:
            write_result(folder, weights, result)
    if found and team.first:
        run.evaluator.decorate(folder, config, found)
    team.say(summary(folder, result, config))
