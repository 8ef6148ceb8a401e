"""What a room may import, what an import costs, how long the road of `simulate` is."""

import ast
import doctest
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

import ascend_lab
from ascend_lab import machine, operators, plugins
from ascend_lab.compiler import rules, zoo
from ascend_lab.compiler.onnx import save_onnx
from ascend_lab.errors import InputError, SimulationError
from ascend_lab.floor import FIRST_FLOOR
from ascend_lab.fused import PLUGINS
from ascend_lab.lab import special_kernels
from ascend_lab.machine.chip import load_chip
from ascend_lab.moved import MOVED_NAMES

PACKAGE = Path(ascend_lab.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

ROAD = 102
"""Files in which `ascend-lab simulate` runs a function for a ResNet-18, special kernels blocked.

Its poolings are special kernels: the plain way schedules them from the tensor language.
"""


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements inside a node; neither imports nor functions stand in expressions."""
    for part in ("body", "orelse", "handlers", "finalbody", "cases"):
        for child in getattr(node, part, ()):
            yield child
            yield from statements(child)


@cache
def statements_of(module: Path) -> tuple[ast.AST, ...]:
    return tuple(statements(ast.parse(module.read_text("utf-8"))))


def test_no_module_imports_in_a_circle() -> None:
    """Imports inside functions and for types only count as well."""
    names = {".".join(m.relative_to(PACKAGE.parent).with_suffix("").parts): m for m in MODULES}
    names = {name.removesuffix(".__init__"): module for name, module in names.items()}
    needs: dict[str, set[str]] = {}
    for name, module in names.items():
        found = set()
        for node in statements_of(module):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    found.add(whole if whole in names else node.module)
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        needs[name] = {other for other in found if other in names}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        pytest.fail("circle: " + " -> ".join(error.args[1]))


TRACED = """
import sys

class Upstairs:
    def find_spec(self, name, path=None, target=None):
        if name == "ascend_lab.fused":
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Upstairs())
from ascend_lab.cli import ascend_lab as command

seen = set()

def note(frame, event, argument):
    name = frame.f_code.co_filename
    if event != "call" or name in seen or frame.f_code.co_name.startswith("<"):
        return
    # Python asks about every module: no step of the road
    if frame.f_code.co_name in ("find_spec", "name_of"):
        return
    above = frame.f_back
    while above is not None and above.f_code.co_name != "<module>":
        above = above.f_back
    if above is None or "ascend_lab" not in above.f_code.co_filename:  # not while importing
        seen.add(name)

sys.setprofile(note)
code = command(["simulate", sys.argv[1], "--chip", "Ascend310"])
sys.setprofile(None)
print("ROAD", code, *seen, sep="|")
"""


def test_the_road_of_simulate_is_short(tmp_path: Path) -> None:
    model = tmp_path / "resnet18.onnx"
    save_onnx(zoo.build("resnet18"), model)
    run = [sys.executable, "-c", TRACED, str(model)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    code, *files = done.stdout.rstrip().rpartition("ROAD|")[2].split("|")
    assert code == "0"
    own = [file for file in files if Path(file).is_relative_to(PACKAGE)]
    assert ROAD / 2 < len(own) <= ROAD, f"the road runs through {len(own)} files"


# -- the order of the packages --------------------------------------------------------------------
ORDER = (
    "errors",
    "data",
    "output",
    "limits",
    "moved",
    "facade",
    "floor",
    "plugins",
    "machine",
    "machine.chip",
    "machine.isa",
    "machine.sim",
    "machine.layout",
    "operators",
    "operators.kernels",
    "operators.dsl",
    "operators.ops",
    "compiler",
    "fused",
    "cluster",
    "cluster.train",
    "cluster.parallel",
    "aoe",
    "deploy",
    "deploy.compress",
    "deploy.media",
    "deploy.runtime",
    "deploy.serving",
    "compare",
    "llm",
)
"""A package imports only from itself and from those to its left; the rest may import anything."""
TOP = ("lab", "course", "cli", "__main__")
"""The book's own room, the course, the commands, their door: nothing in the core imports them."""


def package_of(name: str) -> str:
    """Return the longest name of `ORDER` or `TOP` that a module, without `ascend_lab.`, is in."""
    return max((p for p in (*ORDER, *TOP) if f"{name}.".startswith(f"{p}.")), key=len, default=name)


def name_of(module: Path) -> str:
    """Return the dotted name of a module below `ascend_lab`."""
    return ".".join(module.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imported_packages(module: Path) -> set[str]:
    """Return the packages of this project that a module imports, also inside functions."""
    found = set()
    for node in statements_of(module):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        ours = [n.removeprefix("ascend_lab.") for n in names if n.startswith("ascend_lab.")]
        found |= {package_of(name) for name in ours if name != "__version__"}
    return found


@pytest.mark.parametrize("package", ORDER)
def test_a_package_imports_only_what_stands_to_its_left(package: str) -> None:
    left = {package, *ORDER[: ORDER.index(package)]}
    modules = [module for module in MODULES if package_of(name_of(module)) == package]
    assert modules
    for module in modules:
        later = imported_packages(module) - left
        assert not later, f"{module} imports {sorted(later)}"


def test_every_module_has_its_place() -> None:
    assert {package_of(name_of(m)) for m in MODULES} == {"__init__", *ORDER, *TOP}


@pytest.mark.parametrize(
    "name",
    [
        "ascend_lab",
        "ascend_lab.operators.kernels",
        "ascend_lab.lab.machines",
        "ascend_lab.operators.ops",
    ],
)
def test_heavy_packages_wait_until_they_are_used(name: str) -> None:
    code = f"import json, sys, {name}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {module.split(".")[0] for module in json.loads(done.stdout)}
    assert not loaded & {"matplotlib", "ipywidgets", "IPython", "numba", "tqdm", "onnx"}


# -- doors ----------------------------------------------------------------------------------------
DOORS = [
    "machine",
    "operators",
    "compiler",
    "fused",
    "aoe",
    "cluster",
    "deploy",
    "cli",
    "llm",
    "compare",
    "lab",
    "course",
]


@pytest.mark.parametrize("name", DOORS)
def test_a_door_is_a_page_with_few_names_and_an_example_that_runs(name: str) -> None:
    door = import_module(f"ascend_lab.{name}")
    assert door.__doc__ is not None
    lines = re.findall(r"(?m)^- (.*?):", door.__doc__)
    names = [word for line in lines for word in re.findall(r"`(\w+)`", line)]
    assert len(names) <= 12
    result = doctest.testmod(door)
    assert result.attempted >= 2
    assert result.failed == 0


@pytest.mark.parametrize("name", DOORS)
def test_a_door_offers_twelve_names_at_most(name: str) -> None:
    door = import_module(f"ascend_lab.{name}")
    offered = getattr(door, "__all__", ())
    assert len(offered) <= 12
    for offer in offered:
        assert getattr(door, offer) is not None


@pytest.mark.parametrize("package", MOVED_NAMES)
def test_a_name_that_left_a_door_still_comes_and_says_where_it_lives(package: str) -> None:
    door = import_module(f"ascend_lab.{package}")
    for module, names in MOVED_NAMES[package].items():
        for name in names.split():
            with pytest.warns(
                DeprecationWarning, match=rf"is ascend_lab.{package}.{module}.{name} now"
            ):
                moved = getattr(door, name)
            assert moved is getattr(import_module(f"ascend_lab.{package}.{module}"), name)
            assert name not in door.__all__


# -- the first floor ------------------------------------------------------------------------------
DEBTS = {
    "compiler": "compiler.bound",
    "compiler.canonical": "operators.ops.attention",
    "compiler.compile": "compiler.bound",
    "compiler.lower.conv": (
        "operators.kernels.deconv operators.kernels.pool_gradient operators.ops.conv_gradient"
    ),
    "compiler.lower.matmul": "operators.kernels.weight_gradient operators.ops.conv_gradient",
    "compiler.lower.vector": "operators.ops.conv_gradient",
    "compiler.network": "compiler.memory",
    "compiler.placement": "compiler.memory",
    "compiler.zoo": "compiler.bound compiler.onnx compiler.onnx.tensors compiler.zoo.formers data",
    "machine.isa": "machine.isa.sanitizer",
    "operators.dsl": "operators.dsl.tbe",
    "operators.kernels": "operators.kernels.deconv operators.kernels.depthwise",
    "operators.kernels.conv": "operators.kernels.pooled_sums",
    "operators.kernels.rearrange": "operators.kernels.indexed_rows",
    "operators.ops": (
        "operators.ops.attention operators.ops.batch_norm operators.ops.conv_gradient "
        "operators.ops.gradients operators.ops.indexing operators.ops.quantised "
        "operators.ops.training operators.ops.verify"
    ),
    "operators.ops.convolution": "operators.kernels.depthwise operators.ops.gradients",
    "operators.ops.elementwise": "operators.ops.gradients",
    "operators.ops.matmul": "operators.ops.gradients",
    "operators.ops.moving": "operators.ops.gradients",
    "operators.ops.reduction": "operators.ops.gradients",
}
"""What modules of the first floor still import from above it; the list may only get shorter."""
NAMES = {name_of(module): module for module in MODULES}


def imported_modules(module: Path) -> set[str]:
    """Return the modules of this project that a module imports, also inside functions."""
    imported = set[str]()
    for node in statements_of(module):
        if isinstance(node, ast.ImportFrom) and node.module:
            package = node.module.removeprefix("ascend_lab.")
            members = {f"{package}.{alias.name}" for alias in node.names}
            # `from package import module` loads the module, `from module import name` the former
            imported |= (members & NAMES.keys()) or {package}
        elif isinstance(node, ast.Import):
            imported |= {alias.name.removeprefix("ascend_lab.") for alias in node.names}
    return imported & NAMES.keys()


def behind_debts() -> set[str]:
    """Return the modules that the debts import, directly or not, with their packages."""
    ahead = [name for names in DEBTS.values() for name in names.split()]
    reached = set[str]()
    while ahead:
        name = ahead.pop()
        if name in NAMES and name not in reached:
            reached.add(name)
            ahead += [*imported_modules(NAMES[name]), name.rpartition(".")[0]]
    return reached


@pytest.mark.parametrize("name", FIRST_FLOOR)
def test_the_first_floor_imports_nothing_from_above_but_debts(name: str) -> None:
    """A debt that is paid must leave the list, too."""
    above = imported_modules(NAMES[name]) - {*FIRST_FLOOR}
    assert sorted(above) == DEBTS.get(name, "").split()


def test_only_the_first_floor_has_debts() -> None:
    assert DEBTS.keys() <= {*FIRST_FLOOR}
    assert len(FIRST_FLOOR) == len({*FIRST_FLOOR})


COMPUTED = """
import json, sys

class Gone:
    def find_spec(self, name, path=None, target=None):
        if name in gone:
            raise ModuleNotFoundError(name, name=name)

gone = {*sys.argv[1].split()}
sys.meta_path.insert(0, Gone())

import numpy as np
from ascend_lab.compiler import compile_graph, evaluate, random_inputs
from ascend_lab.compiler.values import run_tasks
from ascend_lab.compiler import GraphBuilder, simulate_graph, zoo
from ascend_lab.compiler.passes import quantise
from ascend_lab.compiler.rules import fusions, row_kernels
from ascend_lab.machine.chip import load_chip

def trained_norm(batch):
    net = GraphBuilder("trained_norm", "fp16")
    net.output(*net.bn_training_reduce(net.relu(net.input("x", (batch, 32, 8, 8)))))
    return net.build()

for name, settings in json.loads(sys.argv[2]):
    settings = {"batch": 1, **settings}
    chip = load_chip(settings.pop("chip", "Ascend310P3"))
    in_bytes = settings.pop("bytes", False)
    graph = trained_norm(**settings) if name == "trained_norm" else zoo.build(name, **settings)
    graph = quantise(graph)[0] if in_bytes else graph
    compiled = compile_graph(graph, chip)
    assert 0 < simulate_graph(compiled).time_s < 1
    inputs = random_inputs(graph)
    values = run_tasks(compiled, inputs).values()
    exact_values = evaluate(graph, inputs).values()
    for exact, computed in zip(exact_values, values, strict=True):
        error = np.abs(exact.astype(np.float64) - computed.astype(np.float64)).max()
        assert error <= 2e-2 * np.abs(exact).max(), name
print(len(fusions()), len(row_kernels()))
"""


def counts_without(gone: Iterable[str], networks: list[tuple[str, dict[str, int]]]) -> list[str]:
    """Compile, compute and time networks without some modules; return counts of special kernels."""
    names = " ".join(f"ascend_lab.{name}" for name in gone)
    run = [sys.executable, "-c", COMPUTED, names, json.dumps(networks)]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def test_networks_compile_and_compute_the_same_on_the_first_floor() -> None:
    above = NAMES.keys() - {*FIRST_FLOOR, *behind_debts(), "__init__", "floor"}
    convolutional = [
        (name, dict[str, int]()) for name in ("resnet18", "mobilenet_v2", "squeezenet")
    ]
    networks = [*convolutional, ("vit_b16", {"layers": 1})]
    assert counts_without(above, networks) == ["0", "0"]


# -- special kernels plug in ----------------------------------------------------------------------
SMALL_BERT = {"batch": 2, "length": 32, "layers": 1, "vocabulary": 100}
ATTENTION = ("bert_base", SMALL_BERT)
EVERY_KIND = {
    "fused.first_images": (("squeezenet", {}), (5, 1)),
    "fused.flash_attention": (ATTENTION, (6, 1)),
    "fused.attention_moves": (ATTENTION, (5, 1)),
    "fused.tandem": (("mobilenet_v3_small", {}), (5, 1)),
    "fused.gates": (("mobilenet_v3_small", {}), (5, 1)),
    "fused.joint": (("resnet18", {}), (5, 1)),
    "fused.pooled": (("squeezenet", {}), (5, 1)),
    "fused.mix": (("bert_base", {**SMALL_BERT, "chip": "Ascend910B2"}), (6, 1)),
    "fused.row_norm": (("mobilevit_block", {}), (6, 0)),
    "fused.plane_means": (("mobilenet_v3_small", {}), (6, 1)),
    "fused.max_pool": (("squeezenet", {}), (6, 1)),
    "fused.channel_sums": (("trained_norm", {"batch": 2}), (6, 1)),
    "fused.channels": (("shufflenet_v2_x0_5", {}), (6, 1)),
    "fused.blocks": (("squeezenet", {"batch": 2}), (6, 1)),
    "fused.integer_layers": (("resnet18", {"bytes": True}), (6, 1)),
    "fused": (("mobilevit_block", {}), (0, 0)),
}
"""What is taken away, a network that uses it, special kernels left: groups, rows."""


@pytest.mark.parametrize("gone", EVERY_KIND)
def test_without_a_special_kernel_networks_compile_and_compute_the_same(gone: str) -> None:
    network, left = EVERY_KIND[gone]
    assert counts_without([gone], [network]) == [str(count) for count in left]


def test_each_plugin_is_taken_out_once() -> None:
    assert {f"fused.{name}" for name in PLUGINS} == EVERY_KIND.keys() - {"fused"}


def test_special_kernels_can_be_switched_off_and_on_again() -> None:
    row = ("shufflenet_v2_x0_5", 1, "Ascend310P3")
    ratios = special_kernels.time_ratios([row])
    assert special_kernels.geometric_mean(ratios) == pytest.approx(ratios[row])
    assert ratios[row] > 1.1
    with plugins.without_special_kernels():
        assert not rules.fusions() and not rules.layout_rewrites()
    assert rules.fusions() and rules.layout_rewrites()


def test_an_old_name_is_the_package_itself_and_says_so() -> None:
    with pytest.warns(DeprecationWarning, match="is ascend_lab.compiler"):
        old = import_module("ascend_lab.graph.passes")
    new = import_module("ascend_lab.compiler.passes")
    assert old is new
    assert new.__spec__ is not None and new.__spec__.name == "ascend_lab.compiler.passes"


def test_what_a_newcomer_gets_wrong_is_said() -> None:
    chip = load_chip("Toy")
    with pytest.raises(InputError, match="load_chip"):
        operators.time("relu", [(64,)], ["fp16"], "Toy")
    with pytest.raises(InputError, match="list of number formats"):
        operators.compile("relu", [(64,)], "fp16", chip)
    with pytest.raises(SimulationError, match="simulate_kernel"):
        machine.simulate(operators.compile("relu", [(64,)], ["fp16"], chip), chip)
    assert "load_chip" in dir(machine)
