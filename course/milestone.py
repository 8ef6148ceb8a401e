"""A milestone after each part of the book: what you handed in so far runs one block of a ResNet.

    python course/milestone.py ada A1=my_a1/start.py A2=my_a2/start.py

The block is conv 3x3, norm, scale and shift, relu, conv, norm, scale and shift, add, relu, on 64
channels of 8 x 8 pixels. A1's kernel normalises the channels, A2's table tiles the convolutions,
A3's groups say what is one kernel, A4's offsets where a value lies in memory; the plain solution of
`public.py` stands in where nothing is named. Convolutions and norms are executed, instruction by
instruction, and the block is compared with NumPy.
"""

import sys
from pathlib import Path

import numpy as np

from ascend_lab.course import load
from ascend_lab.course.assignment import Case
from ascend_lab.course.sandbox import Call, answers_of
from ascend_lab.errors import AscendLabError
from ascend_lab.machine import execute
from ascend_lab.operators.kernels import pack_conv, unpack_conv

CHANNELS = 64
SIDE = 8
VALUE_BYTES = 2 * CHANNELS * SIDE**2
UNITS = ("cycles a norm", "cycles a convolution", "bytes moved", "bytes of memory")
# To `groups` a convolution is a matmul, and a norm stands alone as a transpose does.
NODES = [["c1", "matmul", ["x", "w1"]], ["n1", "transpose", ["c1"]], ["g1", "mul", ["n1", "k1"]],
         ["b1", "add", ["g1", "h1"]], ["r1", "relu", ["b1"]], ["c2", "matmul", ["r1", "w2"]],
         ["n2", "transpose", ["c2"]], ["g2", "mul", ["n2", "k2"]], ["b2", "add", ["g2", "h2"]],
         ["s", "add", ["b2", "x"]], ["y", "relu", ["s"]]]  # fmt: skip
CONSTANTS = ("w1", "w2", "k1", "h1", "k2", "h2")
SIMPLE = {"mul": np.multiply, "add": np.add, "relu": lambda a: np.maximum(a, 0)}


class Block:
    """The four artefacts of a student, asked for one after another, and what they are worth."""

    def __init__(self, student, sources):
        self.student = student
        self.sources = sources
        self.judged = {}
        self.error = ""
        self.norm = self.stage("A1", lambda t, d: t.case(d, CHANNELS, SIDE**2), self.plain_kernel)
        self.tiling = self.stage(
            "A2",
            lambda t, d: t.conv_case(d, CHANNELS, SIDE, SIDE, CHANNELS, timed=False),
            self.plain_schedule,
        )
        self.groups = self.stage("A3", self.graph_case, lambda t, c: [[name] for name, *_ in NODES])
        self.steps = in_order(self.groups) if not self.error else []
        self.lives = lives_of(self.steps)
        self.offsets = self.stage("A4", self.memory_case, lambda t, c: t.first_fit(
            c.call.arguments["lives"], c.call.arguments["align"],
            guard=c.known["guard"]))  # fmt: skip

    def stage(self, name, case_of, plain):
        """Return a student's artefact, or the plain one, and keep what its judge says."""
        if self.error:
            return None
        task = load(name, Path(__file__).parent)
        case = case_of(task.public, task.instance(self.student))
        if name in self.sources:
            (answer,) = answers_of(self.sources[name], [case.call], task.limits, task.denied)
            self.error = answer.error
            value = answer.value
        else:
            value = plain(task.public, case)
        if not self.error:
            self.judged[name] = judged = task.judge(case, value)
            wrong = [f"{what}: {why}" for what, why in judged.properties.items() if why]
            self.error = next(
                (line for line in wrong if not line.startswith(("quicker", "height"))), ""
            )
        self.error = self.error and f"{name} {self.error}"
        return task.public, case, value

    def plain_schedule(self, task, case):
        schedule = task.plain(task.chip_of(case.known["chip"]))
        if case.known["adds"] == "foreseen":
            schedule["cycles"] = task.cost(case.call.arguments["problem"],
                                           task.chip_of(case.known["chip"]), schedule)  # fmt: skip
        return schedule

    def plain_kernel(self, task, case):
        given = case.call.arguments
        problem = [given[name] for name in ("rows", "width", "dtype", "norm", "eps")]
        chip = task.chip_of(case.known["chip"])
        adds = case.known["adds"]
        return [str(p) for p in task.plain(chip, *problem, adds)]

    def graph_case(self, task, drawn):
        inputs = dict.fromkeys(("x", *CONSTANTS), [CHANNELS, SIDE**2])
        graph = {"inputs": inputs, "nodes": NODES, "outputs": ["y"]}
        rules = {"slots": drawn["slots"], "launch_bytes": drawn["launch_bytes"]}
        known = {"least": task.least_bytes(graph, *rules.values())}
        return Case("block", Call("groups", {"graph": graph, **rules}), known)

    def memory_case(self, task, drawn):
        guard = drawn["align"] if drawn["adds"] == "guard" else 0
        least = max(sum(b + guard for s, e, b in self.lives.values() if s <= at < e)
                    for at in range(len(self.steps) + 1)) - guard  # fmt: skip
        lives = [list(life) for life in self.lives.values()]
        arguments = {"lives": lives, "align": drawn["align"], "bank_bytes": 0}
        known = {"height": least, "bank_bytes": 0, "guard": guard}
        return Case("block", Call("offsets", arguments), known)

    def run(self):
        """Execute the block in one piece of memory; return "" or what is wrong with it."""
        if self.error:
            return self.error
        rng = np.random.default_rng(1)
        made = lambda *shape: rng.standard_normal(shape).astype(np.float16)
        values = {name: made(CHANNELS, SIDE**2) for name in ("x", "k1", "h1", "k2", "h2")}
        values |= {name: made(CHANNELS, CHANNELS, 3, 3) / 24 for name in ("w1", "w2")}
        at = dict(zip(self.lives, self.offsets[2]))
        memory = np.zeros(max(at.values()) + VALUE_BYTES, np.uint8)
        place = lambda name: memory[at[name] : at[name] + VALUE_BYTES].view(np.float16)
        place("x")[:] = values["x"].ravel()
        for group in self.steps:
            inside = {}
            for name, op, args in NODES:
                if name in group:
                    given = [inside[a] if a in inside else values[a] if a in CONSTANTS
                             else place(a).reshape(CHANNELS, -1).copy() for a in args]  # fmt: skip
                    inside[name] = self.compute(op, given)
            for name in set(inside) & set(at):
                place(name)[:] = inside[name].ravel()
        got = place("y").reshape(CHANNELS, -1)
        right = self.wanted(values)
        off = np.argwhere(~(np.abs(got - right) <= 2e-2 * (1 + np.abs(right))))
        return f"y[{off[0][0]}, {off[0][1]}] of the block is wrong" if len(off) else ""

    def compute(self, op, given):
        if op == "transpose":
            task, case, value = self.norm
            programs = task.launch_of(map(task.parse_program, value))
            made = execute(programs, {"x": given[0].ravel()}, task.chip_of(case.known["chip"]))
            return made["y"].reshape(CHANNELS, -1)
        if op != "matmul":
            return SIMPLE[op](*given)
        task, case, value = self.tiling
        shape = task.shape_of(case.call.arguments["problem"])
        chip = task.chip_of(case.known["chip"])
        packed = pack_conv(shape, given[0].reshape(1, CHANNELS, SIDE, SIDE), given[1])
        schedule, _ = task.apart(value)
        made = execute(task.launch_of(shape, chip, task.tiling(schedule)), packed, chip)
        return unpack_conv(shape, made).reshape(CHANNELS, -1)

    def wanted(self, values):
        """Return the block in NumPy, without any artefact."""
        kernel, case, _ = self.norm
        wide = {name: value.astype(np.float64) for name, value in values.items()}
        for name, op, args in NODES:
            given = [wide[a] for a in args]
            if op == "matmul":
                image = given[0].reshape(1, CHANNELS, SIDE, SIDE)
                wide[name] = self.tiling[0].convolved(image, given[1], 1, 1).reshape(CHANNELS, -1)
            elif op == "transpose":
                given += [case.call.arguments[name] for name in ("norm", "eps")]
                given.append(case.known["adds"])
                wide[name] = kernel.wanted(*given)
            else:
                wide[name] = SIMPLE[op](*given)
        return wide["y"]


def in_order(groups):
    """Return the groups in an order in which each finds what it reads."""
    needs = {name: {a for a in args if a in {n for n, *_ in NODES}} for name, _, args in NODES}
    left = [set(group) for group in groups[2]]
    done = set()
    steps = []
    while left:
        ready = next(g for g in left if set().union(*(needs[n] for n in g)) <= done | g)
        left.remove(ready)
        done |= ready
        steps.append(ready)
    return steps


def lives_of(steps):
    """Return [first step, step after the last, bytes] of x and of all that leaves a group."""
    lives = {}
    for name, args in (("x", []), *((name, args) for name, _, args in NODES)):
        made = next((i for i, group in enumerate(steps) if name in group), -1)
        read = [i for i, group in enumerate(steps) for n, _, a in NODES
                if n in group and name in a and i != made]  # fmt: skip
        if read or name == "y":
            lives[name] = (made + 1, max([*read, made]) + 2, VALUE_BYTES)
    return lives


def main(words):
    """Print what each artefact is worth in the block, and whether its values hold."""
    sources = {word[:2]: Path(word[3:]).read_text("utf-8") for word in words[1:]}
    block = Block(words[0], sources)
    try:
        said = block.run()
    except AscendLabError as error:
        said = str(error)
    print(f"{'':26}{'cost':>9}{'base':>9}{'optimum':>9}")
    for (name, judged), unit in zip(block.judged.items(), UNITS):
        whose = "yours" if name in sources else "plain"
        costs = [0 if c is None else c for c in (judged.cost, judged.base, judged.optimum)]
        print(f"{name} {whose} {unit:17}" + "".join(f"{cost:9.0f}" for cost in costs))
    print(f"the block: {said or 'its values hold'}")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
