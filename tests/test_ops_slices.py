"""Slice rules: pieces computed alone and joined equal the whole, for every operator."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_cases import case_of

from ascend_lab import ops
from ascend_lab.errors import ShapeError
from ascend_lab.ops import verify
from ascend_lab.ops.slicing import Source, Window

FLOATS = ("fp16", "fp32", "bf16")
PATTERNS = {
    "abs": "Elemwise",
    "batch_norm": "ElemwiseBroadcast",
    "expand": "Broadcast",
    "conv2d": "SlidingWindow",
    "max_pool2d": "SlidingWindow",
    "conv_transpose2d": "SlidingWindowDeconv",
    "matmul": "CubeMatmul",
    "softmax": "Reduce",
    "reduce_sum": "Reduce",
    "transpose": "Transpose",
    "scatter_add": "Scatter",
    "gather": "Segment",
    "concat": "Segment",
}


def filled(case):
    return all(0 not in shape for shape in case[0])


@pytest.mark.parametrize("name", list(ops.OPERATORS))
@settings(max_examples=40)
@given(st.data())
def test_pieces_join_to_the_whole(name, data):
    operator = ops.get(name)
    shapes, attrs = data.draw(case_of(name).filter(filled))
    first = operator.types.allowed[0]
    dtype = "fp64" if first in FLOATS else first
    verify.check_slices(operator, shapes, attrs, dtype, data.draw(st.integers(0, 99)))


@pytest.mark.parametrize("name", list(ops.OPERATORS))
def test_some_example_is_really_cut(name):
    operator = ops.get(name)
    first = operator.types.allowed[0]
    dtype = "fp64" if first in FLOATS else first
    filled_examples = [e for e in operator.examples if filled((e.shapes, e.attrs))]
    assert sum(verify.check_slices(operator, e.shapes, e.attrs, dtype) for e in filled_examples)


@pytest.mark.parametrize(("name", "pattern"), PATTERNS.items())
def test_operators_fall_into_the_known_classes(name, pattern):
    operator = ops.get(name)
    example = operator.examples[1]
    assert operator.slice_rules(example.shapes, example.attrs).pattern == pattern


def test_a_convolution_states_its_halo():
    rules = ops.get("conv2d").slice_rules(((1, 16, 8, 8), (16, 16, 3, 3)), {"pad": 1, "stride": 2})
    rows = rules.axes[2]
    assert rows.kind == "halo"
    assert rows.sources[0].window == Window(before=1, after=1, stride=2)
    assert [r.combine for r in rules.reductions] == ["sum"]


def test_two_pieces_of_a_convolution_share_rows_and_keep_the_outer_padding():
    operator = ops.get("conv2d")
    shapes, attrs = ((1, 1, 8, 8), (1, 1, 3, 3)), {"pad": 1}
    rules = operator.slice_rules(shapes, attrs)
    upper = ops.cut(rules, shapes, attrs, 2, (0, 4))
    lower = ops.cut(rules, shapes, attrs, 2, (4, 8))
    assert upper.ranges[0][2] == (0, 5)
    assert lower.ranges[0][2] == (3, 8)
    assert upper.attrs["pad"] == ((1, 0), (1, 1))
    assert lower.attrs["pad"] == ((0, 1), (1, 1))


def test_grouped_convolutions_split_at_group_borders_only():
    operator = ops.get("conv2d")
    shapes, attrs = ((1, 4, 5, 5), (6, 2, 3, 3)), {"groups": 2}
    rules = operator.slice_rules(shapes, attrs)
    piece = ops.cut(rules, shapes, attrs, 1, (3, 6))
    assert piece.ranges[0][1] == (2, 4)
    assert piece.attrs["groups"] == 1
    with pytest.raises(ShapeError, match="grains of 3"):
        ops.cut(rules, shapes, attrs, 1, (1, 6))


def test_axes_that_depend_on_all_of_it_say_so():
    rules = ops.get("softmax").slice_rules(((4, 8),), {"axis": 1})
    assert [r.kind for r in rules.axes] == ["free", "reduce"]
    assert ops.get("scatter_add").slice_rules(((4, 8), (2,), (2, 8))).axes[0].kind == "indices"
    with pytest.raises(ShapeError, match="maximum and sum"):
        ops.cut(rules, ((4, 8),), {"axis": 1}, 1, (0, 4))


def test_a_wrong_rule_is_found():
    right = ops.get("max_pool2d")

    def too_small_a_halo(shapes, **attrs):
        rules = right.slice_rules(shapes, attrs)
        rows = replace(rules.axes[2], sources=(Source(0, 2, Window(0, 1)),))
        return replace(rules, axes=(*rules.axes[:2], rows, rules.axes[3]))

    broken = replace(right, name="broken", slicing=too_small_a_halo)
    with pytest.raises(AssertionError, match="axis 2"):
        verify.check_slices(broken, ((1, 1, 8, 8),), {"kernel": 3, "stride": 1}, "fp64")
