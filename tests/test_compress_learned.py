"""Training with rounding in it: golden slopes, digits by two networks, layers taught alone."""

import sys

import numpy as np
import pytest

from ascend_lab.compiler.onnx import import_onnx
from ascend_lab.deploy import compress as c
from ascend_lab.deploy.compress import digits as task, learned, learned_rounding
from ascend_lab.deploy.compress.scales import fake_quantise, scale_between
from ascend_lab.errors import UnsupportedError
from bench.compress import features, known_files, magika_model, named_rightly

MADE = {"cnn": task.convolutional, "transformer": task.transformer}
FOUR = c.LayerPlan("ifmr", bits=4, weight_bits=4)


# -- golden slopes --------------------------------------------------------------------------------
def test_slopes_of_a_learned_range_are_those_of_the_original():
    """AMCT's code, github hicann/amct, custom_op/ulq_retrain."""
    x = np.array([-3, -1, -0.2, 0.1, 0.55, 2, 4], np.float32)
    found = scale_between(-1, 2, 8, True)
    assert (found.scale, found.offset) == (pytest.approx(0.0117647061, abs=1e-10), -43)
    wanted = [-1, -1, -0.2, 0.10588235, 0.5529412, 2, 2]
    assert learned_rounding.ulq(x, -1, 2) == pytest.approx(wanted, abs=1e-6)
    inside, low, high = learned_rounding.ulq_slopes(x, -1, 2, np.ones(7))
    assert inside.tolist() == [0, 1, 1, 1, 1, 1, 0]
    assert high == pytest.approx(0.99901956, abs=2e-7)
    assert low == pytest.approx(1.00098038, abs=2e-7)


def test_slopes_of_a_learned_step_are_those_of_the_paper():
    """Esser et al. 2020; torch's learnable fake quantisation agrees."""
    x = np.array([-3, -1.2, -0.4, 0, 0.35, 0.9, 2.6, 5])
    assert fake_quantise(x, 0.5, 0, 3).tolist() == [-2, -1, -0.5, 0, 0.5, 1, 1.5, 1.5]
    inside, step = learned_rounding.lsq_slopes(x, np.array(0.5), np.ones(8), 3)
    assert inside.tolist() == [0, 1, 1, 1, 1, 1, 0, 0]
    assert step == pytest.approx(0.551135192, abs=1e-9)
    assert learned_rounding.lsq_start(x, 3) == pytest.approx(1.94134028, abs=1e-8)
    each = learned_rounding.lsq_slopes(
        np.stack([x, x]), np.array([0.5, 0.5]), np.ones((2, 8)), 3, 0
    )[1]
    assert each == pytest.approx([0.551135192] * 2, abs=1e-9)


def test_the_loss_of_labels():
    student = np.array([[1, 2, 3], [0, -1, 0.5]])
    assert c.cross_entropy([np.array([2, 0])])(student, 0)[0] == pytest.approx(0.75586832, rel=5e-6)


@pytest.mark.parametrize(
    "make", [lambda y: c.cross_entropy([y.argmax(axis=1)]), lambda y: learned.squared([y])]
)
def test_slopes_of_losses_are_their_differences(make):
    rng = np.random.default_rng(0)
    z = rng.normal(size=(4, 3))
    loss = make(rng.normal(size=(4, 3)))
    slope = loss(z, 0)[1]
    for place in np.ndindex(z.shape):
        up = z.copy()
        down = z.copy()
        up[place], down[place] = z[place] + 1e-5, z[place] - 1e-5
        assert slope[place] == pytest.approx((loss(up, 0)[0] - loss(down, 0)[0]) / 2e-5, abs=1e-7)


# -- real data ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def digits():
    return task.load_digits()


@pytest.fixture(scope="module")
def networks(digits):
    return {name: task.trained(make(), digits[0]) for name, make in MADE.items()}


@pytest.mark.parametrize("name", MADE)
def test_eight_bits_cost_at_most_half_a_point(name, networks, digits):
    learn, test = digits
    before = task.accuracy(networks[name], test)
    assert before > 0.92
    for method in ("kl", "minmax", "hfmg"):
        found = c.quantise_graph(networks[name], learn.feeds[:3], c.Plan(c.LayerPlan(method)))
        assert task.accuracy(c.fake_quantised(found), test) >= before - 0.005, method


@pytest.mark.parametrize("name", MADE)
def test_training_with_the_rounding_beats_rounding_afterwards_at_four_bits(name, networks, digits):
    learn, test = digits
    found = c.quantise_graph(networks[name], learn.feeds[:3], c.Plan(FOUR))
    again, losses = c.retrain(
        found, learn.feeds, c.cross_entropy(learn.labels), steps=120, rate=1e-3
    )
    assert np.mean(losses[-10:]) < np.mean(losses[:10])
    before, after = (task.accuracy(c.fake_quantised(one), test) for one in (found, again))
    assert after > before
    assert [layer.name for layer in again.layers] == [layer.name for layer in found.layers]
    assert {layer.bits for layer in again.layers} == {4}


def test_layers_taught_alone_come_closer_to_their_teacher(networks, digits):
    learn = digits[0]
    graph = networks["transformer"]
    found = c.quantise_graph(graph, learn.feeds[:3], c.Plan(FOUR))
    taught, losses = c.distil(found, learn.feeds[:8], steps=80)
    assert losses.keys() == {layer.name for layer in found.layers}
    assert all(np.mean(one[-10:]) < np.mean(one[:3]) for one in losses.values())
    before, after = (
        c.output_error(graph, c.fake_quantised(one), learn.feeds[8:10]) for one in (found, taught)
    )
    assert after < before


def test_without_its_package_the_task_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UnsupportedError, match=r"scikit-learn.*pip install"):
        task.load_digits()


def test_a_pretrained_model_names_files_as_before():
    """Magika's own model, calibrated on 8 files of this installation, tried on others."""
    path, types = magika_model()
    files = list(known_files(3))
    rows = np.array([features(file) for file, _ in files], np.int32)
    labels = np.array([types.index(kind) for _, kind in files])
    graph = import_onnx(path, batch=8)
    found = c.quantise_graph(graph, [{"bytes": rows[::8][:8]}], c.Plan(c.LayerPlan("kl")))
    assert [graph.node(layer.name).op for layer in found.layers] == [
        "batch_matmul", "conv2d", "matmul"]  # fmt: skip
    before, after = (named_rightly(one, rows, labels) for one in (path, c.qdq_model(found)))
    assert before > 0.8
    assert after >= before - 0.02, "one file of 60 may change"
