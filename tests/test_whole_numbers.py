"""int64 and bool of a model: exact or refused by name, and the same types in every file written."""

import numpy as np
import onnx
import pytest
from command_lines import run
from onnx import TensorProto, helper, numpy_helper

from ascend_lab.cli import aoe
from ascend_lab.compiler import compile_graph, evaluate
from ascend_lab.compiler.onnx import export_onnx, import_model
from ascend_lab.compiler.values import run_tasks
from ascend_lab.errors import GraphError, InputError

INT64 = TensorProto.INT64
FLOAT = TensorProto.FLOAT
BOOL = TensorProto.BOOL
CHIP = "Ascend310"
FILL = {"big": 70_000, "few": 97, "minus": -1_000, "w": np.eye(4, dtype=np.float32)}


def model(text, inputs, outputs):
    """Return a model of nodes "Op x y -> z" with entries name: (element type, shape).

    A word "key=number" is an attribute; a name of `FILL` is a constant.
    """
    nodes = []
    for line in text.splitlines():
        left, right = line.split("->")
        op, *words = left.split()
        attrs = {k: int(v) for k, v in (w.split("=") for w in words if "=" in w)}
        reads = [w for w in words if "=" not in w]
        nodes.append(helper.make_node(op, reads, right.split(), right.split()[0], **attrs))
    used = {name for node in nodes for name in node.input}
    consts = [numpy_helper.from_array(np.array(v), k) for k, v in FILL.items() if k in used]
    sides = [
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in rows.items()]
        for rows in (inputs, outputs)
    ]
    graph = helper.make_graph(nodes, "toy", *sides, consts)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    made.ir_version = 8
    return made


def whole(text, *names):
    """Return a model whose inputs and output z are four int64 numbers each."""
    return model(text, {n: (INT64, [4]) for n in names}, {"z": (INT64, None)})


def outcomes(made, feed):
    """Return z as the graph means it and as kernels compute it; None where it is refused."""
    graph = import_model(made).graph
    found = []
    for compute in (
        lambda: evaluate(graph, feed),
        lambda: run_tasks(compile_graph(graph, CHIP), feed, graph.outputs),
    ):
        try:
            found.append(compute()["z"].tolist())
        except (GraphError, InputError):
            found.append(None)
    return found


X = np.array([100_000, 46_341, -7, 3])
Y = np.array([100_000, 46_341, 5, 2**31 - 2])


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("Mul x y -> z", X * Y),
        ("Add y y -> z", Y + Y),
        ("Sub x y -> z", X - Y),
        ("Mul x big -> p\nMul p big -> q\nMod q few -> z", X * 70_000**2 % 97),
        ("Mul y big -> p\nDiv p minus -> z", -(Y * 70)),
        ("ReduceProd x keepdims=1 -> z", [X.prod()]),
        ("ReduceSum y keepdims=1 -> z", [Y.sum()]),
        ("Neg x -> n\nMul n y -> z", -X * Y),
        ("Mul x y -> p\nGreater p big -> g\nWhere g x y -> z", np.where(X * Y > 70_000, X, Y)),
    ],
)
def test_int64_is_exact_where_a_graph_is_evaluated_and_never_wraps_in_kernels(text, want):
    names = [n for n in ("x", "y") if f" {n}" in text]
    exact, compiled = outcomes(whole(text, *names), {n: {"x": X, "y": Y}[n] for n in names})
    assert exact == np.asarray(want).tolist()
    assert compiled in (None, exact)


def test_kernels_compute_small_int64_numbers():
    small = {"x": np.array([3, -4, 5, 6]), "y": np.array([7, 8, -9, 10])}
    want = (small["x"] * small["y"]).tolist()
    assert outcomes(whole("Mul x y -> z", "x", "y"), small) == [want, want]


@pytest.mark.parametrize("numbers", [[np.nan, 0, 0, 0], [np.inf, 0, 0, 0], [1e19, 0, 0, 0]])
def test_a_cast_of_what_no_int64_is_is_refused_by_the_nodes_name(numbers):
    made = model("Cast x to=7 -> z", {"x": (FLOAT, [4])}, {"z": (INT64, None)})
    graph = import_model(made).graph
    with pytest.raises(GraphError, match=r"^z: int64 numbers that fit in 64 bits"):
        evaluate(graph, {"x": np.array(numbers, np.float32)})
    with pytest.raises(GraphError, match=r"^z: int64 numbers that fit in"):
        run_tasks(compile_graph(graph, CHIP), {"x": np.array(numbers, np.float32)})


def test_a_cast_of_a_large_number_to_int64_is_exact():
    made = model("Cast x to=7 -> z", {"x": (FLOAT, [4])}, {"z": (INT64, None)})
    x = np.array([1e15, -4e9, 7.7, -0.5], np.float32)
    exact, compiled = outcomes(made, {"x": x})
    assert (exact, compiled) == (x.astype(np.int64).tolist(), None)


def test_a_cast_to_int32_that_loses_digits_is_refused():
    made = model("Cast x to=6 -> i\nCast i to=7 -> z", {"x": (INT64, [4])}, {"z": (INT64, None)})
    assert outcomes(made, {"x": np.array([1, 2, 3, -4])}) == [[1, 2, 3, -4]] * 2
    assert outcomes(made, {"x": np.array([1, 2, 3, 2**31])}) == [None, None]


def test_inputs_beyond_32_bits_are_taken_where_the_graph_is_evaluated_only():
    graph = import_model(whole("Neg x -> z", "x")).graph
    feed = {"x": np.array([2**40, 1, 2, 3])}
    assert evaluate(graph, feed)["z"].tolist() == [-(2**40), -1, -2, -3]
    with pytest.raises(InputError, match=r"input x within int32.*in place of its kernels"):
        run_tasks(compile_graph(graph, CHIP), feed)


def test_a_divisor_that_is_far_beyond_fp64_divides_exactly():
    x = np.array([2**62 + 1, -(2**62) - 1, 2**53 + 1, 9])
    y = np.array([3, 3, 2, -2])
    exact, _ = outcomes(whole("Div x y -> z", "x", "y"), {"x": x, "y": y})
    assert exact == [int(abs(int(a)) // abs(int(b))) * (1 if a * b > 0 else -1)
                     for a, b in zip(x.tolist(), y.tolist(), strict=True)]  # fmt: skip


# -- files ----------------------------------------------------------------------------------------
ENDS = {"i": (INT64, [2, 4]), "m": (BOOL, [2, 4]), "x": (FLOAT, [2, 4])}
TEXT = (
    "Cast m to=1 -> f\nMul x f -> k\nMatMul k w -> y\nAdd i few -> j\nGreater y x -> g\n"
    "ReduceSum y keepdims=0 -> s\nReduceMax i keepdims=0 -> t"
)
RESULTS = {"y": (FLOAT, [2, 4]), "j": (INT64, [2, 4]), "g": (BOOL, [2, 4]), "s": (FLOAT, []),
           "t": (INT64, [])}  # fmt: skip


def types(made):
    """Return element type and rank of inputs and outputs by name, in order."""
    return {
        e.name: (e.type.tensor_type.elem_type, len(e.type.tensor_type.shape.dim))
        for e in (*made.graph.input, *made.graph.output)
    }


def feed():
    rng = np.random.default_rng(0)
    return {"i": rng.integers(0, 99, (2, 4)), "m": rng.random((2, 4)) > 0.5,
            "x": rng.standard_normal((2, 4)).astype(np.float32)}  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(model(TEXT, ENDS, RESULTS), "m.onnx")
    np.savez("in.npz", **feed())


def test_an_exported_model_keeps_types_and_ranks_and_computes_int64_in_64_bits():
    made = export_onnx(import_model("m.onnx").graph)
    onnx.checker.check_model(made, full_check=True)
    assert types(made) == types(onnx.load("m.onnx"))
    again = import_model(made)
    given = feed() | {"i": feed()["i"] + 2**40}
    assert evaluate(again.graph, given)["j"].tolist() == (given["i"] + 97).tolist()


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (("migrate", "m.onnx", "--chip", CHIP, "--output", "o.onnx"), "o.onnx"),
        (("quantize", "m.onnx", "--calibration", "in.npz", "--output", "o.onnx"), "o.onnx"),
    ],
)
def test_verbs_that_write_models_keep_their_types(capsys, words, output):
    code, _, err = run(capsys, *words)
    assert (code, err) == (0, "")
    assert types(onnx.load(output)) == types(onnx.load("m.onnx"))


def test_a_tuned_model_keeps_its_types(capsys):
    words = "--job_type 1 --framework 5 --model m.onnx --output o --time_limit 2"
    assert aoe([*words.split(), "--soc_version", CHIP, "--progress_bar", "off"]) == 0
    capsys.readouterr()
    assert types(onnx.load("o/m_tuned.onnx")) == types(onnx.load("m.onnx"))


def test_outputs_in_a_file_have_the_models_types_and_ranks(capsys):
    code, _, err = run(capsys, "compile", "m.onnx", "--chip", CHIP, "--output", "m.alm")
    assert (code, err) == (0, "")
    kinds = {"y": "f4", "j": "i8", "g": "?", "s": "f4", "t": "i8"}
    for name in ("m.onnx", "m.alm"):
        for words in ((), ("--compiled",)):
            code, _, err = run(
                capsys, "run", name, "--inputs", "in.npz", "--outputs", "o.npz", *words
            )
            assert (code, err) == (0, "")
            found = dict(np.load("o.npz"))
            assert {n: (a.dtype, a.shape) for n, a in found.items()} == {
                n: (np.dtype(kinds[n]), tuple(shape)) for n, (_, shape) in RESULTS.items()
            }


def test_a_compiled_file_refuses_int64_products_beyond_32_bits(capsys):
    onnx.save(whole("Mul x y -> z", "x", "y"), "p.onnx")
    np.savez("p.npz", x=X, y=Y)
    assert run(capsys, "compile", "p.onnx", "--chip", CHIP, "--output", "p.alm")[0] == 0
    words = ("--inputs", "p.npz", "--outputs", "o.npz")
    for name in ("p.onnx", "p.alm"):
        assert run(capsys, "run", name, *words)[0] == 0
        assert np.load("o.npz")["z"].tolist() == (X * Y).tolist()
        code, _, err = run(capsys, "run", name, "--compiled", *words)
        assert code == 2
        assert "z: int64 numbers that fit in 32 bits" in err


@pytest.mark.parametrize(
    ("text", "constant"), [("Mul c c -> p", [2**40]), ("Cast c to=7 -> p", [np.float32("nan")])]
)
def test_constants_that_leave_64_bits_are_refused_when_a_model_is_read(text, constant):
    made = whole(f"{text}\nAdd x p -> z", "x")
    made.graph.initializer.append(numpy_helper.from_array(np.array(constant), "c"))
    with pytest.raises(GraphError, match=r"64 bits|int64 holds"):
        import_model(made)
