"""Chapter 14a: options, the exact table against all choices, chains against the package."""

import random

import numpy as np
import pytest

from ascend_lab.compiler import evaluate, random_inputs
from ascend_lab.compiler.layout import assign_layouts, cancel_trans_data
from ascend_lab.compiler.text_form import from_text
from ascend_lab.lab import graph_examples as layouts
from ascend_lab.lab.checks import chapter14_14a as chapter
from ascend_lab.lab.checks.core import DEFAULT_SEED


def rule(graph):
    return cancel_trans_data(assign_layouts(graph))


@pytest.mark.parametrize("name", layouts.BUILDERS)
def test_the_table_agrees_with_all_choices(name: str) -> None:
    graph = layouts.prepared(name)
    best = layouts.converted_bytes(layouts.cheapest(graph))
    assert layouts.fewest_bytes(graph, layouts.options(graph)) == best
    assert best <= layouts.converted_bytes(rule(graph))


def test_random_graphs_keep_their_values_and_the_table_its_word() -> None:
    rng = np.random.default_rng(DEFAULT_SEED)
    gains = 0
    for _ in range(8):
        graph = layouts.random_graph(rng)
        best = layouts.cheapest(graph)
        moved = layouts.converted_bytes(best)
        assert moved == layouts.fewest_bytes(graph, layouts.options(graph))
        gains += moved < layouts.converted_bytes(rule(graph))
        feed = random_inputs(graph)
        for one, two in zip(
            evaluate(graph, feed).values(), evaluate(best, feed).values(), strict=True
        ):
            assert (one == two).all()
    assert gains


def test_heads_cost_what_the_formula_says() -> None:
    for count, channels in ((1, 16), (3, 20), (4, 3)):
        graph = layouts.DEFAULT_ROAD.rewrite(layouts.heads_graph(channels, 8, count))[0]
        first = chapter.converted_after(1, 3, 64)[1]
        ruled, fewest = chapter.converted_after(count, channels, 64)
        assert layouts.converted_bytes(rule(graph)) == first + ruled
        assert layouts.converted_bytes(layouts.cheapest(graph)) == first + fewest


def test_chains_are_shortened_as_the_package_does() -> None:
    draw = random.Random(3)
    for _ in range(20):
        channels = draw.choice([16, 20])
        chain = [draw.choice(["ND", "NC1HWC0"])]
        while len(chain) < draw.randint(2, 6):
            chain.append("ND" if chain[-1] != "ND" else "NC1HWC0")
        reads = {place for place in range(len(chain)) if draw.random() < 0.6} | {len(chain) - 1}
        kinds = [f"fp16[1, {channels}, 4, 4]{'@NC1HWC0' * (x != 'ND')}" for x in chain]
        lines = [
            f"t{i}: {kinds[i]} = trans_data(t{i - 1}) {{layout = '{chain[i]}'}} t{i}"
            for i in range(1, len(chain))
        ]
        lines += [f"r{i}: {kinds[i]} = relu(t{i}) r{i}" for i in sorted(reads)]
        outs = ", ".join(f"r{i}" for i in sorted(reads))
        text = "\n".join(f"  {line}" for line in lines)
        graph = from_text(f'graph "chain" (t0: {kinds[0]}) -> ({outs}) {{\n{text}\n}}')
        kept = [n for n in cancel_trans_data(graph).nodes if n.op == "trans_data"]
        padded = chain[0] != "ND" and channels % 16 > 0
        assert len(kept) == len(chapter.left_over(chain, reads, padded))
        assert all(node.inputs == ("t0",) for node in kept)
