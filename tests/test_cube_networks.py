"""Fused kernels of the cube in networks: taken where they should be, right, and quicker."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from ascend_lab.aoe.operators import unit_of
from ascend_lab.compiler import (
    Graph,
    GraphBuilder,
    bound_of,
    evaluate,
    random_inputs,
    simulate_graph,
)
from ascend_lab.compiler.compile import Road, ledger
from ascend_lab.compiler.switches import parse_switches
from ascend_lab.compiler.values import run_tasks
from ascend_lab.machine.chip import load_chip

COUPLED = ("Ascend310", "Ascend310P3", "Ascend910A")
ALL = (*COUPLED, "Ascend910B2")
ALONE = Road()
INSIDE = Road(start="inside")


# -- graphs ---------------------------------------------------------------------------------------
def residual_block() -> Graph:
    """A residual block's end: a convolution of z and a strided one of x, with biases."""
    net = GraphBuilder("block", "fp16")
    z = net.relu(net.input("z", (2, 32, 14, 14)))
    x = net.relu(net.input("x", (2, 64, 28, 28)))
    one = net.conv2d(z, net.weight((128, 32, 1, 1)), net.weight((128,), scale=1.0))
    two = net.conv2d(x, net.weight((128, 64, 1, 1)), net.weight((128,), scale=1.0), stride=2)
    net.output(net.relu(net.add(one, two)))
    return net.build()


def repeated_sum(*, swapped: bool) -> Graph:
    """Attention over channels and pixels: one summand is repeated over the image."""
    net = GraphBuilder("attention over channels and pixels")
    x = net.input("x", (2, 32, 8, 8))
    seen = net.input("seen", (2, 32, 1, 1))
    both = [
        net.conv2d(image, net.weight((channels, 32, 1, 1)), net.weight((channels,)))
        for image, channels in ((x, 1), (seen, 16))
    ]
    net.output(net.add(*both[::-1] if swapped else both))
    return net.build()


def stem(last: str = "relu", *, skip: bool = False, late: bool = False) -> Graph:
    """A first layer with a bias, pooled (`late`: before the activation), and a layer behind it."""
    net = GraphBuilder("stem", "fp16")
    own = net.weight((32, 3, 7, 7)), net.weight((32,), scale=1.0)
    y = net.conv2d(net.input("x", (2, 3, 64, 64)), *own, stride=2, pad=3)
    y = y if late else getattr(net, last)(y, name="rows")
    y = net.add(y, net.input("skip", (2, 32, 32, 32))) if skip else y
    y = net.max_pool2d(y, kernel=3, stride=2, pad=1)
    y = getattr(net, last)(y) if late else y
    net.output(net.relu(net.conv2d(y, net.weight((16, 32, 1, 1)))))
    return net.build()


def inverted_blocks(last: str = "silu", *, taps: int = 3, step: int = 1) -> Graph:
    """Two inverted residual blocks, biases and functions behind each convolution."""
    net = GraphBuilder("blocks", "fp16")
    x = net.relu(net.input("x", (2, 16, 14, 14)))
    for at in range(2):
        skip = x
        y = net.conv2d(x, net.weight((96, 16, 1, 1)), net.weight((96,), scale=1.0))
        y = net.relu6(y, name=f"wide{at}")
        own = net.weight((96, 1, taps, taps)), net.weight((96,), scale=1.0)
        stride = step if at else 1
        y = net.conv2d(y, *own, stride=stride, pad=taps // 2, groups=96, name=f"each{at}")
        x = net.conv2d(getattr(net, last)(y), net.weight((16, 96, 1, 1)))
        x = net.add(x, skip) if stride == 1 else x
    net.output(x)
    return net.build()


def pairs() -> Graph:
    """Convolutions that are added, and pairs whose second one is dense or of few groups."""
    net = GraphBuilder("pairs", "fp16")
    x = net.relu(net.input("x", (2, 32, 14, 14)))
    one, two = (net.conv2d(x, net.weight((64, 32, 1, 1))) for _ in range(2))
    y = net.relu(net.add(one, two))
    y = net.relu(net.conv2d(y, net.weight((64, 64, 1, 1))))
    y = net.relu(net.conv2d(y, net.weight((64, 64, 3, 3)), pad=1))
    net.output(net.conv2d(y, net.weight((64, 2, 3, 3)), pad=1, groups=32))
    return net.build()


def excited(net: GraphBuilder, y, channels: int, mid: int, act: str = "relu"):
    """Scale an image by gates of its channels; return it, and what the gates are made of."""
    one = net.weight((mid, channels, 1, 1)), net.weight((mid,))
    two = net.weight((channels, mid, 1, 1)), net.weight((channels,))
    inner = net.conv2d(net.global_avg_pool(y), *one)
    return net.mul(y, net.sigmoid(net.conv2d(getattr(net, act)(inner), *two))), inner


def squeezed(n=1, c=192, size=14, *, behind=True, shared=False, act="silu", mid=16, after=""):
    """Convolutions of channels one by one, squeeze and excite, a projection, and what is added.

    Without the projection an activation may follow the scale.
    """
    net = GraphBuilder("squeezed", "fp16")
    x = net.input("x", (n, c, size, size))
    y = net.silu(net.conv2d(x, net.weight((c, 1, 3, 3)), net.weight((c,)), pad=1, groups=c))
    y, inner = excited(net, y, c, mid, act)
    if behind:
        y = net.conv2d(y, net.weight((40, c, 1, 1)), net.weight((40,)))
        y = net.add(y, net.conv2d(x, net.weight((40, c, 1, 1))))
    y = getattr(net, after)(y) if after else y
    net.output(*([y, inner] if shared else [y]))
    return net.build()


def joined() -> Graph:
    """Gates of images that are joined from two, whose blocks lie apart."""
    net = GraphBuilder("joined", "fp16")
    x = net.input("x", (2, 32, 10, 10))
    parts = [net.relu(net.conv2d(x, net.weight((64, 32, 1, 1)))) for _ in range(2)]
    y, _ = excited(net, net.concat(*parts, axis=1), 128, 16)
    net.output(net.conv2d(y, net.weight((32, 128, 1, 1))))
    return net.build()


def scaled_by_means() -> Graph:
    """An inverted block whose image is scaled by gates of its means."""
    net = GraphBuilder("squeezed", "fp16")
    x = net.relu(net.input("x", (16, 32, 14, 14)))
    y = net.relu6(net.conv2d(x, net.weight((192, 32, 1, 1)), net.weight((192,))))
    own = net.weight((192, 1, 3, 3)), net.weight((192,))
    y, _ = excited(net, net.silu(net.conv2d(y, *own, pad=1, groups=192)), 192, 16)
    net.output(net.conv2d(y, net.weight((32, 192, 1, 1))))
    return net.build()


def also_read(graph: Graph, name: str) -> Graph:
    return replace(graph, outputs=(*graph.outputs, name))


# -- cases ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """A graph, the kernel of some of its nodes, and how many there are where it is compiled so.

    `rule` switches it off, `reason` is why a tuner leaves it alone.
    """

    graph: Graph
    kernel: str
    chips: tuple[str, ...]
    count: int = 1
    road: Road = ALONE
    rule: str = ""
    reason: str = ""


POOLED = {"rule": "PooledConvolutionFusionPass", "reason": "pooled on the core"}
TANDEM = {"rule": "TandemConvolutionFusionPass", "road": INSIDE, "reason": "quickest of"}
GATES = {"rule": "ChannelGatesFusionPass", "reason": "gates of channels"}
WIDE = "conv2d+relu6+conv2d"
EXCITED = "conv2d+silu+conv2d+sigmoid"
CASES = {
    "a residual block ends in one": Case(
        residual_block(),
        "conv2d+conv2d+add+relu",
        ("Ascend310", "Ascend910A", "Ascend910B2"),
        rule="JointConvolutionFusionPass",
    ),
    "one summand is repeated": Case(repeated_sum(swapped=False), "conv2d+conv2d", COUPLED[:1], 0),
    "the other one is": Case(repeated_sum(swapped=True), "conv2d+conv2d", COUPLED[:1], 0),
    "a stem is pooled": Case(stem(), "conv2d+relu+max_pool2d", COUPLED, **POOLED),
    "and then rectified": Case(stem(late=True), "conv2d+relu+max_pool2d", COUPLED, **POOLED),
    "a function that rises": Case(stem("sigmoid"), "+sigmoid+max_pool2d", COUPLED, **POOLED),
    "a function that falls": Case(stem("silu"), "+max_pool2d", ALL, 0),
    "a number per element": Case(stem(skip=True), "+max_pool2d", ALL, 0),
    "rows that others read": Case(also_read(stem(), "rows"), "+max_pool2d", ALL, 0),
    "pooled on separate cores": Case(stem(), "+max_pool2d", ALL[3:], 0),
    "inverted blocks of stride 2": Case(
        inverted_blocks(step=2), f"{WIDE}+silu", COUPLED, 2, **TANDEM
    ),
    "inverted blocks of 5x5": Case(
        inverted_blocks("relu", taps=5), f"{WIDE}+relu", COUPLED, 2, **TANDEM
    ),
    "one that others read": Case(
        also_read(inverted_blocks(), "wide0"), f"{WIDE}+silu", COUPLED[2:], road=INSIDE
    ),
    "launches of their own": Case(inverted_blocks(), WIDE, COUPLED, 0),
    "pairs that are no tandem": Case(
        pairs(), "conv2d+relu+conv2d", ("Ascend310", "Ascend910A"), 0, road=INSIDE
    ),
    "sums in front of pairs": Case(pairs(), "conv2d+conv2d+add+relu", COUPLED[:1], road=INSIDE),
    "means beside a tandem": Case(
        scaled_by_means(), f"{WIDE}+silu+global_avg_pool", COUPLED[:2], road=INSIDE
    ),
    "gates that scale weights": Case(squeezed(), f"{EXCITED}+mul+conv2d", ALL, **GATES),
    "gates inside a launch": Case(
        squeezed(), f"{EXCITED}+mul+conv2d", COUPLED, road=INSIDE, **GATES
    ),
    "gates that others read": Case(squeezed(shared=True), "conv2d+silu+conv2d", COUPLED[2:], 0),
    "gates of joined images": Case(joined(), "conv2d+relu+conv2d+sigmoid", ALL[1::2]),
    **{
        f"gates alone, {n} images": Case(
            squeezed(n, 72, 9, behind=False, act="relu"),
            "conv2d+relu+conv2d+sigmoid",
            ALL,
            reason="gates of channels",
        )
        for n in (1, 3)
    },
    **{
        f"gates in front of {after}": Case(
            squeezed(2, 40, 5, behind=False, after=after, mid=8), EXCITED, ALL
        )
        for after in ("relu", "hard_swish", "tanh", "neg")
    },
}


def time_s(stages, case: Case) -> float:
    """The time of a network, all of it in one launch where it is compiled for the inside of one."""
    if case.road != INSIDE:
        return stages.timeline().time_s
    return simulate_graph(
        replace(stages.compiled, scopes=((0, len(stages.compiled.tasks)),))
    ).time_s


@pytest.mark.parametrize(
    ("name", "chip_name"), [(name, chip) for name, case in CASES.items() for chip in case.chips]
)
def test_fused_kernels_are_right_and_quicker(name: str, chip_name: str) -> None:
    case = CASES[name]
    chip = load_chip(chip_name)
    stages = case.road.stages(case.graph, chip)
    fused = [task for task in stages.compiled.tasks if case.kernel in task.op]
    assert len(fused) == case.count, [task.op for task in stages.compiled.tasks]
    feeds = random_inputs(case.graph, 1)
    found = run_tasks(stages.compiled, feeds)
    exact = evaluate(case.graph, feeds)
    for got, wanted in zip(found.values(), exact.values(), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=0.01 * np.abs(wanted).max())
    bound = bound_of(stages.rewritten, chip)
    assert bound.time_s <= time_s(stages, case)
    timeline = stages.timeline()
    assert sum(ledger(timeline, bound).values()) == pytest.approx(timeline.time_s, rel=1e-12)
    if case.reason:
        assert all(case.reason in unit_of(task.piece, chip)[1] for task in fused)
    if case.rule:
        off = replace(case.road, switches=parse_switches(f"{case.rule}:off"))
        apart = off.stages(case.graph, chip)
        assert not any(case.kernel in task.op for task in apart.compiled.tasks)
        assert time_s(stages, case) < time_s(apart, case)
