"""Networks cut into units: nothing lost, nothing twice, and what tensor parallelism leaves."""

from itertools import pairwise

import pytest

from ascend_lab.chip import load_chip
from ascend_lab.errors import ClusterError, InputError
from ascend_lab.graph import Graph, zoo
from ascend_lab.parallel.plans.model import KNOTS, GraphModel, attention_heads, model_of
from ascend_lab.train.profile import profile_training

CHIP = load_chip("Ascend910A")


def bert(batch: int) -> Graph:
    """Return a BERT of three layers and few words."""
    return zoo.build("bert_base", batch, 32, layers=3, vocabulary=512)


@pytest.fixture(scope="module")
def model() -> GraphModel:
    return GraphModel("bert", bert, CHIP)


def test_units_are_the_whole_network(model: GraphModel) -> None:
    units = model.units(8, 1, False)
    profile = profile_training(bert(8), CHIP, optimizer="adam")
    assert sum(u.parameters for u in units) == zoo.parameters(bert(8))
    assert sum(u.forward_s for u in units) == pytest.approx(profile.forward_s)
    assert sum(u.backward_s for u in units) == pytest.approx(profile.backward_s)
    for one, other in pairwise(units):
        assert one.boundary_bytes == 2 * 8 * 32 * 768 <= other.input_bytes


def test_equal_layers_are_repeated(model: GraphModel) -> None:
    long = GraphModel("bert", bert, CHIP, layers=7)
    short, units = model.units(1, 1, False), long.units(1, 1, False)
    four = 4 * (zoo.parameters(bert(1)) - zoo.parameters(
        zoo.build("bert_base", 1, 32, layers=2, vocabulary=512)))  # fmt: skip
    assert sum(u.parameters for u in units) == sum(u.parameters for u in short) + four
    assert (len(units) - len(short)) % 4 == 0


def test_tied_weights_count_once() -> None:
    def gpt(batch: int) -> Graph:
        return zoo.build("gpt2_small", batch, 16, layers=1, vocabulary=512)

    units = GraphModel("gpt", gpt, CHIP).units(1, 1, False)
    assert sum(u.parameters for u in units) == zoo.parameters(gpt(1))


def test_four_all_reduces_a_block(model: GraphModel) -> None:
    units = model.units(8, 2, False)
    blocks = [u for u in units if "layer1." in u.name]
    assert sum(u.exchanges for u in blocks) == 2  # each way
    assert {u.exchange_bytes for u in blocks} == {2.0 * 8 * 32 * 768}


def test_tensor_parallelism_divides_matrices_not_vectors(model: GraphModel) -> None:
    whole, cut = (sum(u.parameters for u in model.units(8, t, False)) for t in (1, 4))
    inner = 3 * 12 * 768**2 + 768**2
    assert whole - cut == inner * 3 // 4
    times = [sum(u.forward_s for u in model.units(8, t, False)) for t in (1, 2, 4)]
    assert times[0] > times[1] > times[2] > times[0] / 4


def test_cutting_the_sequence_cuts_the_rest(model: GraphModel) -> None:
    plain, cut = model.units(8, 4, False), model.units(8, 4, True)
    whole = model.units(8, 1, False)
    kept = [sum(u.activation_bytes for u in units) for units in (whole, plain, cut)]
    assert kept[0] > kept[1] > kept[2] == pytest.approx(kept[0] / 4)
    assert sum(u.forward_s for u in cut) < sum(u.forward_s for u in plain)


def test_activations_are_near_the_published_formula(model: GraphModel) -> None:
    layer = [u for u in model.units(8, 1, False) if "layer1." in u.name]
    found = sum(u.activation_bytes for u in layer)
    wanted = 8 * 32 * 768 * (34 + 5 * 12 * 32 / 768)  # Korthikanti et al., 2022
    # no dropout here, so no masks; tensors kept in fp32 and masked scores are more
    assert 0.6 * wanted < found < 1.4 * wanted


def test_between_the_knots_lies_the_straight_line(model: GraphModel) -> None:
    low, high = KNOTS[:2]
    a, b, c = (sum(u.backward_s for u in model.units(n, 1, False)) for n in (low, 4, high))
    assert b == pytest.approx(a + (c - a) * (4 - low) / (high - low))


def test_degrees_divide_the_heads(model: GraphModel) -> None:
    assert attention_heads(bert(1)) == [12] * 3
    assert model.tensor_degrees() == (1, 2, 4)
    assert model_of("resnet18", CHIP).tensor_degrees() == (1,)
    with pytest.raises(ClusterError, match="tensor degree"):
        model.units(8, 8, False)
    with pytest.raises(InputError):
        model_of("no_such_model", CHIP)
