"""The model of actors and learners against cases that were worked out by hand."""

import dataclasses

import pytest

from benchmarks import scaling_model
from benchmarks.scaling_model import Costs, Task, actor_seconds, fit_step, learner_seconds, rate

COSTS = Costs(
    flops=1e9,
    python_step=2e-3,
    put=1e-9,
    take=2e-9,
    network=3e-9,
    call=0.01,
    message=0.001,
    ring_byte=1e-9,
)
TASK = Task(
    "by hand",
    *(8, 100, 2, 1000),
    env_seconds=1e-3,
    in_python=False,
    forward=4e6,
    update=12e6,
    weight_bytes=1_000_000,
    learner_cores=4,
    actors_per_node=2,
)


def test_an_actor_steps_its_envs_and_waits_for_weights():
    """Of 4 actors each has 2 x 100 steps of 1 + 4 ms; 2 learners' actors are on a node each."""
    found = actor_seconds(TASK, COSTS, actors=4, learners=2)
    assert found == pytest.approx({"env steps": 1.0, "rollouts": 0.01 + 2e-4, "weights": 0.003})
    assert actor_seconds(TASK, COSTS, actors=4, learners=1)["weights"] == pytest.approx(0.006)
    slow = dataclasses.replace(TASK, in_python=True)
    assert actor_seconds(slow, COSTS, actors=4, learners=2)["env steps"] == pytest.approx(1.4)


def test_a_learner_takes_its_share_and_sums_in_a_ring():
    """400 samples of 12 MFLOP on 4 cores; a ring of 2 has two messages of half the bytes for each sum."""
    found = learner_seconds(TASK, COSTS, actors=4, learners=2)
    assert found == pytest.approx(
        {"update": 1.2, "rollouts": 0.02 + 400e3 * 5e-9, "all-reduce": 2 * 2 * 1.5e-3}
    )
    assert learner_seconds(TASK, COSTS, actors=4, learners=1)["all-reduce"] == 0


def test_the_slower_side_decides():
    """With one actor, 4 s of steps exceed 2.4 s of learning; with eight actors, learning is slower."""
    assert rate(TASK, COSTS, 1, 1) == (pytest.approx(800 / (4.0 + 0.01 + 8e-4 + 0.003)), "env steps")
    assert rate(TASK, COSTS, 8, 1) == (pytest.approx(800 / (2.4 + 0.08 + 0.004)), "update")
    many = dataclasses.replace(TASK, learner_cores=10**6)
    assert rate(many, dataclasses.replace(COSTS, message=1.0), 8, 8)[1] == "all-reduce"
    assert rate(many, dataclasses.replace(COSTS, take=1e-3), 8, 1)[1] == "rollouts"
    assert rate(many, dataclasses.replace(COSTS, network=1e-3), 8, 1)[1] == "weights"


def test_the_fit_finds_the_constants_that_made_the_rates():
    made = {actors: actors / 1.25e-3 for actors in (1, 2, 4)}
    assert fit_step(made, env_seconds=1e-3) == pytest.approx(0.25e-3)
    assert fit_step(scaling_model.MEASURED, env_seconds=1e-3) == pytest.approx(Costs().python_step, abs=5e-6)


def test_no_task_gains_by_fewer_actors_before_its_learners_are_the_limit():
    for task in (scaling_model.COINRUN, scaling_model.SLOW):
        for learners in scaling_model.LEARNERS:
            found = [rate(task, Costs(), n, learners) for n in scaling_model.ACTORS if n >= learners]
            waiting = [steps for steps, part in found if part == "env steps"]
            assert waiting == sorted(waiting)
