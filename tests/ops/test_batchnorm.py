"""Test batch normalization: which images the statistics cover, and how accurate they are."""

import numpy as np
import pytest
from op_references import Case, OpChecks
from single_rank import SingleRank, all_images, blocked, numbers

import mpidl as dl
from mpidl.core import tape

GAMMA, BETA = np.array([1.5, 0.5, -1.0]), np.array([0.0, 2.0, 0.25])
COUNTS = (5, 37, 80)


def batchnorm_reference(x, gamma, beta, epsilon=1e-5):
    y = np.empty_like(x)
    for c in range(x.shape[1]):
        channel = x[:, c]
        mean = sum(v.sum() for v in channel) / channel.size
        variance = sum(((v - mean) ** 2).sum() for v in channel) / channel.size
        y[:, c] = gamma[c] * (channel - mean) / np.sqrt(variance + epsilon) + beta[c]
    return y


class TestBatchnorm(OpChecks):
    cases = {
        "images": Case(dl.batchnorm, batchnorm_reference, [(3, 2, 4)], [(3,), (3,)]),
        "features": Case(dl.batchnorm, batchnorm_reference, [(4,)], [(4,), (4,)]),
    }
    errors = [
        (lambda x, f, i: dl.batchnorm(x, np.ones(3), np.ones(3)), ValueError, "batchnorm: expect"),
        (
            lambda x, f, i: dl.batchnorm(x, np.ones(2), np.ones(2), scope="all"),
            ValueError,
            "'global' or 'local', got 'all'",
        ),
    ]
    test_a_share_without_blocks = None  # not run: statistics require all ranks


def images(count, dtype=np.float64):
    """Return images whose statistics differ from block to block."""
    drift = np.arange(count)[:, None, None, None] / 10
    return (numbers("batchnorm images", count, 3, 2, 4) + drift).astype(dtype)


def normalized(world, count, scope, dtype=np.float64):
    """Return (output of all ranks, recorded statistics, this rank's output, batch)."""
    statistics = []
    x = blocked(world, images(count, dtype))
    gamma, beta = GAMMA.astype(dtype), BETA.astype(dtype)
    y = dl.batchnorm(x, gamma, beta, scope=scope, record=lambda *pair: statistics.append(pair))
    return all_images(world, y), statistics, y.local(), x.batch


@pytest.mark.parametrize("scope", ["global", "local"])
@pytest.mark.parametrize("count", COUNTS)
def test_recorded_statistics_cover_the_whole_mini_batch(world, count, scope):
    _, ((mean, variance),), _, _ = normalized(world, count, scope)
    channels = images(count).transpose(1, 0, 2, 3).reshape(3, -1)
    np.testing.assert_allclose(mean, channels.mean(axis=1), rtol=1e-13)
    np.testing.assert_allclose(variance, channels.var(axis=1), rtol=1e-13)
    assert mean.dtype == variance.dtype == np.float64


@pytest.mark.parametrize("count", COUNTS)
def test_local_normalizes_each_share_by_its_own_statistics(world, count):
    _, _, output, batch = normalized(world, count, "local")
    share = images(count)[slice(*batch.images)]
    if len(share):
        np.testing.assert_allclose(output, batchnorm_reference(share, GAMMA, BETA), rtol=1e-11)
    else:
        assert output.shape == (0, 3, 2, 4)


@pytest.mark.parametrize("count", COUNTS)
def test_global_does_not_depend_on_the_ranks_and_local_does(world, count):
    """The scope "local" is the negative control: its results must depend on the number of ranks."""

    def output_bytes(ranks, scope):
        return normalized(ranks, count, scope, np.float32)[0].tobytes()

    expected = output_bytes(SingleRank(), "global")
    assert output_bytes(SingleRank(), "local") == output_bytes(world, "global") == expected
    shares_with_images = min(world.size, -(-count // 16))
    assert (output_bytes(world, "local") == expected) == (shares_with_images == 1)


@pytest.mark.parametrize("count", COUNTS)
def test_vjp_of_local_statistics(world, count):
    def local(x, gamma, beta):
        return dl.batchnorm(x, gamma, beta, scope="local")

    x = blocked(world, images(count))
    assert dl.check_vjp(local, x, GAMMA, BETA, tolerance=1e-6) < 1e-6


def test_gradients_by_the_formula_of_the_paper(world):
    """Compare with the formulas of Ioffe and Szegedy (2015), section 3, in float64."""
    x, dy, epsilon = images(37), numbers("dy", 37, 3, 2, 4), 0.1
    values = blocked(world, x)
    leaves = [dl.Var(v) for v in (values, GAMMA, BETA)]
    y = dl.batchnorm(*leaves, epsilon=epsilon)
    seed = blocked(world, dy, batch=values.batch)
    cotangents = tape.backward(y, seed, fold=world.gplus)
    dx, dgamma, dbeta = (cotangents[leaf] for leaf in leaves)
    dx = all_images(world, dx)
    for c in range(3):
        v, d, n = x[:, c], dy[:, c], x[:, c].size
        mean = v.mean()
        rstd = (v.var() + epsilon) ** -0.5
        dnormal = d * GAMMA[c]
        dvariance = (dnormal * (v - mean)).sum() * -0.5 * rstd**3
        dmean = -dnormal.sum() * rstd + dvariance * -2 * (v - mean).sum() / n
        expected = dnormal * rstd + dvariance * 2 * (v - mean) / n + dmean / n
        np.testing.assert_allclose(dx[:, c], expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(dgamma[c], (d * (v - mean) * rstd).sum(), rtol=1e-11)
        np.testing.assert_allclose(dbeta[c], d.sum(), rtol=1e-11)


def test_statistics_far_from_zero_keep_their_digits(world):
    """The mean is 1000 times the deviation, so E[x^2] - E[x]^2 would lose all digits."""
    x = (1000 + numbers("far", 37, 3, 2, 4)).astype("f4")
    statistics = []
    dl.batchnorm(blocked(world, x), GAMMA, BETA, record=lambda *pair: statistics.extend(pair))
    single = x.transpose(1, 0, 2, 3).reshape(3, -1)
    channels = single.astype("f8")
    np.testing.assert_allclose(statistics[0], channels.mean(axis=1), rtol=1e-10)
    np.testing.assert_allclose(statistics[1], channels.var(axis=1), rtol=1e-5)
    cancelled = (single**2).mean(axis=1) - single.mean(axis=1) ** 2  # negative control
    assert (abs(cancelled - channels.var(axis=1)) > 1e-2 * channels.var(axis=1)).any()


def test_prediction_uses_the_running_state(world):
    x = images(21)
    mean, variance = numbers("mean", 3), numbers("variance", 3, low=0.5)
    y = all_images(world, dl.batchnorm_predict(blocked(world, x), mean, variance, GAMMA, BETA))
    for c in range(3):
        expected = GAMMA[c] * (x[:, c] - mean[c]) / np.sqrt(variance[c] + 1e-5) + BETA[c]
        np.testing.assert_allclose(y[:, c], expected, rtol=1e-12, atol=1e-13)
    with pytest.raises(TypeError, match="train gamma and beta with batchnorm"):
        y = dl.batchnorm_predict(blocked(world, x), mean, variance, dl.Var(GAMMA), BETA)
        tape.backward(y, y.value)


@pytest.mark.parametrize("count", [21, 16, 3])
def test_the_running_state_lets_the_gradient_of_the_images_through(world, count):
    mean, variance = numbers("mean", 3), numbers("variance", 3, low=0.5)

    def predict(x):
        return dl.batchnorm_predict(x, mean, variance, GAMMA, BETA)

    dl.check_vjp(predict, blocked(world, images(count)))
