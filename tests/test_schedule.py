"""Learning rates, and which evaluation is due. Oracle: the definitions, worked out by hand."""

import math

import pytest

from dml.config import Eval, Optim
from dml.evaluate import evaluation_due
from dml.optim import learning_rate


def test_constant():
    assert [learning_rate(Optim(lr=0.1), step, 10) for step in (0, 5, 9)] == [0.1, 0.1, 0.1]


def test_a_step_schedule_falls_at_its_milestones():
    optim = Optim(lr=1.0, schedule="step", milestones=(3, 5), gamma=0.1)
    rates = [learning_rate(optim, step, 10) for step in range(7)]
    assert rates == pytest.approx([1, 1, 1, 0.1, 0.1, 0.01, 0.01])


def test_a_cosine_ends_just_above_zero():
    optim = Optim(lr=2.0, schedule="cosine")
    rates = [learning_rate(optim, step, 4) for step in range(4)]
    assert rates == pytest.approx([2, 1 + math.sqrt(0.5), 1, 1 - math.sqrt(0.5)])


def test_warm_up_reaches_the_rate_in_its_last_step_and_the_cosine_starts_after_it():
    optim = Optim(lr=1.0, schedule="cosine", warmup_steps=4)
    rates = [learning_rate(optim, step, 8) for step in range(8)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1, 1])
    assert rates[6] == pytest.approx(0.5)


def test_a_warm_up_longer_than_the_run_is_a_warm_up():
    optim = Optim(lr=1.0, schedule="cosine", warmup_steps=10)
    assert [learning_rate(optim, step, 2) for step in range(2)] == pytest.approx([0.1, 0.2])


def due(steps=10, **settings):
    return [evaluation_due(Eval(ks=(1,), **settings), step, steps) for step in range(steps + 1)]


def test_nothing_is_due_by_default_before_the_end():
    assert due() == [None] * 11


def test_the_test_classes_are_evaluated_during_training_but_not_twice_at_the_end():
    assert [i for i, which in enumerate(due(every_steps=5)) if which == "test"] == [5]


def test_validation_comes_at_the_end_too():
    found = due(every_steps=4, validation_classes=0.2)
    assert [i for i, which in enumerate(found) if which == "validation"] == [4, 8, 10]
    assert "test" not in found


def test_the_untrained_network_is_evaluated_on_the_test_classes():
    found = due(every_steps=4, validation_classes=0.2, untrained=True)
    assert found[0] == "test"
    assert found.count("test") == 1
