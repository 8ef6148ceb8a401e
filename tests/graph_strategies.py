"""Hypothesis strategies for graphs: small random networks whose numbers stay small and whole.

Inputs and weights are whole numbers, so are results (pools halve them now and then), and products
are clipped: fp16 is exact throughout, and compiled values can be asked to equal NumPy's bit for bit
though every kernel rounds. What leaks from padding lanes would show.
"""

import math

import numpy as np
from hypothesis import strategies as st

from ascend_lab.compiler import GraphBuilder

CHANNELS = (1, 3, 16, 17, 33)
SIDES = (1, 2, 3, 5, 7)
COLUMNS = (1, 5, 16, 17, 32, 33)
ROWS = (1, 2, 5, 16, 17)
LANE_WISE = ("relu", "abs", "neg", "adds", "muls", "clip", "max", "min", "add", "sub", "mul")
SMOOTH = ("tanh", "sigmoid", "gelu", "silu", "hard_swish", "softmax", "exp")
"""Operators whose results are no whole numbers; all are bounded by their operands, or by 8."""
LARGEST = 20_000
"""Most elements of a tensor."""


class Net:
    """A graph under construction, its random choices, and the values that may be read next."""

    def __init__(self, draw, smooth=False):
        self.draw = draw
        self.net = GraphBuilder("random", "fp16")
        self.values = []
        self.smooth = smooth
        self.seed = draw(st.integers(0, 99))

    def pick(self, choices):
        return self.draw(st.sampled_from(list(choices)))

    def constant(self, shape, low=-1, high=1):
        self.seed += 1
        rng = np.random.default_rng(self.seed)
        return self.net.constant(rng.integers(low, high + 1, shape).astype(np.float16))

    def keep(self, value):
        """Let a tensor be read by what comes next, if it is not too large; else drop it."""
        if math.prod(value.shape) <= LARGEST:
            self.values.append(value)

    def bounded(self, value):
        """Clip sums, which grow with their length."""
        return self.net.clip(value, low=-3.0, high=3.0)

    # -- operators ------------------------------------------------------------------------------
    def lane_wise(self, x):
        op = self.pick(LANE_WISE)
        if op == "adds":
            return self.net.adds(x, number=self.pick((1.0, -2.0)))
        if op == "muls":
            return self.net.muls(x, number=self.pick((0.5, -1.0, 2.0)))
        if op == "clip":
            return self.net.clip(x, low=self.pick((-2.0, 1.0)), high=2.0)
        if op in ("relu", "abs", "neg"):
            return getattr(self.net, op)(x)
        other = self.operand(x)
        found = getattr(self.net, op)(*((x, other) if self.draw(st.booleans()) else (other, x)))
        return self.bounded(found) if op == "mul" else found

    def smooth_lane(self, x):
        op = self.pick(SMOOTH)
        if op == "softmax":
            return self.net.softmax(x, axis=-1)
        return getattr(self.net, op)(self.net.clip(x, low=-2.0, high=2.0) if op == "exp" else x)

    def operand(self, x):
        """A tensor that broadcasts to x: a constant, another tensor, or a fold of x itself."""
        kind = self.pick(("scalar", "full", "channel", "last", "fold", "other"))
        if kind == "scalar":
            return self.constant(self.pick(((), (1,), (1,) * len(x.shape))))
        if kind == "last":
            return self.constant(x.shape[-1:])
        if kind == "channel" and len(x.shape) == 4:
            shape = (x.shape[1], 1, 1)
            return self.constant(self.pick((shape, (1, *shape))))
        if kind == "fold" and len(x.shape) == 4:
            return self.net.global_max_pool(x)
        same = [v for v in self.values if v.shape == x.shape and v is not x]
        return self.pick(same) if kind == "other" and same else self.constant(x.shape)

    def convolution(self, x):
        channels = x.shape[1]
        size = self.pick((1, 2, 3))
        pad = self.pick((0, 1))
        if min(x.shape[2:]) + 2 * pad < size:
            size = 1
        how = {"stride": self.pick((1, 2)), "pad": pad if pad < size else 0}
        if self.draw(st.integers(0, 3)) == 0:
            weight = self.constant((channels, 1, size, size))
            return self.bounded(self.net.depthwise_conv2d(x, weight, **how))
        out = self.pick(CHANNELS)
        if self.draw(st.integers(0, 5)) == 0:
            weight = self.constant((channels, out, size, size))
            return self.bounded(self.net.conv_transpose2d(x, weight, stride=how["stride"]))
        reads = [x, self.constant((out, channels, size, size))]
        if self.draw(st.booleans()):
            reads.append(self.constant((out,)))
        return self.bounded(self.net.conv2d(*reads, **how))

    def pooling(self, x):
        kind = self.pick(("max_pool2d", "avg_pool2d", "global_max_pool"))
        if kind == "global_max_pool" or min(x.shape[2:]) < 2:
            return self.net.global_max_pool(x)
        return getattr(self.net, kind)(x, kernel=2, stride=self.pick((1, 2)))

    def join(self, x):
        axis = self.draw(st.integers(0, len(x.shape) - 1))
        same = [v for v in self.values if v.shape == x.shape]
        return self.net.concat(x, self.pick(same), axis=axis)

    def cut(self, x):
        axes = [i for i, n in enumerate(x.shape) if n > 1]
        if not axes:
            return self.net.relu(x)
        axis = self.pick(axes)
        first = 16 if x.shape[axis] > 16 else 1
        sizes = (first, x.shape[axis] - first)
        one, two = self.net.split(x, sizes=sizes, axis=axis)
        self.keep(one)
        return two

    def turn(self, x):
        return self.net.transpose(x, perm=tuple(self.draw(st.permutations(range(len(x.shape))))))

    def shape_anew(self, x):
        total = math.prod(x.shape)
        last = x.shape[-1]
        shapes = [(total // last, last), (1, total), (x.shape[0], total // x.shape[0])]
        shapes += [(2, total // last // 2, last)] if total // last % 2 == 0 else []
        shapes += [(1, total // last, 1, last)] if total < 2000 else []
        return self.net.reshape(x, shape=self.pick(shapes))

    def product(self, x):
        """A product with weights, or of two activations: columns ragged, rows ragged."""
        ways = ["weights"]
        ways += ["square"] if math.prod(x.shape[:-1]) <= 200 else []
        ways += ["gram"] if math.prod(x.shape[:-2]) * x.shape[-1] <= 200 else []
        mates = [v for v in self.values if len(v.shape) == len(x.shape) == 2]
        by_rows = [v for v in mates if v.shape[0] == x.shape[1]]
        ways += ["other"] if by_rows else []
        way = self.pick(ways)
        op = self.net.matmul if len(x.shape) == 2 else self.net.batch_matmul
        if way == "weights":
            n = self.pick(COLUMNS)
            if self.draw(st.booleans()):
                y = op(x, self.constant((*x.shape[:-2], n, x.shape[-1])), trans_b=True)
            else:
                y = op(x, self.constant((x.shape[-1], n)))
        elif way == "square":
            y = op(x, self.lane_wise(x) if self.draw(st.booleans()) else x, trans_b=True)
        elif way == "gram":
            y = op(x, x, trans_a=True)
        else:
            y = op(x, self.pick(by_rows))
        # without the clip the next product reads the sums' own layout, padding included
        return self.bounded(y) if self.draw(st.booleans()) or x.shape[-1] > 40 else y

    def fold(self, x):
        axis = self.draw(st.integers(0, len(x.shape) - 1))
        return self.net.reduce_max(x, axis=axis, keepdims=True)

    def step(self):
        """Append one or two nodes behind a tensor, mostly the newest."""
        x = self.values[-1] if self.draw(st.integers(0, 3)) else self.pick(self.values)
        ways = [self.lane_wise, self.lane_wise, self.shape_anew, self.turn, self.join, self.cut]
        ways += [self.fold] + [self.smooth_lane] * (6 if self.smooth else 0)
        if len(x.shape) == 4:
            ways += [self.convolution] * 4 + [self.pooling] * 2
        if len(x.shape) >= 2:
            ways += [self.product] * (4 if len(x.shape) == 2 else 2)
        self.keep(self.pick(ways)(x))


@st.composite
def whole_graphs(draw, most=6):
    """A graph in fp16 that computes whole numbers and halves, all small."""
    return finished(draw, Net(draw), most)


@st.composite
def smooth_graphs(draw, most=6):
    """A graph in fp16 with exponentials among the rest."""
    return finished(draw, Net(draw, smooth=True), most)


def finished(draw, net, most):
    """Inputs, a few steps, outputs."""
    for i in range(draw(st.integers(1, 2))):
        if draw(st.booleans()):
            shape = (net.pick((1, 2)), net.pick(CHANNELS), net.pick(SIDES), net.pick(SIDES))
        else:
            shape = (*net.pick(((), (), (2,))), net.pick(ROWS), net.pick(COLUMNS))
        net.keep(net.net.input(f"x{i}", shape))
    for _ in range(draw(st.integers(1, most))):
        net.step()
    net.net.output(net.values[-1])
    others = [v for v in net.values[:-1] if draw(st.integers(0, 4)) == 0]
    net.net.output(*{v.name: v for v in others}.values())
    return net.net.build()


def whole_inputs(graph, seed=0):
    """Return small whole numbers for every input."""
    rng = np.random.default_rng(seed)
    shapes = {n: graph.types[n].shape for n in graph.inputs}
    return {n: rng.integers(-2, 3, shape).astype(np.float16) for n, shape in shapes.items()}
