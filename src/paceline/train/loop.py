"""The training loop: stages, epochs, steps. This file and `Stepper.step` show how training works."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import replace
from functools import partial

from paceline.train import summary
from paceline.train import task as tasks
from paceline.train.divergence import Diverged
from paceline.train.due import (
    Outcome,
    is_multiple,
    is_new_best,
    is_out_of_patience,
    is_stage_over,
    outcome_at,
    validates_at_end,
)
from paceline.train.duties import check_losses, come_together, save, validate
from paceline.train.feed import Feed, NothingRead
from paceline.train.loss import TooManySkipped
from paceline.train.outlook import outlook
from paceline.train.result import Result
from paceline.train.run import Run
from paceline.world.signals import StopSignals


def train(run: Run) -> Result:
    """Train to the end, to early stopping, or until asked to stop, and close the run; after an error it is undone."""
    is_saved = run.config.out is not None and run.is_kept
    with StopSignals(run.ask_to_stop, saves=is_saved, speaks=run.link.is_first) as signals, run:
        with run.logged():
            outcome = run.regroup_or(train_stages(run))
        signals.is_closing = True
        return run.close(outcome)


def train_stages(run: Run) -> Outcome:
    """Train all stages from the position on, unless a signal or divergence ends the run."""
    outcome = Outcome.EPOCH_DONE
    try:
        for number in range(run.position.stage, len(run.stages.all)):
            outcome = train_stage(run, number)
            if outcome.is_interruption:
                break
    except TooManySkipped:
        if run.config.reduce == "grad":  # else a rank may be alone with it
            with suppress(TooManySkipped):
                run.log.end_epoch()
        raise
    except Diverged as verdict:
        run.log.end_epoch()
        run.progress.say(f"diverged after step {run.position.num_steps}: {verdict}")
        run.progress.say("  lower `--lr`, set `--clip-norm` or a warm-up, or use a level of more precision")
        return Outcome.DIVERGED
    return outcome


def train_stage(run: Run, number: int) -> Outcome:
    """Train one stage, from the position on."""
    config = run.config
    epochs = run.stages.all[number].epochs or config.epochs
    feed = run.begin_stage(number)
    if run.position.is_complete:
        is_early = is_out_of_patience(config, run.position)
        if is_early or is_stage_over(config, run.position, epochs):
            run.progress.say("this run is finished: nothing is left to train")
            return Outcome.EARLY if is_early else Outcome.EPOCH_DONE
    run.move(replace(run.position, is_complete=False))  # or it continues: with more epochs, steps or patience
    if not run.stages.set_up(run, feed):
        save(run)
        return Outcome.STOPPED
    with closing(feed):
        outcome = train_epochs(run, feed, epochs)
    return outcome if outcome.is_interruption else end_stage(run, number, outcome)


def train_epochs(run: Run, feed: Feed, epochs: int | None) -> Outcome:
    """Train the epochs of a stage, from the position on."""
    config, position = run.config, run.position
    is_open = position.step > 0  # resumed inside an epoch, which is to be ended even if no step of it is left
    outcome = Outcome.EARLY if is_out_of_patience(config, position) and not is_open else Outcome.EPOCH_DONE
    goes_on = is_open or (outcome.goes_on and not is_stage_over(config, position, epochs))
    while goes_on:
        outcome = train_epoch(run, feed)
        if outcome.is_interruption:
            return outcome
        outcome = end_epoch(run, outcome)
        position = run.position
        goes_on = outcome.goes_on and not is_stage_over(config, position, epochs)
        if goes_on and (is_multiple(position.epoch, config.save_every_epochs) or is_new_best(config, position)):
            save(run)
    return outcome


def train_epoch(run: Run, feed: Feed) -> Outcome:
    """Train on the batches of an epoch, from the position on."""
    data = summary.data_facts(feed, run.position.epoch)
    ahead = outlook(run.config, run.stages.all, run.stages.began, run.position, data.num_steps)
    run.log.begin_epoch(feed, data, run.stages.name, ahead)
    ended = outcome_at(run.config, run.position, data.num_steps)
    if ended is not None:
        return ended  # resumed: it was saved with its last step
    stepper, hooks, clock = run.stepper, run.hooks, run.clock
    model, loss = stepper.model, partial(run.task.loss, stepper.model)
    for batch in run.batches(feed):
        clock.begin_step()
        if hooks.before_step is not None:
            hooks.before_step(model, batch)
        step = stepper.step(loss, batch, hooks.after_backward)
        if hooks.after_step is not None:
            hooks.after_step(model, step, batch.grains)
        run.advance(batch, step)
        if run.position.num_steps >= run.next_due or run.is_stop_asked(step):  # at most steps nothing is due
            outcome = run.attend(batch, step)
            if outcome is not None:
                return outcome
    if run.position.step == 0:
        raise NothingRead(run.position.epoch)
    return Outcome.EPOCH_DONE


def end_epoch(run: Run, outcome: Outcome) -> Outcome:
    """Log the epoch, and validate if that is due."""
    come_together(run)
    run.log.end_epoch()
    check_losses(run)
    if not outcome.is_cut_short:
        run.move(run.position.end_epoch())
        if is_multiple(run.position.epoch, run.config.val_every_epochs):
            validate(run)
    tasks.report(run.task)
    return Outcome.EARLY if is_out_of_patience(run.config, run.position) else outcome


def end_stage(run: Run, number: int, outcome: Outcome) -> Outcome:
    """Let the task end the stage, validate if that is still to do, and save."""
    check_losses(run, is_over=True)
    is_last = number + 1 == len(run.stages.all)
    is_unseen = not run.validation.is_empty and not run.position.is_fresh
    validates = is_unseen and validates_at_end(run.config, outcome, is_last_stage=is_last)
    if validates:
        save(run)  # a validation may take long, and may fail: no step is lost with it
        if any(run.link.gather_objects(run.stepper.wants_stop)):
            return Outcome.STOPPED
    with run.stepper.whole_statistics():
        run.task.after_stage(run.stepper.model, number)
    run.clock.lap("setup")
    if validates:
        validate(run, is_due=not is_last)
        tasks.report(run.task)
    run.move(replace(run.position, is_complete=is_last))
    if not is_last:
        run.move(run.position.enter_stage(number + 1))
    save(run)
    return outcome
