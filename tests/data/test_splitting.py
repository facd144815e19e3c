"""Test folds of a cross-validation: stratified as in scikit-learn, disjoint, and reproducible."""

import numpy as np
import pytest
from image_sets import refusal

import mpidl as dl
from mpidl.data import ArrayDatastore
from mpidl.evaluation import validation

COUNTS = (23, 8, 41, 5)


def labelled(counts=COUNTS):
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(len(counts)), counts))
    return ArrayDatastore(np.zeros((len(labels), 2, 2), np.uint8), labels)


@pytest.mark.parametrize("count", [2, 3, 5, 7])
def test_each_image_validates_once(count):
    store = labelled()
    folds = store.kfold(count, seed=3)
    assert len(folds) == count
    everything = np.concatenate([held_out.indices for _, held_out in folds])
    assert sorted(everything) == list(range(len(store)))
    for train, held_out in folds:
        assert sorted([*train.indices, *held_out.indices]) == list(range(len(store)))
        assert np.array_equal(train.indices, np.sort(train.indices))
    sizes = [len(held_out) for _, held_out in folds]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_mix_of_labels_is_that_of_scikit_learn(count):
    """Folds have as many images per label as scikit-learn's folds, but in another order."""
    selection = pytest.importorskip(
        "sklearn.model_selection", reason="scikit-learn is not installed"
    )
    store = labelled()
    expected = [
        np.bincount(store.labels[test], minlength=4)
        for _, test in selection.StratifiedKFold(count).split(store.labels, store.labels)
    ]
    counts = [np.bincount(fold.labels, minlength=4) for _, fold in store.kfold(count, seed=8)]
    assert np.array_equal(np.sort(counts, axis=0), np.sort(expected, axis=0))


def test_folds_depend_on_the_seed_alone():
    selections = [[fold.indices for _, fold in labelled().kfold(3, seed=s)] for s in (0, 0, 1)]
    assert all(map(np.array_equal, selections[0], selections[1]))
    assert not any(map(np.array_equal, selections[0], selections[2]))


def test_images_without_labels():
    store = ArrayDatastore(np.zeros((11, 2, 2), np.uint8))
    assert sorted(len(fold) for _, fold in store.kfold(3)) == [3, 4, 4]
    for count in (1, 12):
        text = refusal(store.kfold, count)
        assert text.endswith(f"expected 2 to 11 folds, the number of images, got {count}")


def test_the_option_selects_a_fold():
    store = labelled()
    for number, (train, held_out) in enumerate(store.kfold(4, seed=7), 1):
        options = dl.TrainingOptions(fold=f"{number}/4", seed=7)
        training, options = validation.held_out(store, options)
        assert np.array_equal(training.indices, train.indices)
        assert np.array_equal(options.validation.indices, held_out.indices)
        assert validation.held_out(training, options) == (training, options)


def test_refusals():
    for text in ("0/5", "6/5", "1/1", "1", "1/x", "-1/5", "1/0"):
        assert "I/K" in refusal(dl.TrainingOptions, fold=text)
    text = refusal(dl.TrainingOptions, fold="1/5", validation_fraction=0.1)
    assert text == "--fold 1/5 and --validation-fraction 0.1: expected at most one of them"
    options = dl.TrainingOptions(fold="1/3", validation=labelled())
    text = refusal(validation.held_out, labelled(), options)
    assert text == "validation= and --fold 1/3: expected at most one of them"
    text = refusal(validation.held_out, labelled((1, 1)), dl.TrainingOptions(fold="1/3"))
    assert text == "--fold 1/3: expected at least 3 training images, found 2"
