"""Bad models: every outcome is a graph or one typed line; through the command line exit code 2."""

import os
import random
import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_models import LIGHT, model_of, node, one_node

from ascend_lab.cli import ascend_lab as main
from ascend_lab.compiler.onnx import import_onnx, model_file
from ascend_lab.errors import AscendLabError, GraphError, InputError, UnsupportedError

REAL = (LIGHT / "light_squeezenet.onnx").read_bytes()


def small():
    """A model with a weight, an attribute and shape arithmetic: 400 bytes to damage."""
    nodes = (
        "first: Conv x w -> a pads=[1,1,1,1]; Shape a -> s; Slice s zero two -> s1; "
        "Concat s1 rest -> s2 axis=0; Reshape a s2 -> y"
    )
    weights = {"w": np.ones((2, 1, 3, 3), np.float32), "zero": np.array([0]),
               "two": np.array([2]), "rest": np.array([-1])}  # fmt: skip
    return model_of(nodes, {"x": (1, 1, 4, 4)}, ["y"], weights)


def outcome(data):
    """Return "graph" or the kind of the one-line error."""
    try:
        import_onnx(bytes(data))
    except AscendLabError as error:
        return "no message" if not str(error) or "\n" in str(error) else type(error).__name__
    return "graph"


# -- damaged files --------------------------------------------------------------------------------
@pytest.mark.parametrize("data", [REAL, small().SerializeToString()], ids=["real", "small"])
def test_flipped_bits_give_a_graph_or_a_typed_error(data):
    found = set()
    for seed in range(200):
        rng = random.Random(seed)
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        found.add(outcome(damaged))
    assert "graph" in found and "InputError" in found and len(found) >= 3
    assert "no message" not in found


def test_truncated_files_give_a_graph_or_a_typed_error():
    data = small().SerializeToString()
    found = [outcome(data[:size]) for size in range(len(data))]
    assert found[0] == "InputError" and outcome(data) == "graph"
    assert found.count("graph") < 60, "only the tail, versions of operators, may be missing"


NUMBERS = (-1, 0, 1, 2, 2**31, 2**63 - 1, -(2**63), 10**9)


def test_wild_numbers_in_attributes_weights_and_sizes_give_a_typed_error_or_a_graph():
    found = set()
    for seed in range(200):
        rng = random.Random(seed)
        model = small()
        number = rng.choice(NUMBERS)
        where = rng.randrange(4)
        if where == 0:
            model.graph.node[0].attribute[0].ints[rng.randrange(4)] = number
        elif where == 1:
            model.graph.input[0].type.tensor_type.shape.dim[rng.randrange(4)].dim_value = number
        elif where == 2:
            rest = numpy_helper.from_array(np.array([number]), "rest")
            model.graph.initializer[3].CopyFrom(rest)
        else:
            model.graph.initializer[0].dims[rng.randrange(4)] = number
        found.add(outcome(model.SerializeToString()))
    assert found == {"graph", "GraphError", "UnsupportedError", "InputError"}


# -- malformed graphs -----------------------------------------------------------------------------


def test_nodes_out_of_order_are_sorted():
    graph = import_onnx(model_of("Relu a -> y; Relu x -> a", {"x": (2,)}, ["y"]))
    assert [node.output for node in graph.nodes] == ["a", "y"]


def test_a_missing_weight_is_named():
    with pytest.raises(GraphError, match=r"node plus \(Add\): input w; got nothing writes it"):
        import_onnx(model_of("plus: Add x w -> y", {"x": (2,)}, ["y"]))
    with pytest.raises(GraphError, match="output z"):
        import_onnx(model_of("Relu x -> y", {"x": (2,)}, ["z"]))


@pytest.mark.parametrize(
    "nodes", ["Relu x -> y; Relu x -> y", "Relu x -> x; Relu x -> y", "Relu x -> w"]
)
def test_a_name_written_twice_is_named(nodes):
    with pytest.raises(GraphError, match=r"twice"):
        import_onnx(model_of(nodes, {"x": (2,)}, ["y"], {"w": np.ones(2, np.float32)}))


def test_two_inputs_or_weights_of_one_name():
    model = model_of("Relu x -> y", {"x": (2,)}, ["y"])
    model.graph.input.append(model.graph.input[0])
    with pytest.raises(GraphError, match="graph input names, each once; got 'x'"):
        import_onnx(model)


def test_versions_newer_than_known_are_refused():
    with pytest.raises(UnsupportedError, match=r"opset 1 to \d+; got 99"):
        import_onnx(model_of("Relu x -> y", {"x": (2,)}, ["y"], opset=99))
    model = small()
    model.ir_version = 99
    with pytest.raises(UnsupportedError, match="IR version"):
        import_onnx(model)


@pytest.mark.parametrize(
    ("shape", "error"), [((-5, 2), InputError), ((2**31, 2**31), UnsupportedError)]
)
def test_sizes_below_zero_or_enormous_are_refused_before_any_work(shape, error):
    with pytest.raises(error, match="input x"):
        import_onnx(model_of("Relu x -> y", {"x": shape}, ["y"]))
    model = one_node("ConstantOfShape", {})
    model.graph.node[0].input.append("s")
    model.graph.initializer.append(numpy_helper.from_array(np.array(shape), "s"))
    with pytest.raises(error, match="the_node"):
        import_onnx(model)


def test_a_model_of_too_many_nodes_or_bytes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(model_file, "MAX_NODES", 4)
    with pytest.raises(UnsupportedError, match="at most 4 nodes; got 5"):
        import_onnx(small())
    path = tmp_path / "model.onnx"
    path.write_bytes(REAL)
    monkeypatch.setattr(model_file, "MAX_BYTES", 1000)
    with pytest.raises(InputError, match="at most 1000 bytes"):
        import_onnx(path)


def test_a_weight_whose_numbers_do_not_fill_its_sizes():
    model = small()
    model.graph.initializer[0].raw_data = b"1234"
    with pytest.raises(InputError, match="tensor w: 72 bytes"):
        import_onnx(model)


def test_a_subgraph_and_a_sequence_are_refused():
    body = helper.make_graph([node("Relu x -> z")], "body", [], [onnx.ValueInfoProto(name="z")])
    choice = helper.make_node("If", ["c"], ["y"], "choice", then_branch=body, else_branch=body)
    with pytest.raises(UnsupportedError, match=r"node choice: one of .* got If"):
        import_onnx(model_of([choice], {"x": (2,), "c": ((), TensorProto.BOOL)}, ["y"]))


# -- external data --------------------------------------------------------------------------------
def external(tmp_path, location, offset="0", length="32"):
    """Write a model whose weight lies in another file; return its path."""
    tensor = TensorProto(name="w", data_type=1, dims=[8], data_location=1)
    for key, value in {"location": location, "offset": offset, "length": length}.items():
        tensor.external_data.add(key=key, value=value)
    model = model_of("Add x w -> y", {"x": (8,)}, ["y"])
    model.graph.initializer.append(tensor)
    (tmp_path / "model").mkdir(exist_ok=True)
    path = tmp_path / "model" / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize(
    "location",
    ["../secret.bin", "/etc/passwd", "a/../../secret.bin", "C:\\x", "", "link.bin", "dir/link"],
)
def test_external_data_outside_the_models_folder_are_never_read(tmp_path, location):
    (tmp_path / "secret.bin").write_bytes(bytes(32))
    path = external(tmp_path, location)
    (path.parent / "link.bin").symlink_to(tmp_path / "secret.bin")
    (path.parent / "dir").symlink_to(tmp_path)
    (tmp_path / "link").write_bytes(bytes(32))
    with pytest.raises(InputError, match=r"external data of w: a file in the model's folder"):
        import_onnx(path)


@pytest.mark.parametrize(
    ("offset", "length"), [("0", "64"), ("8", "32"), ("-4", "32"), ("x", "32"), ("0", "16")]
)
def test_external_data_that_do_not_fit_their_file(tmp_path, offset, length):
    path = external(tmp_path, "w.bin", offset, length)
    (path.parent / "w.bin").write_bytes(bytes(32))
    with pytest.raises(InputError, match="external data of w"):
        import_onnx(path)


def test_external_data_need_a_file_beside_the_model(tmp_path):
    path = external(tmp_path, "w.bin")
    with pytest.raises(InputError, match=r"a file w\.bin beside the model"):
        import_onnx(path)
    (path.parent / "w.bin").write_bytes(bytes(32))
    assert import_onnx(path).parameter_count == 8
    with pytest.raises(InputError, match="pass the file's path"):
        import_onnx(path.read_bytes())


# -- through the command line ---------------------------------------------------------------------
def refused(capsys, *words):
    """Return the line a command is refused with."""
    code = main([str(word) for word in words])
    printed = capsys.readouterr()
    assert code == 2 and not printed.out
    assert printed.err.count("\n") == 1 and "Traceback" not in printed.err
    return printed.err


def test_bad_models_end_in_one_line_and_code_2(tmp_path, capsys):
    path = tmp_path / "bad.onnx"
    damaged = bytearray(REAL)
    damaged[40] ^= 255
    cycle = model_of("Relu b -> a; Relu a -> b", {"x": (2,)}, ["b"])
    huge = model_of("Relu x -> y", {"x": (2**40, 2**40)}, ["y"])
    for data in (b"", b"hello", REAL[:999], bytes(damaged), cycle.SerializeToString(),
                 huge.SerializeToString()):  # fmt: skip
        path.write_bytes(data)
        assert refused(capsys, "run", path)
    assert "--input-shape x:" in refused(capsys, "run", symbolic(path))
    assert "missing.onnx" in refused(capsys, "run", tmp_path / "missing.onnx")
    assert "which is none" in refused(capsys, "run", tmp_path)


def test_what_is_no_model_is_named(tmp_path, capsys):
    compiled, silent, wide = (tmp_path / name for name in ("m.alm", "silent.onnx", "wide.onnx"))
    compiled.write_bytes(b"ALM\0 of another program")
    silent.write_bytes(model_of("Relu x -> y", {"x": (4,)}, []).SerializeToString())
    wide.write_bytes(model_of("Relu x x -> y", {"x": (4,)}, ["y"]).SerializeToString())
    assert "give the .onnx file that it is from" in refused(capsys, "migrate", compiled)
    assert "an ONNX model with outputs" in refused(capsys, "run", silent)
    assert "(Relu): 1 input; got 2; correct" in refused(capsys, "run", wide)


def symbolic(path):
    path.write_bytes(model_of("Relu x -> y", {"x": ("N", 4)}, ["y"]).SerializeToString())
    return path


def test_run_computes_named_outputs_in_the_models_types(tmp_path, capsys):
    nodes = "Reshape a/x:0 shape -> wide; Greater wide zero -> file; Cast file -> count to=INT64"
    entries = {"a/x:0": ("N", 4), "shape": ((2,), TensorProto.INT64)}
    model = model_of(nodes, entries, ["file", "count"], {"zero": np.float32(0)})
    path, given, out = (tmp_path / name for name in ("m.onnx", "in.npz", "out.npz"))
    path.write_bytes(model.SerializeToString())
    x = np.arange(-4, 4, dtype=np.float32).reshape(2, 4)
    np.savez(given, **{"a/x:0": x, "shape": np.array([4, -1])})
    assert main(["run", str(path), "--inputs", str(given), "--outputs", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "count  int64[4, 2]  min 0  max 1  mean 0.375" in printed
    with np.load(out) as found:
        assert found["file"].dtype == bool and found["count"].dtype == np.int64
        np.testing.assert_array_equal(found["file"], x.reshape(4, 2) > 0)
    assert "--inputs F.npz" in refused(capsys, "run", path, "--input-shape", "a/x:0:2,4")


def test_an_enormous_model_needs_no_memory(tmp_path):
    """2^40 elements, announced in 100 bytes, under 1.5 GB of address space."""
    resource = pytest.importorskip("resource")
    nodes = "ConstantOfShape s -> w; Add x w -> y"
    model = model_of(nodes, {"x": (1,)}, ["y"], {"s": np.array([2**20, 2**20])})
    path = tmp_path / "huge.onnx"
    path.write_bytes(model.SerializeToString())
    command = [sys.executable, "-m", "ascend_lab", "run", str(path)]
    limit = (3 * 2**29, 3 * 2**29)
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit),
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "at most" in done.stderr and not done.stdout
