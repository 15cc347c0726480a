"""Replay against a plain list of what happened: ends, truncation, n steps, the ring, priorities, shards."""

import dataclasses
import json

import numpy as np
import pytest
from refusals import refusal

from tfrl.algorithms.registry import reader
from tfrl.cli.errors import UserError
from tfrl.envs.spec import ArraySpec, Box, Discrete, Step
from tfrl.experience.replay import ReplayBuffer, check_memory, in_words, replay_bytes
from tfrl.run.checkpoint import State
from tfrl.workers import machine, tf_config

DQN = reader("dqn")

GAMMA = 0.9


def test_episodes_of_envs_that_were_reset_are_truncated():
    """Env 0 begins an episode that nobody ended; env 1 stands where it was shown."""
    replay = ReplayBuffer([0, 1], 10, observation=ArraySpec((1,), "float32"), action=Discrete(2), gamma=GAMMA)
    zeros, no = np.zeros(2, np.float32), np.zeros(2, bool)
    for t in range(3):
        replay.show(Step(zeros, np.full((2, 1), t, np.float32), no if t else ~no, no, None))
        replay.act(np.zeros(2, np.int32))
    replay.show(Step(zeros, np.full((2, 1), 3, np.float32), no, no, None))
    replay.resume_round(np.array([[50], [3]], np.float32), np.array([True, False]))
    replay.act(np.zeros(2, np.int32))
    replay.show(Step(zeros, np.array([[51], [4]], np.float32), no, no, None))
    found = replay._gather(np.array([[[2, 3], [2, 3]]]), np.ones((1, 2, 2), np.float32))
    np.testing.assert_array_equal(found.next_observation[..., 0], [[[3, 51], [3, 4]]])
    np.testing.assert_array_equal(found.observation[..., 0], [[[2, 50], [2, 3]]])
    np.testing.assert_allclose(found.discount, GAMMA)


class Script:
    """Envs whose observation is (env, steps so far); ends come at random. What happened stands in `log`."""

    def __init__(self, envs, seed, shape=(2,), dtype="float32"):
        self.envs, self.shape, self.dtype = list(envs), shape, dtype
        self.generators = [np.random.default_rng([seed, i]) for i in self.envs]
        self.t = 0
        self.log = {i: [] for i in self.envs}  # (o, a, r, terminated, truncated, next o)
        self.shown = [self.observation(i, 0) for i in self.envs]
        self.first = np.ones(len(self.envs), bool)
        self.truncated, self.final = np.zeros(len(self.envs), bool), None
        self.reward = np.zeros(len(self.envs), np.float32)

    def observation(self, i, t):
        value = np.zeros(self.shape, self.dtype)
        value.reshape(-1)[:2] = i, t % 256
        return value

    def observe(self):
        final = None if self.final is None else np.stack(self.final)
        return Step(self.reward, np.stack(self.shown), self.first, self.truncated, final)

    def act(self, actions):
        self.t += 1
        n = len(self.envs)
        self.reward, self.first = np.zeros(n, np.float32), np.zeros(n, bool)
        self.truncated, final = np.zeros(n, bool), []
        for k, (i, generator) in enumerate(zip(self.envs, self.generators, strict=True)):
            end = generator.choice(["", "", "", "terminated", "truncated"])
            self.reward[k] = generator.normal()
            before, after = self.shown[k], self.observation(i, self.t)
            last = after.copy()
            if end:
                last.reshape(-1)[-1] = 99  # of the old episode; `after` is the first of the next
                self.first[k], self.truncated[k] = True, end == "truncated"
                if end == "truncated":
                    final.append(last)
            entry = (before, actions[k].copy(), self.reward[k], end == "terminated", end == "truncated", last)
            self.log[i].append(entry)
            self.shown[k] = after
        self.final = final or None


def play(replay, script, steps, seed=0):
    for _ in range(steps):
        replay.show(script.observe())
        actions = np.array([np.random.default_rng([seed, i, script.t]).integers(3) for i in script.envs])
        replay.act(actions.astype(np.int32))
        script.act(actions.astype(np.int32))
    replay.show(script.observe())


def make(envs, rows, shape=(2,), dtype="float32", **settings):
    specs = {"observation": ArraySpec(shape, dtype), "action": Discrete(3)}
    return ReplayBuffer(envs, rows, gamma=GAMMA, **specs, **settings)


def generators(envs, key=0):
    return [np.random.default_rng([5, key, i]) for i in envs]


def by_hand(log, t, n):
    """The transition of up to n steps from step t, from the list of what happened."""
    reward, discount = 0.0, 1.0
    for k in range(n):
        _, _, r, terminated, truncated, last = log[t + k]
        reward += discount * r
        discount *= GAMMA
        if terminated:
            return reward, 0.0, last
        if truncated:
            return reward, discount, last
    return reward, discount, last


@pytest.mark.parametrize("n", [1, 3, 7])
@pytest.mark.parametrize("steps", [9, 40, 203])
def test_transitions_are_those_that_happened(n, steps):
    script, replay = Script([4, 7, 9], seed=1), make([4, 7, 9], 40, n_step=n)
    play(replay, script, steps)
    assert len(replay) == min(steps, 40)
    batch = replay.sample(generators(script.envs), 5, 30)
    assert batch.observation.shape == (5, 3, 30, 2) and (batch.weight == 1).all()
    seen = set()
    for k, i, j in np.ndindex(5, 3, 30):
        env, t = batch.observation[k, i, j].astype(int)
        assert env == script.envs[i] and max(0, steps - 40) <= t <= steps - n
        reward, discount, last = by_hand(script.log[env], t, n)
        assert batch.reward[k, i, j] == pytest.approx(reward, rel=1e-5, abs=1e-6)
        assert batch.discount[k, i, j] == pytest.approx(discount, rel=1e-6)
        assert batch.action[k, i, j] == script.log[env][t][1]
        if discount > 0:  # else it is not looked at
            np.testing.assert_array_equal(batch.next_observation[k, i, j], last)
        seen.add(t)
    assert len(seen) == min(steps, 40) - n + 1  # 450 draws of at most 40: all of them
    assert batch.reward.dtype == batch.discount.dtype == np.float32


def test_images_stay_uint8_and_draws_do_not_depend_on_other_envs():
    together, alone = Script(range(4), 2, (3, 3, 1), "uint8"), Script([2], 2, (3, 3, 1), "uint8")
    both = [make(s.envs, 20, (3, 3, 1), "uint8", n_step=2) for s in (together, alone)]
    for replay, script in zip(both, (together, alone), strict=True):
        play(replay, script, 33)
    whole, part = (r.sample(generators(s.envs), 3, 8) for r, s in zip(both, (together, alone), strict=True))
    assert whole.observation.dtype == np.uint8
    for name in whole._fields:
        np.testing.assert_array_equal(getattr(whole, name)[:, 2:3], getattr(part, name), err_msg=name)


def test_truncated_episodes_that_the_ring_has_left_are_forgotten():
    script, replay = Script([0, 1], seed=3), make([0, 1], 16)
    play(replay, script, 500)
    kept = sum(entry[4] for log in script.log.values() for entry in log[-16:])
    assert 0 < kept == len(replay._finals)


def test_rows_are_drawn_by_their_errors_with_importance_weights():
    script = Script([0, 1], seed=4)
    replay = make([0, 1], 12, priority_exponent=0.5)
    play(replay, script, 30)
    first = replay.sample(generators([0, 1]), 40, 10)
    assert (first.weight == 1).all()  # all have the same priority as yet
    rows, where = np.unique(first.rows[:, 0], return_index=True)
    assert rows.size == 12
    errors = np.zeros(first.rows.shape)
    for i in range(2):
        errors[:, i] = (1 + first.rows[:, i] % 12) ** (1 + i)
    replay.set_priorities(first.rows, errors)
    count = 20_000
    batch = replay.sample(generators([0, 1], 1), count // 10, 10, beta=0.7)
    shares = []
    for i in range(2):
        priorities = {int(r): ((1 + r % 12) ** (1 + i) + 1e-6) ** 0.5 for r in np.unique(first.rows[:, i])}
        shares.append({row: p / sum(priorities.values()) for row, p in priorities.items()})
    least = min(min(of_env.values()) for of_env in shares)
    for i, of_env in enumerate(shares):
        for row, share in of_env.items():
            mine = batch.rows[:, i] == row
            assert abs(mine.sum() / count - share) < 5 * np.sqrt(share * (1 - share) / count)
            np.testing.assert_allclose(batch.weight[:, i][mine], (share / least) ** -0.7, rtol=1e-5)


def test_weights_undo_the_priorities_of_every_env_alike():
    """With beta 1, a mean over a batch estimates the mean over the rows of all envs."""
    script, replay = Script([0, 1], seed=4), make([0, 1], 12, priority_exponent=1.0)
    play(replay, script, 30)
    batch = replay.sample(generators([0, 1]), 40, 10)
    errors = np.ones(batch.rows.shape)
    errors[:, 1] = np.where(batch.rows[:, 1] == batch.rows[0, 1, 0], 1e-3, 1 + batch.rows[:, 1])
    replay.set_priorities(batch.rows, errors)
    batch = replay.sample(generators([0, 1], 1), 20_000, 10, beta=1.0)
    means = batch.weight.mean(axis=(0, 2), dtype=float)
    assert means[0] == pytest.approx(means[1], rel=0.2) and batch.weight.max() <= 1
    assert replay.min_probability() == pytest.approx(min(t.least / t.total for t in replay._priorities))
    apart = replay.sample(generators([0, 1], 1), 2, 10, beta=1.0, least=replay.min_probability() / 2)
    np.testing.assert_allclose(
        apart.weight * 2, replay.sample(generators([0, 1], 1), 2, 10).weight, rtol=1e-6
    )


def test_a_new_row_is_as_likely_as_the_likeliest_and_half_windows_are_not_drawn():
    script, replay = Script([0], seed=5), make([0], 10, n_step=3, priority_exponent=1.0)
    play(replay, script, 8)
    batch = replay.sample(generators([0]), 20, 5)
    replay.set_priorities(batch.rows, np.where(batch.rows == 2, 50.0, 1.0))
    play(replay, script, 1)
    rows = np.bincount(replay.sample(generators([0], 1), 400, 10).rows.reshape(-1), minlength=11)
    assert abs(rows[6] - rows[2]) < 5 * np.sqrt(rows[2] * 2) and rows[2] > 1000  # 6 is new
    assert rows[7:].sum() == 0


@pytest.mark.parametrize("n", [1, 3])
def test_overwritten_rows_lose_their_old_priority(n):
    """A batch is drawn at every step, so a row has a priority when a new row overwrites it."""
    script, replay = Script([0, 1], seed=12), make([0, 1], 8, n_step=n, priority_exponent=1.0)
    play(replay, script, n)
    for _ in range(40):
        batch = replay.sample(generators([0, 1], script.t), 1, 50)
        oldest = max(0, script.t - 8)
        assert {*batch.observation[..., 1].ravel().astype(int)} <= {*range(oldest, script.t - n + 1)}
        replay.set_priorities(batch.rows, np.ones(batch.rows.shape))
        play(replay, script, 1)
    assert any(entry[4] for log in script.log.values() for entry in log)  # truncated


def saved(replays, store_of, update):
    """Saves the replays of all workers in one checkpoint; the bytes that shards took."""
    parts = [{"indices": np.array(r._envs), **r.get_state()} for r in replays]
    assert len(replays) == 1, "one process here"
    store_of.save(update, State({}, parts, replays[0].shards()), env_steps=update)


def restored(store, envs, rows, **settings):
    found = store.load(pytest.fail, verify_shards=True)
    replay = make(envs, rows, **settings)
    replay.set_state(found.parts, found.shards)
    return replay


def assert_same(one, other, envs_of_one, envs_of_other, key):
    least = one.min_probability() if one._priorities else None
    a = one.sample(generators(envs_of_one, key), 6, 9)
    b = other.sample(generators(envs_of_other, key), 6, 9, least=least)
    columns = [envs_of_one.index(i) for i in envs_of_other]
    for name in a._fields:
        np.testing.assert_array_equal(getattr(a, name)[:, columns], getattr(b, name), err_msg=name)


@pytest.mark.parametrize("alpha", [None, 0.6])
def test_a_checkpoint_holds_all_in_shards_for_any_number_of_workers(store, directory, alpha):
    settings = {"n_step": 2, "priority_exponent": alpha}
    script, replay = Script([0, 1, 2, 3], seed=6), make([0, 1, 2, 3], 30, **settings)
    shards = directory / "shards"
    for update, steps in enumerate((7, 12, 5, 40, 9), start=1):
        play(replay, script, steps)
        drawn = replay.sample(generators(script.envs, update), 2, 3)
        if alpha is not None:
            replay.set_priorities(drawn.rows, drawn.reward)
        before = {path.name: path.stat().st_mtime_ns for path in shards.glob("*")}
        saved([replay], store, update)
        after = {path.name: path.stat().st_mtime_ns for path in shards.glob("*")}
        assert len(set(after) - set(before)) == 1  # what is new, and nothing else, was written
        assert all(after[name] == before[name] for name in set(after) & set(before))
        for envs in ([0, 1, 2, 3], [2], [3, 0]):
            again = restored(store, envs, 30, **settings)
            again.show(replay_shows(script, envs))
            # What is drawn changes priorities of rows that are new: on copies of one state alone.
            whole = restored(store, [0, 1, 2, 3], 30, **settings)
            whole.show(script.observe())
            assert_same(whole, again, [0, 1, 2, 3], envs, update)
    assert len(list(shards.glob("*"))) <= 5


def replay_shows(script, envs):
    """What some of the script's envs show."""
    step, columns = script.observe(), [script.envs.index(i) for i in envs]
    finals = dict(
        zip(np.flatnonzero(step.truncated), () if script.final is None else script.final, strict=True)
    )
    mine = [finals[c] for c in columns if c in finals]
    arrays = (step.reward[columns], step.observation[columns], step.first[columns], step.truncated[columns])
    return Step(*arrays, np.stack(mine) if mine else None)


def test_a_restored_replay_continues_like_the_saved_one(store):
    script, replay = Script([0, 1], seed=8), make([0, 1], 12, priority_exponent=0.6)
    play(replay, script, 20)
    drawn = replay.sample(generators([0, 1]), 3, 4)
    replay.set_priorities(drawn.rows, 5.0 + drawn.reward)  # so that new rows are likelier than at the start
    saved([replay], store, 1)
    again = restored(store, [0, 1], 12, priority_exponent=0.6)
    again.show(script.observe())
    state = [g.bit_generator.state for g in script.generators]
    t, shown, log = script.t, list(script.shown), {i: list(x) for i, x in script.log.items()}
    now = (script.reward, script.first, script.truncated, script.final)
    play(replay, script, 9)
    expected = replay.sample(generators([0, 1]), 3, 4)
    for g, s in zip(script.generators, state, strict=True):
        g.bit_generator.state = s
    script.t, script.shown, script.log = t, shown, log
    script.reward, script.first, script.truncated, script.final = now
    play(again, script, 9)
    found = again.sample(generators([0, 1]), 3, 4)
    for name in expected._fields:
        np.testing.assert_array_equal(getattr(expected, name), getattr(found, name), err_msg=name)


def test_an_env_that_cannot_resume_exactly_has_its_episode_truncated(store):
    script, replay = Script([0], seed=9), make([0], 12)
    play(replay, script, 6)
    while script.first[0]:
        play(replay, script, 1)
    saved([replay], store, 1)
    again = restored(store, [0], 12)
    new = script.observation(0, 77)
    cut = Step(script.reward, new[None], np.array([True]), np.array([True]), script.shown[0][None])
    again.show(cut)
    saved([again], store, 2)
    third = restored(store, [0], 12)
    third.show(cut)
    batch = third.sample(generators([0]), 1, 200)
    last = batch.rows[0, 0] == replay.steps - 1
    assert last.any()
    np.testing.assert_array_equal(batch.next_observation[0, 0][last][0], script.shown[0])
    np.testing.assert_allclose(batch.discount[0, 0][last], GAMMA)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_corrected_row_replaces_its_earlier_state_in_the_shards_of_other_workers(store, steps):
    """Two workers resume the run of one twice; env 0 begins another episode, and worker 1 keeps the shard."""
    script, whole = Script([0, 1], seed=9), make([0, 1], 12)
    play(whole, script, 6)
    while script.first.any():
        play(whole, script, 1)
    saved([whole], store, 1)
    found, none = store.load(pytest.fail, verify_shards=True), np.array([False])
    parts, shards, shown, corrected = found.parts, found.shards, list(script.shown), []
    for resume in range(2):
        workers = [make([i], 12) for i in (0, 1)]
        for i, worker in enumerate(workers):
            worker.set_state(parts, shards[:: 1 - 2 * resume])  # in any order
            worker.set_current(shown[i][None], none)
        corrected.append((workers[0].steps - 1, shown[0]))
        shown = [script.observation(0, 77 + resume), shown[1]]
        workers[0].resume_round(shown[0][None], np.array([True]))
        workers[1].resume_round(shown[1][None], none)
        for _ in range(steps):
            shown = [script.observation(i, 87 + resume) for i in (0, 1)]
            for i, worker in enumerate(workers):
                worker.act(np.zeros(1, np.int32))
                worker.show(Step(np.zeros(1, np.float32), shown[i][None], none, none, None))
        parts = [{"indices": np.array([i]), **worker.get_state()} for i, worker in enumerate(workers)]
        shards = [shard for worker in workers for shard in worker.shards()]
        for shard in shards:
            shard.keep(shard.write(store._shards))
        if not steps:
            break  # a second correction of the same row would be another one
    again = make([0, 1], 12)
    again.set_state(parts, shards)
    again.set_current(np.stack(shown), np.array([not steps, False]))
    for row, last in corrected:
        at = np.full((1, 2, 1), row % again._ring)
        batch = again._gather(at, np.ones((1, 2, 1), np.float32))
        np.testing.assert_array_equal(batch.next_observation[0, 0, 0], last)
        assert again._first[row % again._ring].tolist() == [True, False]
        assert again._truncated[row % again._ring].tolist() == [True, False]


def test_continuous_actions_are_kept_as_they_were():
    spec = Box((-2.0, -1.0), (2.0, 1.0))
    replay = ReplayBuffer([0], 5, observation=ArraySpec((2,), "float32"), action=spec, gamma=GAMMA)
    script = Script([0], seed=1)
    replay.show(script.observe())
    replay.act(np.array([[0.25, -1.0]], np.float32))
    script.act(np.zeros((1, 2), np.float32))
    replay.show(script.observe())
    np.testing.assert_array_equal(replay.sample(generators([0]), 1, 1).action, [[[[0.25, -1.0]]]])


def test_a_replay_that_does_not_fit_is_refused_with_one_that_does():
    config = DQN.parse(["--env", "catch", "--replay-size", "160000000000"])
    sentence = refusal(check_memory, config, 1)
    assert "--replay-size 160000000000 needs 9.6 TB" in sentence
    fits = int(sentence.rpartition("use at most ")[2].rstrip("."))
    smaller = dataclasses.replace(config, replay_size=fits - fits % config.num_envs)
    assert 0 < replay_bytes(smaller) < replay_bytes(config)
    check_memory(smaller, 1)


def test_a_refused_replay_is_advised_a_size_that_fits(monkeypatch):
    config = DQN.parse(["--env", "coinrun", "--replay-size", "1000000"])
    assert in_words(config) == "1,000,000 transitions, 12.3 GB"
    monkeypatch.setattr(machine, "memory", lambda: 12_400_000_000)  # nothing left for all else
    assert "needs 12.3 GB, and a replay may use 80% of this machine's memory of 12.4 GB" in refusal(
        check_memory, config, 1
    )
    for size in (800_000, 801_000, 806_000, 807_000, 808_000, 900_000):
        try:
            check_memory(dataclasses.replace(config, replay_size=size), 1)
        except UserError as error:
            assert "; use at most 800000." in str(error) and size > 806_000
        else:
            assert size < 808_000


def test_workers_on_one_machine_share_its_memory(monkeypatch):
    config = DQN.parse(["--env", "coinrun", "--replay-size", "1000000", "--num-envs", "4"])
    monkeypatch.setattr(machine, "memory", lambda: 12_400_000_000)
    check_memory(config, 2)
    check_memory(config, 4, 2)
    sentence = refusal(check_memory, config, 4, 4)
    assert "needs 12.3 GB for 4 of 4 workers" in sentence and "; use at most 800000." in sentence
    machines = ["a:1", "b:1", "a:2", "a:3"]
    text = {"cluster": {"worker": machines}, "task": {"type": "worker", "index": 2}}
    assert tf_config.parse(json.dumps(text)).workers_here == 3
