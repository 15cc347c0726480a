"""Level replay: scores against loops, frequencies against the paper's formula, levels of procgen."""

import dataclasses

import numpy as np
import pytest
from refusals import refusal

from tfrl.algorithms.registry import reader
from tfrl.envs import registry
from tfrl.envs.spec import EnvSpec
from tfrl.experience.levels import LevelSampler

LEVELS, FIRST = 12, 1000


def sampler(**changes):
    given = {"temperature": 0.5, "staleness": 0.1, "schedule": "proportionate", "seed": 3} | changes
    return LevelSampler(LEVELS, FIRST, **given)


def a_rollout(generator, current, steps=40):
    """Levels [T + 1, N], `first` [T, N] and errors [T, N]; `current` are the levels of o_0."""
    first = generator.random((steps, len(current))) < 0.15
    drawn = FIRST + generator.integers(LEVELS, size=first.shape)
    levels = [current]
    for t in range(steps):
        levels.append(np.where(first[t], drawn[t], levels[-1]))
    return np.stack(levels), first, generator.exponential(size=first.shape).astype(np.float32)


def oracle_scores(rollouts):
    """Scores, staleness and finished episodes by level, step by step in plain Python."""
    scores, begun, finished = {}, [], dict.fromkeys(range(LEVELS), 0)
    for levels, first, errors in rollouts:
        ended, open_ = [], []
        for n in range(first.shape[1]):
            part = []
            for t in range(first.shape[0]):
                part.append(float(errors[t, n]))
                if first[t, n]:
                    ended.append((levels[t, n] - FIRST, part))
                    part = []
            if part:
                open_.append((levels[-1, n] - FIRST, part))
        for level, part in ended + open_:
            scores[level] = sum(part) / len(part)
        for level, _ in ended:
            finished[level] += 1
        begun += [
            levels[t + 1, n] - FIRST for t in range(len(first)) for n in range(first.shape[1]) if first[t, n]
        ]
    stale = {
        level: len(begun) - 1 - max([-1, *(k for k, b in enumerate(begun) if b == level)])
        for level in finished
    }
    return scores, stale, finished


def test_scores_staleness_and_episodes_equal_a_plain_computation():
    generator, levels, rollouts = np.random.default_rng(0), sampler(), []
    current = FIRST + generator.integers(3, size=5)
    for _ in range(4):
        rollouts.append(a_rollout(generator, current))
        current = rollouts[-1][0][-1]
        levels.update(*rollouts[-1])
        scores, stale, finished = oracle_scores(rollouts)
        assert set(np.flatnonzero(levels.seen)) == set(scores)
        np.testing.assert_allclose(levels.scores[list(scores)], list(scores.values()), rtol=1e-6)
        assert levels.stale.tolist() == [stale[k] for k in range(LEVELS)]
        assert levels.episodes.tolist() == list(finished.values())


def formula(levels, temperature, staleness, schedule="proportionate"):
    """The paper's probabilities, level by level."""
    seen = [k for k in range(LEVELS) if levels.seen[k]]
    ranked = sorted(seen, key=lambda k: -levels.scores[k])
    by_score = {k: (1 / (ranked.index(k) + 1)) ** (1 / temperature) for k in seen}
    by_age = {k: int(levels.stale[k]) for k in seen}
    share = len(seen) / LEVELS if schedule == "proportionate" else float(len(seen) == LEVELS)
    found = []
    for k in range(LEVELS):
        if k not in by_score:
            found.append((1 - share) / (LEVELS - len(seen)))
            continue
        p = (1 - staleness) * by_score[k] / sum(by_score.values()) + staleness * by_age[k] / sum(
            by_age.values()
        )
        found.append(share * p)
    return np.array(found)


CHI_SQUARE_999 = 31.26  # the 99.9 % quantile for 11 degrees of freedom


@pytest.mark.parametrize("temperature", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("seen", [7, LEVELS])
def test_levels_are_drawn_with_the_probabilities_of_the_paper(temperature, seen):
    levels = sampler(temperature=temperature, staleness=0.3)
    generator = np.random.default_rng(1)
    levels.scores[:seen], levels.seen[:seen] = generator.exponential(size=seen), True
    levels.stale[:] = generator.integers(1, 50, size=LEVELS)
    expected = formula(levels, temperature, 0.3)
    np.testing.assert_allclose(levels.probabilities(), expected, rtol=1e-12)
    drawn = np.concatenate([levels.draw(update, range(64), 128).ravel() for update in range(3)])
    counts = np.bincount(drawn - FIRST, minlength=LEVELS)
    assert ((counts - len(drawn) * expected) ** 2 / (len(drawn) * expected)).sum() < CHI_SQUARE_999


def test_unseen_levels_come_first_if_the_schedule_says_so():
    levels = sampler(schedule="unseen-first")
    levels.scores[:7], levels.seen[:7], levels.stale[:] = np.arange(7), True, np.arange(LEVELS)
    np.testing.assert_allclose(levels.probabilities(), [0] * 7 + [1 / 5] * 5)
    levels.seen[:] = True
    np.testing.assert_allclose(levels.probabilities(), formula(levels, 0.5, 0.1, "unseen-first"))


def test_metrics_describe_the_next_levels():
    levels = sampler()
    assert levels.metrics() == {
        "levels/seen": 0,
        "levels/mean_staleness": 0.0,
        "levels/effective": pytest.approx(12),
    }
    levels.scores[:], levels.seen[:], levels.stale[:] = 1.0, True, 5
    found = levels.metrics()
    p = levels.probabilities()
    assert found["levels/seen"] == 12 and found["levels/mean_staleness"] == 5
    assert found["levels/effective"] == pytest.approx(np.exp(-(p * np.log(p)).sum()))
    assert found["levels/effective"] < 6


def test_the_levels_of_an_env_do_not_depend_on_the_other_envs():
    levels = sampler()
    whole = levels.draw(4, range(8), 16)
    np.testing.assert_array_equal(levels.draw(4, [2, 5], 16), whole[:, [2, 5]])
    assert (levels.draw(5, range(8), 16) != whole).any()


def test_a_state_continues_with_the_same_levels():
    one, other = sampler(), sampler()
    one.update(*a_rollout(np.random.default_rng(0), np.full(5, FIRST)))
    other.set_state(one.get_state())
    np.testing.assert_array_equal(other.draw(1, range(4), 9), one.draw(1, range(4), 9))


# Procgen


def alone(spec, level, actions):
    """Observations, rewards and `first` of the only env of a level."""
    env = registry.make(
        dataclasses.replace(
            spec, num_envs=1, num_levels=1, start_level=level, level_replay=False, max_episode_steps=None
        )
    )
    found = [env.observe()]
    for action in actions:
        env.act(np.array([action], np.int32))
        found.append(env.observe())
    env.close()
    return found


@pytest.mark.parametrize("limit", [None, 20])
@pytest.mark.parametrize("game", ["bigfish", pytest.param("fruitbot", marks=pytest.mark.long)])
def test_procgen_envs_play_the_chosen_levels(game, limit):
    """Each episode equals the level alone, also after the env's state was restored in another vector."""
    spec = EnvSpec(game, 3, 7, num_levels=50, start_level=10, max_episode_steps=limit, level_replay=True)
    env, generator = registry.make(spec), np.random.default_rng(0)
    levels, ended = env.levels.copy(), 0
    assert ((levels >= 10) & (levels < 60)).all()
    np.testing.assert_array_equal(levels, spec.first_levels(range(3)))
    actions, shown = [[] for _ in range(3)], [[env.observe().observation[i]] for i in range(3)]
    for t in range(200 if limit is None else 90):
        act, following = generator.integers(15, size=3).astype(np.int32), generator.integers(10, 60, size=3)
        if t % 37 == 36:
            states, old = env.get_state(), env
            before = env.observe()
            env = registry.make(spec, [2, 1, 0])
            env.set_state(states[::-1])
            env.close()
            env = registry.make(spec)
            env.set_state(states)
            for found, expected in zip(env.observe(), before, strict=True):
                np.testing.assert_array_equal(found, expected)
            np.testing.assert_array_equal(env.levels, old.levels)
            old.close()
        env.act(act, following)
        step = env.observe()
        for i in range(3):
            actions[i].append(act[i])
            if not step.first[i]:
                shown[i].append(step.observation[i])
                continue
            expected = alone(spec, int(levels[i]), actions[i])
            for mine, theirs in zip(shown[i], expected, strict=False):
                np.testing.assert_array_equal(mine, theirs.observation[0])
            assert step.reward[i] == expected[-1].reward[0]
            assert step.truncated[i] == (limit is not None and not expected[-1].first[0])
            levels[i], ended = following[i], ended + 1
            actions[i], shown[i] = [], [step.observation[i]]
        np.testing.assert_array_equal(env.levels, levels)
    assert ended > 3
    env.close()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--env", "catch"], "--level-replay needs an env whose levels can be chosen, and catch is none"),
        (["--num-levels", "0"], "--level-replay needs training levels: give their number as --num-levels"),
        (["--num-levels", "2000000"], "at most 1,000,000 levels"),
        (["--distribution-mode", "exploration"], "exploration is a single level"),
        (["--level-staleness", "2"], "--level-staleness must be"),
    ],
)
def test_impossible_settings_are_refused(flags, words):
    assert words in refusal(reader("ppo_procgen").parse, ["--level-replay", *flags])


def test_settings_of_level_replay_need_it():
    words = "--level-temperature has no effect without --level-replay"
    assert words in refusal(reader("drac").parse, ["--level-temperature", "1"])
