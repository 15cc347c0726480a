"""Policies against float64 closed forms, numerical integration, finite differences and counted samples."""

import numpy as np
import pytest
import tensorflow as tf

from tfrl.envs.spec import Box, Discrete, MultiDiscrete
from tfrl.networks import distributions
from tfrl.networks.distributions import distribution_for
from tfrl.networks.numpy_policy import actions_in_numpy


def categorical(probabilities):
    return of_logits(np.log(np.atleast_2d(probabilities)).astype(np.float32))


def of_logits(logits):
    return distribution_for(Discrete(logits.shape[-1]))(tf.convert_to_tensor(logits))


def sample(probabilities, uniforms):
    rows = np.tile(probabilities, (len(uniforms), 1))
    return categorical(rows).sample(tf.constant(uniforms, tf.float32)[:, None]).numpy()


# All action spaces

SPACES = [Discrete(5, start=2), MultiDiscrete((2, 4), (0, 1)), Box((-1.0, 0.0), (1.0, 3.0))]


def test_all_action_spaces_are_tested():
    assert {*map(type, SPACES)} == {*distributions._DISTRIBUTIONS}, "add an example to SPACES"


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space.kind)
def test_numpy_and_tensorflow_act_alike_and_a_row_is_the_same_in_any_batch(space):
    actions, generator = distribution_for(space), np.random.default_rng(1)
    parameters = generator.normal(size=(300, actions.parameters_size)).astype(np.float32)
    noise = actions.draw_noise(generator, 300)
    in_numpy = actions_in_numpy(space)
    policy = actions(tf.constant(parameters))
    drawn = policy.sample(tf.constant(noise))
    exact = {"rtol": 0, "atol": 0} if space.dtype == "int32" else {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(in_numpy.act(parameters, noise), drawn, **exact)
    np.testing.assert_allclose(in_numpy.act_greedily(parameters), policy.mode(), **exact)
    log_probs = policy.log_prob(drawn)
    np.testing.assert_allclose(in_numpy.log_probs(parameters, drawn.numpy()), log_probs, rtol=1e-4, atol=1e-4)
    encoded = actions.encoded(drawn)
    assert encoded.dtype == tf.float32 and encoded.shape == (300, space.encoded_size)
    np.testing.assert_array_equal(encoded, space.encoded(drawn.numpy()))
    np.testing.assert_array_equal(actions.as_env_takes(drawn), space.as_env_takes(drawn.numpy()))
    few = actions(tf.constant(parameters[5:8]))
    np.testing.assert_array_equal(few.sample(tf.constant(noise[5:8])), drawn[5:8])
    np.testing.assert_array_equal(few.log_prob(drawn[5:8]), log_probs[5:8])


# Discrete


def test_sampling_inverts_the_cumulative_sum():
    uniforms = [0.0, 0.09, 0.11, 0.29, 0.31, 0.59, 0.61, 0.99]
    assert sample([0.1, 0.2, 0.3, 0.4], uniforms).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_share_of_each_action_is_its_probability():
    probabilities = np.random.default_rng(0).dirichlet(np.ones(15))
    uniforms = (np.arange(100_000) + 0.5) / 100_000
    shares = np.bincount(sample(probabilities, uniforms), minlength=15) / 100_000
    np.testing.assert_allclose(shares, probabilities, atol=2e-5)


def test_the_largest_and_smallest_numbers_give_an_action_that_can_happen():
    largest = np.nextafter(np.float32(1), np.float32(0))
    logits = tf.constant(np.random.default_rng(1).normal(size=(1000, 15)), tf.float32)
    assert of_logits(logits).sample(tf.fill([1000, 1], largest)).numpy().max() == 14
    assert (of_logits(logits).sample(tf.zeros((1000, 1))).numpy() == 0).all()
    never = tf.constant([[-1e9, 0.0, -1e9]])
    for uniform in (0.0, 0.5, largest):
        assert of_logits(never).sample(tf.constant([[uniform]])).numpy() == [1]


def test_log_probabilities_are_normalised_and_ignore_a_shift():
    logits = np.random.default_rng(2).normal(0, 5, (50, 15)).astype(np.float32)
    policy = of_logits(tf.constant(logits))
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    np.testing.assert_allclose(policy.log_probs, expected, rtol=1e-6, atol=1e-6)
    shifted = of_logits(tf.constant(logits + np.float32(64)))
    np.testing.assert_allclose(shifted.log_probs, expected, rtol=1e-4, atol=1e-5)
    actions = np.arange(50, dtype=np.int32) % 15
    taken = policy.log_prob(tf.constant(actions)).numpy()
    np.testing.assert_array_equal(taken, policy.log_probs.numpy()[np.arange(50), actions])


def test_entropy_and_mode():
    policy = categorical([[0.25, 0.25, 0.25, 0.25], [0.5, 0.25, 0.125, 0.125]])
    np.testing.assert_allclose(policy.entropy(), [np.log(4), 1.75 * np.log(2)], rtol=1e-6)
    assert policy.mode().numpy().tolist() == [0, 0] and policy.mode().dtype == tf.int32
    certain = of_logits(tf.constant([[0.0, 1e6, -1e6]]))
    assert certain.entropy().numpy() == [0.0] and certain.mode().numpy() == [1]


def test_numpy_takes_the_same_actions():
    logits = np.random.default_rng(7).normal(size=(200, 5)).astype(np.float32)
    noise = np.random.default_rng(8).random((200, 1), np.float32)
    in_numpy, policy = actions_in_numpy(Discrete(5)), of_logits(tf.constant(logits))
    np.testing.assert_array_equal(in_numpy.act_greedily(logits), policy.mode())
    np.testing.assert_array_equal(in_numpy.act_greedily(logits), logits.argmax(axis=1))
    np.testing.assert_array_equal(in_numpy.act(logits, noise), policy.sample(tf.constant(noise)))
    chosen = in_numpy.act(logits, noise)
    np.testing.assert_allclose(
        in_numpy.log_probs(logits, chosen), policy.log_prob(tf.constant(chosen)), rtol=1e-6, atol=1e-7
    )


def test_gradients_are_finite_for_extreme_logits():
    logits = tf.Variable([[0.0, 300.0, -300.0], [0.0, 0.0, 0.0]])
    with tf.GradientTape() as tape:
        policy = of_logits(logits)
        loss = tf.reduce_sum(policy.entropy() + policy.log_prob(tf.constant([2, 1])))
    assert np.isfinite(tape.gradient(loss, logits)).all()


def test_a_row_of_logits_is_the_same_alone_and_in_any_batch():
    logits = tf.constant(np.random.default_rng(3).normal(size=(37, 15)), tf.float32)
    uniforms = tf.constant(np.random.default_rng(4).random((37, 1), np.float32))
    whole = of_logits(logits)
    for size in (1, 3, 16):
        part = of_logits(logits[5 : 5 + size])
        np.testing.assert_array_equal(part.log_probs, whole.log_probs[5 : 5 + size])
        np.testing.assert_array_equal(
            part.sample(uniforms[5 : 5 + size]), whole.sample(uniforms)[5 : 5 + size]
        )


def test_wrong_ranks_are_refused():
    policy = categorical([0.5, 0.5])
    with pytest.raises(ValueError):
        distribution_for(Discrete(3))(tf.zeros(3))
    with pytest.raises(ValueError):
        distribution_for(Discrete(3))(tf.zeros((1, 4)))
    with pytest.raises(ValueError):
        policy.sample(tf.zeros(1))
    with pytest.raises(ValueError):
        policy.log_prob(tf.zeros((1, 1), tf.int32))


# Box


def box(size):
    return distribution_for(Box((-1.0,) * size, (1.0,) * size))


def scale_of(std):
    """The parameter that stands for a standard deviation, float64."""
    return np.log(np.expm1(std - 0.01)) - np.log(np.expm1(0.99))


def normal(mean, std):
    """A policy of numbers, or arrays [B, D], and the float32 parameters it was made of."""
    mean, std = np.atleast_2d(mean), np.atleast_2d(std)
    parameters = np.concatenate([mean, scale_of(std)], axis=1).astype(np.float32)
    return box(mean.shape[1])(tf.constant(parameters))


def log_density(actions, mean, std):
    """float64: the normal's density at atanh(a) over the slope of tanh there, 1 - a^2."""
    actions = np.float64(actions)
    z = np.arctanh(actions)
    standard = (z - mean) / std
    return (-0.5 * standard**2 - np.log(std * np.sqrt(2 * np.pi)) - np.log1p(-(actions**2))).sum(-1)


def exact_entropy(mean, std):
    """float64, from two million points."""
    nodes, step = np.linspace(-12, 12, 2_000_001, retstep=True)
    z = np.abs(mean + std * nodes)
    log_slope = 2 * (np.log(2) - z - np.log1p(np.exp(-2 * z)))
    mean_slope = (log_slope * np.exp(-(nodes**2) / 2)).sum() * step / np.sqrt(2 * np.pi)
    return np.log(std * np.sqrt(2 * np.pi * np.e)) + mean_slope


MEANS_AND_STDS = [(0, 1), (0.5, 0.3), (-2, 0.05), (1.5, 2), (0, 4), (-6, 1)]


def test_sizes_and_noise_are_those_of_the_spec():
    discrete, continuous = distribution_for(Discrete(7)), box(3)
    assert (discrete.parameters_size, discrete.noise_size) == (7, 1)
    assert (continuous.parameters_size, continuous.noise_size) == (6, 3)
    uniforms = discrete.draw_noise(np.random.default_rng(0), 5)
    np.testing.assert_array_equal(uniforms[:, 0], np.random.default_rng(0).random(5, np.float32))
    normals = continuous.draw_noise(np.random.default_rng(0), 20_000)
    assert normals.shape == (20_000, 3) and normals.dtype == uniforms.dtype == np.float32
    np.testing.assert_allclose(normals.mean(0), 0, atol=0.03)
    np.testing.assert_allclose(normals.std(0), 1, atol=0.03)
    assert abs(np.corrcoef(normals, rowvar=False) - np.eye(3)).max() < 0.03


def test_outputs_of_zero_are_a_mean_of_0_and_a_deviation_of_1():
    noise = np.float32([[-1.5, 0, 0.7]])
    policy = box(3)(tf.zeros((1, 6)))
    np.testing.assert_allclose(policy.sample(tf.constant(noise)), np.tanh(noise), rtol=1e-7)
    np.testing.assert_array_equal(policy.mode(), np.zeros((1, 3)))


def test_actions_are_tanh_of_mean_plus_deviation_times_noise():
    rng = np.random.default_rng(1)
    mean, std = rng.normal(size=(50, 4)), np.exp(rng.normal(size=(50, 4)))
    noise = rng.normal(size=(50, 4)).astype(np.float32)
    policy = normal(mean, std)
    np.testing.assert_allclose(policy.sample(tf.constant(noise)), np.tanh(mean + std * noise), atol=1e-6)
    np.testing.assert_allclose(policy.mode(), np.tanh(mean), atol=1e-6)
    assert policy.mode().dtype == policy.sample(tf.constant(noise)).dtype == tf.float32


def test_log_prob_is_the_closed_form():
    rng = np.random.default_rng(2)
    mean, std = rng.normal(size=(500, 3)), np.exp(rng.normal(size=(500, 3)))
    actions = rng.uniform(-1, 1, (500, 3)).astype(np.float32)
    actions[:100] = np.nextafter(np.float32(1), np.float32(0)) * np.sign(actions[:100])
    actions[100:200] *= 1e-6
    found = normal(mean, std).log_prob(tf.constant(actions)).numpy()
    np.testing.assert_allclose(found, log_density(actions, mean, std), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mean,std", MEANS_AND_STDS)
def test_the_density_integrates_to_1(mean, std):
    # Points dense at the ends: a = tanh(x) for even steps of x, as float32, and what lies between them.
    edges = np.unique(np.tanh(np.linspace(-8.6, 8.6, 20_001)).astype(np.float32))
    policy = normal(np.full((len(edges), 1), mean), np.full((len(edges), 1), std))
    density = np.exp(np.float64(policy.log_prob(tf.constant(edges[:, None]))))
    inside = (np.diff(np.float64(edges)) * (density[1:] + density[:-1]) / 2).sum()
    beyond = (np.abs(mean + std * np.random.default_rng(0).normal(size=1_000_000)) > 8.6).mean()
    assert inside == pytest.approx(1 - beyond, abs=2e-3)


def test_samples_fall_where_the_density_says():
    mean, std, count = 0.4, 0.8, 200_000
    noise = box(1).draw_noise(np.random.default_rng(3), count)
    policy = normal(np.full((count, 1), mean), np.full((count, 1), std))
    actions = policy.sample(tf.constant(noise)).numpy()[:, 0]
    edges = np.linspace(-1, 1, 21)
    inner = np.arctanh(edges[1:-1])
    fine = np.linspace(-12, 12, 480_001)
    density = np.exp(-0.5 * ((fine - mean) / std) ** 2)
    below = np.interp(inner, fine, np.cumsum(density) / density.sum())
    expected = np.diff(np.concatenate([[0], below, [1]]))
    np.testing.assert_allclose(np.histogram(actions, edges)[0] / count, expected, atol=0.004)


def test_the_samples_log_prob_is_that_of_the_action_and_exact_where_tanh_saturates():
    rng = np.random.default_rng(4)
    mean, std = rng.normal(size=(200, 2)), np.exp(rng.normal(-1, 0.5, (200, 2)))
    noise = rng.normal(size=(200, 2)).astype(np.float32)
    policy = normal(mean, std)
    actions, log_prob = policy.sample_with_log_prob(tf.constant(noise))
    np.testing.assert_array_equal(actions, policy.sample(tf.constant(noise)))
    np.testing.assert_allclose(log_prob, policy.log_prob(actions), rtol=1e-3, atol=1e-3)
    far = normal([[30.0], [-30.0]], [[1.0], [1.0]])  # log(1 - tanh(30)^2) = 2 log 2 - 60
    _, log_prob = far.sample_with_log_prob(tf.zeros((2, 1)))
    np.testing.assert_allclose(log_prob, -0.5 * np.log(2 * np.pi) - 2 * np.log(2) + 60, rtol=1e-6)


@pytest.mark.parametrize("mean,std", MEANS_AND_STDS)
def test_entropy_is_minus_the_mean_log_prob(mean, std):
    found = normal(mean, std).entropy().numpy()
    tolerance = 2e-6 if std <= 1 else 2e-4 if std <= 2 else 0.01
    assert found == pytest.approx(exact_entropy(mean, std), abs=tolerance)
    count = 400_000
    noise = box(1).draw_noise(np.random.default_rng(5), count)
    policy = normal(np.full((count, 1), mean), np.full((count, 1), std))
    sampled = -policy.sample_with_log_prob(tf.constant(noise))[1].numpy()
    assert found == pytest.approx(sampled.mean(), abs=5 * sampled.std() / np.sqrt(count) + tolerance)


def test_no_policy_has_more_entropy_than_uniform_actions_and_the_gradient_leads_there():
    stds = np.linspace(0.02, 6, 300)[:, None]
    entropy = normal(np.zeros_like(stds), stds).entropy().numpy()
    assert entropy.max() < np.log(2)
    best = entropy.argmax()
    assert 0.7 < stds[best, 0] < 1.1
    assert (np.diff(entropy[: best + 1]) > 0).all() and (np.diff(entropy[best:]) < 0).all()
    several = normal([[0.1, -0.5, 2.0]], [[0.3, 1.0, 0.7]]).entropy().numpy()
    alone = [normal(m, s).entropy().numpy() for m, s in ((0.1, 0.3), (-0.5, 1.0), (2.0, 0.7))]
    np.testing.assert_allclose(several, np.sum(alone, axis=0), rtol=1e-6)


def gradient(function, x):
    x = tf.Variable(x)
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(function(x))
    return tape.gradient(y, x).numpy()


def differences(function, x, step):
    """Central differences of a scalar function of float64 [1, P]."""
    moves = step * np.eye(x.shape[1])
    return np.array([[(function(x + m) - function(x - m)) / (2 * step) for m in moves]])


def parts(parameters):
    """Means and deviations, float64, of parameters [1, 2 D]."""
    mean, scale = np.split(np.float64(parameters), 2, axis=1)
    return mean, np.log1p(np.exp(scale + np.log(np.expm1(0.99)))) + 0.01


PARAMETERS = np.float32([[0.3, -1.2, 2.0, -0.5, 1.0, -3.0]])
ACTIONS = np.float32([[0.2, -0.99, 0.9999]])


def test_gradients_are_those_of_finite_differences():
    found = gradient(lambda p: box(3)(p).log_prob(tf.constant(ACTIONS)), PARAMETERS)
    expected = differences(lambda p: log_density(ACTIONS, *parts(p))[0], np.float64(PARAMETERS), 1e-6)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    found = gradient(lambda p: box(3)(p).entropy(), PARAMETERS)
    expected = differences(
        lambda p: sum(exact_entropy(m, s) for m, s in zip(*(x[0] for x in parts(p)), strict=True)),
        np.float64(PARAMETERS),
        1e-4,
    )
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
    policy = box(3)(tf.constant(PARAMETERS))
    found = gradient(policy.log_prob, ACTIONS)
    expected = differences(lambda a: log_density(a, *parts(PARAMETERS))[0], np.float64(ACTIONS), 1e-8)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_sacs_gradient_goes_through_the_action():
    """That of log pi(a) - Q(a), with a = tanh(mean + std * noise), for Q(a) = -(a - 0.5)^2."""
    noise = np.float32([[0.5, -1.0, 2.0]])

    def loss(parameters):
        actions, log_prob = box(3)(parameters).sample_with_log_prob(tf.constant(noise))
        return log_prob + tf.reduce_sum((actions - 0.5) ** 2, axis=-1)

    def expected(parameters):
        mean, std = parts(parameters)
        actions = np.tanh(mean + std * noise)
        return (log_density(actions, mean, std) + ((actions - 0.5) ** 2).sum(-1))[0]

    found = gradient(loss, PARAMETERS)
    np.testing.assert_allclose(found, differences(expected, np.float64(PARAMETERS), 1e-6), rtol=1e-4)


EXTREMES = [(m, s) for m in (0.0, 9.0, -40.0, 1e4) for s in (-1e4, -30.0, 0.0, 30.0, 1e4)]


@pytest.mark.parametrize("action", [-1.0, 1.0, 0.0, 0.99999994])
def test_extremes_and_the_ends_give_finite_numbers_and_gradients(action):
    parameters = np.float32(EXTREMES)
    actions = tf.constant(np.full((len(EXTREMES), 1), action, np.float32))
    noise = tf.constant(np.linspace(-6, 6, len(EXTREMES), dtype=np.float32)[:, None])

    def everything(p):
        policy = box(1)(p)
        sampled, log_prob = policy.sample_with_log_prob(noise)
        assert np.abs(sampled).max() < 1 and np.abs(policy.mode()).max() < 1
        terms = [policy.log_prob(actions), log_prob, policy.entropy(), sampled[:, 0], policy.mode()[:, 0]]
        for term in terms:
            assert np.isfinite(term).all()
        return tf.add_n(terms)

    assert np.isfinite(gradient(everything, parameters)).all()
    policy = box(1)(tf.constant(parameters))
    assert np.isfinite(gradient(policy.log_prob, actions)).all()


def test_an_action_at_the_end_counts_as_its_neighbour():
    policy = normal([[0.5], [0.5]], [[1.0], [1.0]])
    neighbour = np.nextafter(np.float32(1), np.float32(0))
    found = policy.log_prob(tf.constant([[1.0], [neighbour]])).numpy()
    assert found[0] == found[1] == pytest.approx(log_density([[neighbour]], 0.5, 1.0)[0], rel=1e-5)
    sampled = policy.sample(tf.constant([[100.0], [-100.0]])).numpy()
    np.testing.assert_array_equal(sampled, [[neighbour], [-neighbour]])


@pytest.mark.parametrize("size", [1, 3, 9])
def test_a_row_is_the_same_alone_and_in_any_batch_and_the_first_ratio_is_1(size):
    rng = np.random.default_rng(6)
    rows = 60
    parameters = rng.normal(0, 3, (rows, 2 * size)).astype(np.float32)
    noise = rng.normal(size=(rows, size)).astype(np.float32)
    policies = box(size)

    @tf.function(reduce_retracing=True)
    def act(parameters, noise):
        policy = policies(parameters)
        actions, log_prob = policy.sample_with_log_prob(noise)
        return actions, policy.log_prob(actions), log_prob, policy.entropy(), policy.mode()

    @tf.function
    def ratio(parameters, actions, old):
        return tf.exp(policies(parameters).log_prob(actions) - old)

    whole = act(parameters, noise)
    for count in range(1, 18):
        for start in (0, 7):
            at = slice(start, start + count)
            for found, expected in zip(act(parameters[at], noise[at]), whole, strict=True):
                np.testing.assert_array_equal(found, expected[at])
            np.testing.assert_array_equal(ratio(parameters[at], whole[0][at], whole[1][at]), np.ones(count))


def test_float64_numbers_are_computed_alike_wherever_they_stand():
    """float32 hides nearly every difference, so this looks at what is rounded to it."""
    rng = np.random.default_rng(7)
    x = tf.constant(rng.uniform(-0.99, 0.99, (64, 3)))
    differ = 0
    for function in (tf.math.log1p, tf.nn.softplus, tf.tanh):
        whole, plain = distributions._batch_invariant(function, x), function(x)
        for count in range(1, 18):
            np.testing.assert_array_equal(
                distributions._batch_invariant(function, x[5 : 5 + count]), whole[5 : 5 + count]
            )
            differ += (function(x[5 : 5 + count]).numpy() != plain[5 : 5 + count].numpy()).sum()
    if not differ:
        pytest.skip("this processor rounds alike without it")


def test_wrong_shapes_of_boxes_are_refused():
    policy = box(2)(tf.zeros((3, 4)))
    for call in (policy.sample, policy.sample_with_log_prob, policy.log_prob):
        with pytest.raises(ValueError):
            call(tf.zeros((3, 1)))
    with pytest.raises(ValueError):
        box(2)(tf.zeros((3, 2)))
