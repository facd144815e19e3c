"""Test that the fast networks give the same bytes on any number of ranks and after a resume."""

import jobs
import pytest

import mpidl as dl


@pytest.mark.slow("jobs")  # tests/nn/zoo/test_fast.py trains and resumes without the command
@pytest.mark.parametrize("network", ["cifar-fast", "fashion"])
def test_the_recipe_gives_the_same_bytes(pictures, tmp_path, network):
    """A run stopped on 3 ranks in epoch 2, and resumed on 2 ranks, has the bytes of one rank."""
    words, halted = ["--epochs", 2, "--warmup-epochs", 1, "--threads", 1], tmp_path / "3"
    jobs.train(1, pictures, tmp_path / "1", *words, network=network)
    jobs.train(3, pictures, halted, *words, "--max-iterations", 5, network=network)
    assert jobs.summary(halted)["iterations"] == 5
    jobs.resume(2, halted, "--max-iterations", "none", "--threads", 1)
    jobs.assert_same_weights({n: jobs.weights_hash(tmp_path / n) for n in ("1", "3")})
    net, _ = dl.load_model(tmp_path / "3" / "model.h5")
    filters = net.parameters["whiten.weight"].reshape(18, 9)
    assert (filters[9:] == -filters[:9]).all()
