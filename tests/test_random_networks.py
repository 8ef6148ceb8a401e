"""Random ONNX networks: what two witnesses agree on is what each of our ways computes.

The default tier takes 100 networks. RANDOM_NETWORKS=FIRST:COUNT takes others, such as 0:2000, which
is about six minutes of a processor; a network is its seed, `random_network(seed)`.
"""

from __future__ import annotations

import os
from collections import Counter
from importlib import import_module
from pathlib import Path

import numpy as np
import onnx
import pytest
from network_builder import Network, moved
from network_steps import STEPS, random_network
from network_witnesses import CHIPS, FP16, FP32, WAYS, judged, truth_of

from ascend_lab.compiler.onnx import CONVERTERS

FIRST, COUNT = map(int, os.environ.get("RANDOM_NETWORKS", "0:100").split(":"))
BATCH = 25
"""Networks of a test: a fault is told before all others have run."""
REFUSED_SHARE = 0.12
"""Most networks that a way refuses: a refusal is right, but a generator of refusals tests nothing.
Sines, scalars that are folded, and odd resizes are refused; 5 % when this was written."""


@pytest.fixture(autouse=True)
def rewriting_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `migrate` always write what it rewrote: where that is slower it would keep the source."""
    module = import_module("ascend_lab.compiler.migrate")
    monkeypatch.setattr(module, "_time_s", lambda *arguments: 0.0)


@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, BATCH))
def test_no_value_is_silently_wrong(first: int, tmp_path: Path) -> None:
    seeds = range(first, min(first + BATCH, FIRST + COUNT))
    outcomes = [judged(random_network(seed), tmp_path) for seed in seeds]
    counts = Counter(v for one in outcomes for v in one.verdicts.values())
    print(dict(Counter(one.witnesses for one in outcomes)), dict(counts))
    assert [fault for one in outcomes for fault in one.faults] == []
    assert counts["right"] > (1 - 2 * REFUSED_SHARE) * counts.total()


# -- the generator itself --------------------------------------------------------------------------
@pytest.fixture(scope="module")
def networks() -> list[Network]:
    return [random_network(seed) for seed in range(100)]


def test_networks_are_those_that_exporters_write(networks: list[Network]) -> None:
    """All families of operators, all opsets, sound files, and the same network for a seed."""
    for network in networks:
        onnx.checker.check_model(network.model)
    ops = {node.op_type for network in networks for node in network.model.graph.node}
    assert len(ops) > 70 and ops - CONVERTERS.keys() <= {"ConstantOfShape", "If"}
    assert {n.model.opset_import[0].version for n in networks} == set(range(9, 22))
    assert any(len(network.feed) > 1 for network in networks)
    assert any(len(network.outputs) > 1 for network in networks)
    again = random_network(7)
    assert again.model.SerializeToString() == networks[7].model.SerializeToString()
    assert len(STEPS) > 40


@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_value_would_be_seen(way: str, networks: list[Network], tmp_path: Path,
                                     monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """One number off by a tenth of the largest, in the first output, is found in most networks."""
    whole = WAYS[way]

    def off(network: Network, chip: str, folder: Path) -> dict[str, np.ndarray]:
        found = dict(whole(network, chip, folder))
        name, array = next(iter(found.items()))
        wrong = np.array(array)
        largest = np.abs(wrong.astype(float)).max() or 1.0
        wrong.flat[0] = not wrong.flat[0] if wrong.dtype == bool else wrong.flat[0] + largest / 10
        if wrong.dtype.kind == "i":
            wrong.flat[0] = array.flat[0] + 1
        return {**found, name: wrong}

    monkeypatch.setitem(WAYS, way, off)
    verdicts = Counter(judged(one, tmp_path, (way,)).verdicts.get(way) for one in networks[:12])
    assert verdicts["wrong"] > 0.6 * (verdicts.total() - verdicts["refused"])


def test_rounding_moves_what_it_may_and_nothing_else() -> None:
    rng = np.random.default_rng(0)
    numbers = np.array([0.0, 1.0, -2.5, 2048.0, 0.1, 1 / 3], np.float32)
    found = moved(numbers, FP16, rng)
    np.testing.assert_array_equal(found[:4], numbers[:4])
    assert (found[4:] != numbers[4:]).all()
    np.testing.assert_allclose(found, numbers, rtol=2 * FP16)
    np.testing.assert_array_equal(moved(np.arange(3), FP16, rng), np.arange(3))


def test_a_truth_refuses_other_shapes_types_and_names(networks: list[Network]) -> None:
    truth = next(t for t in (truth_of(one)[1] for one in networks) if t is not None)
    name, array = next(iter(truth.values.items()))
    assert truth.compare(truth.values, FP32)[0] in ("right", "open")
    for other in (array.astype(np.float64), array[None], np.full_like(array, np.nan)):
        assert truth.compare({**truth.values, name: other}, FP16)[0] == "wrong"
    assert truth.compare({}, FP32)[0] == "wrong"
    assert len(CHIPS) == 6
