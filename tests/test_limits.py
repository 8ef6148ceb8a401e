"""Bad input refused in one line before work: numbers, files, sizes, attributes, names in HTML."""

import gzip
import io
import math
import signal
import zipfile
from argparse import ArgumentTypeError
from contextlib import contextmanager

import numpy as np
import onnx
import pytest
from command_lines import refused, run
from onnx import TensorProto, helper

from ascend_lab import limits
from ascend_lab.aoe.space import read_recorded
from ascend_lab.cli.array_files import load_arrays
from ascend_lab.cluster import load_topology
from ascend_lab.compiler import memory as hot
from ascend_lab.compiler.memory import Buffer, plan
from ascend_lab.errors import AscendLabError, CapacityError, ChipError, ClusterError, InputError
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import KernelBuilder
from ascend_lab.operators import ops
from ascend_lab.operators.ops.pooling import window_counts

TOY = load_chip("Toy")


# -- numbers ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", ["²", "٣", "1_0", "0x10", "1e3", "", "9" * 400, "9" * 5000, "1.0"])
def test_whole_numbers_are_short_and_ascii(text):
    assert limits.whole_of(text) is None
    assert limits.wholes_of(f"4,{text}", ",") == ()


@pytest.mark.parametrize(
    "text", ["²", "٣", "1_0", "nan", "inf", "-inf", "1e308", "1e-320", "9" * 400, "1e99999", "."]
)
def test_numbers_are_finite_and_of_a_size_that_can_be_meant(text):
    assert limits.number_of(text) is None


def test_what_is_meant_is_read():
    assert limits.wholes_of(" 4, -3,+05", ",") == (4, -3, 5)
    assert [limits.number_of(t) for t in ("0", "-1.5e-3", ".5", "7.", "0e9")] == [
        0, -1.5e-3, 0.5, 7.0, 0,
    ]  # fmt: skip


def test_a_limit_belongs_to_what_it_allows(tmp_path):
    """The largest number, the longest list and file are read; what is one more is refused."""
    assert limits.count("1000000") == 10**6 and limits.whole(str(-(2**53))) == -(2**53)
    assert limits.decimal("1e30") == 1e30 and limits.decimal("-1e-30") == -1e-30
    for read, text in ((limits.count, "1000001"), (limits.whole, str(2**53 + 1))):
        with pytest.raises(ArgumentTypeError, match="of at most"):
            read(text)
    few = [limits.Range(int, 1, 9)]
    assert limits.decoded(few, [1, 9, 9], max_items=3) == (1, 9, 9)
    for wrong in ([1, 9, 9, 9], [], [1, 0], [1, 10], [1, "9"]):
        with pytest.raises(InputError):
            limits.decoded(few, wrong, max_items=3)
    (tmp_path / "x").write_bytes(bytes(9))
    assert len(limits.read_file(tmp_path / "x", "a file", 9)) == 9
    with pytest.raises(InputError, match="of at most 8 bytes"):
        limits.read_file(tmp_path / "x", "a file", 8)
    for most, fine in ((limits.KEY_DOTS, True), (limits.KEY_DOTS + 1, False)):
        (tmp_path / "x").write_text("a = 1\n[b" + ".b" * most + "]")
        if fine:
            assert set(limits.toml_of(tmp_path / "x", "a file", InputError)) == {"a", "b"}
            continue
        with pytest.raises(InputError, match="dots in a key"):
            limits.toml_of(tmp_path / "x", "a file", InputError)


# -- attributes ------------------------------------------------------------------------------------
WRONG = (math.nan, 10**400, "x", "²", (), (1.5,), b"x", 1j, [[1]], {}, ..., True)


def _numeric():
    """Every attribute that is one number: by its default or by its range."""
    return [
        (name, key)
        for name, op in ops.OPERATORS.items()
        for key, default in op.attrs.items()
        if type(default) is float or key in op.ranges
    ]


@pytest.mark.parametrize(("name", "key"), _numeric())
def test_every_numeric_attribute_is_checked(name, key):
    op = ops.get(name)
    example = op.examples[0]
    for wrong in WRONG:
        with pytest.raises(InputError, match=f"{name}: attribute {key}: a .*number"):
            op.infer(*example.shapes, **{**example.attrs, key: wrong})


@pytest.mark.parametrize(
    ("name", "attrs"),
    [
        ("adam", {"beta2": 1.0}),
        ("adam", {"step": 1.5}),
        ("layer_norm", {"epsilon": -1.0}),
        ("softmax", {"axis": True}),
        ("conv2d", {"groups": True}),
        ("split", {"sizes": 2**31}),
        ("slice", {"begin": (0,), "end": (1,), "step": (1.0,)}),
        ("one_hot", {"depth": 4, "dtype": []}),
        ("avg_pool2d", {"kernel": 1, "count_include_pad": "yes"}),
    ],
)
def test_other_attributes_have_a_range_and_a_kind(name, attrs):
    op = ops.get(name)
    example = op.examples[0]
    with pytest.raises(AscendLabError, match=f"{name}: ") as caught:
        op.infer(*example.shapes, **{**example.attrs, **attrs})
    assert "\n" not in str(caught.value)


def test_infinity_is_a_value_but_no_parameter():
    assert ops.get("clip").settings({"high": math.inf})["high"] == math.inf
    with pytest.raises(InputError, match="alpha"):
        ops.get("elu").settings({"alpha": math.inf})


# -- files -----------------------------------------------------------------------------------------
def test_a_bomb_is_not_unpacked(tmp_path, monkeypatch):
    file = tmp_path / "bomb.csv.gz"
    file.write_bytes(gzip.compress(b"\0" * 2**22))
    monkeypatch.setattr(limits, "TABLE_BYTES", 2**20)
    with pytest.raises(InputError, match=r"at most 1,048,576 bytes; got more .* when unpacked"):
        read_recorded(file)
    assert len(limits.read_file(file, "a file", 2**22)) == 2**22


TOML = {
    "dots": "a" + ".a" * 20_000 + " = 1\n",
    "quoted": '"a=b"' + '."a=b"' * 20_000 + " = 1\n",
    "header": "[" + "a." * 20_000 + "a]\n",
    "nested": "a = " + "[" * 20_000,
    "long": "a = '" + "x" * limits.TOML_BYTES + "'\n",
}


@pytest.mark.parametrize("case", TOML)
def test_a_toml_file_that_would_take_hours_is_refused(case, tmp_path):
    file = tmp_path / "x.toml"
    file.write_text(TOML[case])
    for load, kind in ((load_chip, ChipError), (load_topology, ClusterError)):
        with pytest.raises(kind) as caught:
            load(file)
        assert len(str(caught.value)) < 400


def test_a_number_too_long_to_print_is_named(tmp_path):
    file = tmp_path / "x.toml"
    fact = f'{{value = 0x{"F" * 9000}, source = "x", trust = "assumed"}}'
    head = 'base = "Toy"\nname = "Mine"\nsummary = "mine"\ncombined = true\n'
    file.write_text(f"{head}[clock]\nhz = {fact}\n")
    with pytest.raises(ChipError, match="hz needs at most"):
        load_chip(file)


def test_a_mesh_of_all_with_all_is_refused_before_it_is_made(tmp_path):
    names = "[" + ",".join(f'"npu{i}"' for i in range(1024)) + "]"
    link = f"from = {names}\nto = {names}\nalpha_us = 1\ngbytes_per_s = 1\n"
    (tmp_path / "x.toml").write_text(f"devices = 1024\n[[links]]\n{link}")
    with pytest.raises(ClusterError, match="links of at most 131,072; got 1,048,576"):
        load_topology(tmp_path / "x.toml")


def _archive(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return str(path)


def _saved(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _claiming(shape):
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}".ljust(200) + "\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode()


@pytest.mark.parametrize(
    "members",
    [
        {"x": b"hello"},
        {"x.npy": b"hello"},
        {"x.npy": _saved(np.array([{}, 1], object))},
        {"x.npy": _saved(np.array(["a"]))},
        {"x.npy": _saved(np.zeros(3, complex))},
        {"x.npy": _saved(np.zeros(3, [("a", "f4")]))},
        {"x.npy": _saved(np.zeros(3))[:-5]},
        {"x.npy": _claiming(f"({2**40},)")},
        {"x.npy": _claiming("(" * 150)},
        {"x.npy": _claiming("(" + "1," * 70 + ")") + b"\0" * 4},
    ],
)
def test_archives_of_anything_but_numbers_are_refused(members, tmp_path):
    with pytest.raises(InputError) as caught:
        load_arrays(_archive(tmp_path / "x.npz", **members))
    assert "\n" not in str(caught.value)


def test_an_archive_larger_than_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("ascend_lab.cli.array_files.ARRAY_BYTES", 100)
    with pytest.raises(InputError, match="at most 100; got 928"):
        load_arrays(_archive(tmp_path / "x.npz", **{"x.npy": _saved(np.zeros(100))}))


def test_a_kernel_of_endless_code_stops():
    k = KernelBuilder("endless", TOY)
    for _ in range(limits.INSTRUCTIONS):
        k.barrier()
    with pytest.raises(CapacityError, match="endless: instructions of at most 65,536"):
        k.barrier()


def test_a_node_of_20_000_operands_is_refused(tmp_path, capsys):
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [40_000, 3])
    node = helper.make_node("Concat", ["x"] * 20_000, ["y"], axis=0)
    onnx.save(helper.make_model(helper.make_graph([node], "g", [x], [y])), tmp_path / "y.onnx")
    said = refused(capsys, "simulate", tmp_path / "y.onnx", "--chip", "Toy")
    assert "operands of at most 4,096; got 20,000" in said


def test_a_model_whose_output_is_a_constant_runs(tmp_path, capsys):
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])
    y = helper.make_tensor_value_info("y", TensorProto.INT64, [2])
    graph = helper.make_graph([helper.make_node("Shape", ["x"], ["y"])], "shapes", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, tmp_path / "y.onnx")
    assert "min 2  max 3" in run(capsys, "run", tmp_path / "y.onnx")[1]
    for verb in (["simulate"], ["run", "--compiled"]):
        code, _, said = run(capsys, *verb, tmp_path / "y.onnx", "--chip", "Toy")
        assert code in (0, 2) and "too large" not in said and said.count("\n") <= 1


# -- processor time --------------------------------------------------------------------------------
@contextmanager
def processor_time(limit_s):
    """Stop what takes more processor time than this: the machine's load does not count."""

    def stop(number, frame):
        raise AssertionError(f"more than {limit_s} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def test_thousands_of_buffers_alive_together_are_planned():
    buffers = [Buffer(k, 0, 9, 1 + 37 * k % 1009) for k in range(9999)]
    with processor_time(5):
        assert plan(buffers, method="greedy-by-start").optimal
    units = sum(b.size_bytes for b in buffers) / hot._unit_bytes(buffers)
    assert units * len(buffers) <= 2**28


def test_pooling_by_a_huge_window_counts_by_axis_and_has_a_limit():
    with processor_time(2):
        counts = window_counts((1, 10**5), (1, 40_001), (1, 1), ((0, 0), (9, 0)), False)
    assert (counts.min(), counts.max(), counts.shape) == (39_992, 40_001, (1, 60_009))
    with pytest.raises(InputError, match="elements in all windows of at most 4,294,967,296"):
        ops.get("max_pool2d").formula(np.zeros((1, 1, 1, 2 * 10**5)), **POOL)


POOL = {"kernel": (1, 10**5), "stride": 1, "pad": 0}


def _model(path, nodes, output):
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [4]) for n in ("t0", output))
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [x], [y])), path)
    return str(path)


def test_a_chain_whose_paths_double_is_timed(tmp_path, capsys):
    add = [
        helper.make_node("Add", [f"t{max(i - 1, 0)}", f"t{i}"], [f"t{i + 1}"]) for i in range(1500)
    ]
    model = _model(tmp_path / "x.onnx", add, "t1500")
    with processor_time(5):
        assert "1500 nodes" in run(capsys, "simulate", model, "--chip", "Ascend310")[1]


def test_a_model_of_30_000_nodes_is_refused(tmp_path, capsys):
    relu = [helper.make_node("Relu", [f"t{i}"], [f"t{i + 1}"]) for i in range(30_000)]
    model = _model(tmp_path / "x.onnx", relu, "t30000")
    assert "at most 20000 nodes; got 30000" in refused(capsys, "run", model)


def test_a_long_name_keeps_its_beginning_and_its_kind():
    name = "stage4.3.shuffled.NC1HWC0"
    kind = "transpose+trans_data"
    assert limits.labelled(name, kind, 36) == "stage4.3.sh.. (transpose+trans_data)"
    assert limits.labelled(name, kind, 48) == f"{name} ({kind})"
    assert [len(limits.labelled(name, kind, n)) for n in (12, 33, 47)] == [12, 33, 47]


@pytest.mark.parametrize(
    ("sizes", "needed"),
    [((2**20, 2**20), "at most 268435456 elements"), ((2, 2**17), "sizes of at most 65536")],
)
def test_an_image_resized_to_a_trillion_pixels_is_refused(tmp_path, capsys, sizes, needed):
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in IMAGES)
    node = helper.make_node("Resize", ["x", "", "", "s"], ["y"], mode="linear")
    wanted = onnx.numpy_helper.from_array(np.array([1, 1, *sizes]), "s")
    graph = helper.make_graph([node], "g", [x], [y], [wanted])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    onnx.save(model, tmp_path / "x.onnx")
    with processor_time(3):
        assert needed in refused(capsys, "simulate", tmp_path / "x.onnx", "--chip", "Toy")


IMAGES = (("x", [1, 1, 2, 2]), ("y", None))
