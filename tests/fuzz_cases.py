"""Commands for the fuzz test, drawn from the parsers of `ascend-lab` and `aoe` themselves."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import signal
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import helper, numpy_helper

from ascend_lab.aoe.bank import Store, chip_digest
from ascend_lab.cli import aoe, ascend_lab as lab
from ascend_lab.cli.aoe_bank import bank_parser
from ascend_lab.cli.aoe_words import parser as aoe_parser
from ascend_lab.cli.common import parser_of
from ascend_lab.cli.verbs import VERBS
from ascend_lab.compiler.onnx import import_model
from ascend_lab.data import data_path
from ascend_lab.deploy.runtime import compile_offline
from ascend_lab.deploy.runtime.container import MAGIC
from ascend_lab.limits import count, decimal, whole
from ascend_lab.machine.chip import load_chip
from ascend_lab.operators import ops

ROOT = Path(__file__).parent.parent
HANG_S = 20
Choose = Callable[[Sequence[Any]], Any]
OUTPUTS = ("json", "trace", "output", "outputs", "fusion_result", "records",
           "check_report", "report")  # fmt: skip

NUMBERS = ("0", "-1", "-5", "²", "1.5", "9" * 400, "1e308", "1e-320", "nan", "inf", "-inf",
           str(2**31), str(2**63), "1_0", "٣", "0x10", " 1", "")  # fmt: skip
PATHS = ("rubbish", "empty", "folder", "loop", "missing", "nowhere/file", "/", ".", "..", "~",
         "x" * 300, "y/" * 2500, "a\tb\x1b[31m", "\udcff", "null.json", "list.json", "deep.json",
         "words.toml", "words.csv", "words.npz", "half.onnx", "dangling", "")  # fmt: skip
TEXTS = (*NUMBERS, *PATHS, ",", "x", ":", ";", "=", "a=b", "1,", "x:", ":1", "1,2,3", "4x4", "-")
_WHOLE = "1", "2", "3", "8", "16"
SMALL = {whole: _WHOLE, count: _WHOLE, decimal: ("0.1", "1", "2.5", "30")}
"""Good numbers by type."""
GOOD: dict[str, tuple[str, ...]] = {
    "chip": ("Toy", "Ascend310", "Ascend910B2", "chip.toml"),
    "soc_version": ("Toy", "Ascend310", "chip.toml"),
    "chips name": ("Toy", "chip.toml"),
    "topologies name": ("star:4", "cluster.toml", "910a-server"),
    "op name": tuple(ops.OPERATORS),
    "shapes": ("4x4", "4x4", "4x4", "4", "1x16x8x8", "16x16x3x3"),
    "attr": ("axis=0", "axis=-1", "stride=(1,1)", "pad=1", "perm=(1,0)", "k=2", "axis=[]",
             "axis=nan", "axis=1e308", "stride=0", "window=(2,2)", "k='a'"),
    "dtype": ("fp16", "bf16", "int8", "fp32", "int32"),
    "out_dtype": ("fp16", "fp32", "int32"),
    "tile": ("16,16,16", "32,16,16"),
    "grid": ("1x1", "2x1"),
    "stride": ("1", "2,1"),
    "pad": ("0", "1,1", "1,0,1,0"),
    "dilation": ("1", "2"),
    "groups": ("1", "2"),
    "run-kernel file": ("kernel.py",),
    "model": ("model.onnx", "open.onnx", "model.alm", "found.onnx", "conv.onnx"),
    "migrate model": ("model.onnx", "open.onnx", "found.onnx", "zoo:mobilevit_block"),
    "migrate output": ("new.onnx",),
    "report": ("new.json", "old.json", "new.html"),
    "zoo name": ("squeezenet", "mobilenet_v2", "zoo:ghostnet"),
    "width": ("0.5", "1"),
    "resolution": ("32", "64"),
    "model_path": ("models",),
    "singleop": ("op.json",),
    "tune_ops_file": ("ops.json",),
    "inputs": ("x.npz",),
    "input_shape": ("x:1,16", "x:-1,16"),
    "fusion_switch_file": ("switch.cfg",),
    "mode": ("0", "3"),
    "dynamic_batch_size": ("1,2",),
    "fusion_switch": ("switch.cfg",),
    "tuned": ("tuned.jsonl",),
    "bank": ("bank.db", "builtin"),
    "plan-memory file": ("buffers.csv",),
    "method": ("best of", "exact", "l2", "auto", "heuristic"),
    "replay file": ("space.csv",),
    "search": ("genetic", "random", "mcts", "exhaustive", "branch-and-bound"),
    "subgraph file": ("subgraph.json",),
    "strategy file": ("strategy.json",),
    "gradient-plan file": ("gradients.csv", "trace.json"),
    "fit-collective file": ("table.csv",),
    "compare file": ("measured.csv", "op_summary.csv"),
    "serve-sim config": ("server.toml",),
    "device": ("a",),
    "op": ("allreduce", "all_to_all", "broadcast", "reduce_scatter"),
    "algorithm": ("auto", "ring"),
    "bytes": ("1e3", "64k", "1MB"),
    "topology": ("star:4", "ring:4", "cluster.toml"),
    "cluster": ("910a-server", "star:4", "cluster.toml"),
    "optimizer": ("adam", "sgd"),
    "job_type": ("2", "2", "2", "1", "1,2", "4"),
    "framework": ("5",),
    "aoe output": ("folder", "."),
    "aipp config": ("aipp.cfg",),
    "image": ("frame.npy",),
    "precision_mode": ("force_fp16", "allow_fp32_to_bf16"),
    "executor": ("serial",),
    "operand": ("bank.jsonl", "bank.db", "0"),
    **dict.fromkeys((*OUTPUTS[:4], "records", "check_report"), ("new.json", "old.json")),
    "values": ("x.npy",),
    "calibration": ("x.npz",),
    "config": ("amct.cfg",),
    "quantize output": ("new.onnx",),
    **dict.fromkeys(("calibrate method", "quantize method"), ("kl", "ifmr", "minmax", "hfmg")),
    "json": ("new.json", "old.json", "-"),
}  # fmt: skip
"""Good values by verb and argument, or by argument alone."""
QUICK = {
    "op chip": "Toy",
    "aoe budget": "3",
    "aoe time_limit": "1",
    "replay budget": "3",
    "replay seeds": "2",
    "subgraph evaluations": "50",
    "plan-memory time_limit": "1",
    "strategy time_limit": "1",
}
"""Mostly given, so that an example takes milliseconds."""


def found_model() -> bytes:
    """Return a model whose sizes its values decide: the places of what is not 0."""
    entry = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 16])
    nodes = [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("NonZero", ["h"], ["y"])]
    graph = helper.make_graph(nodes, "g", [entry], [onnx.ValueInfoProto(name="y")])
    opsets = [helper.make_opsetid("", 17)]
    return bytes(helper.make_model(graph, opset_imports=opsets).SerializeToString())


def conv_model() -> bytes:
    """Return relu(softmax(conv(x))): kernels of the cube and of the vector unit, both tuned."""
    entry = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 16, 8, 8])
    weight = numpy_helper.from_array(np.ones((16, 16, 3, 3), np.float32), "w")
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["h"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Softmax", ["h"], ["s"], "softmax", axis=-1),
        helper.make_node("Relu", ["s"], ["y"], "relu"),
    ]
    result = onnx.ValueInfoProto(name="y")
    graph = helper.make_graph(nodes, "g", [entry], [result], [weight])
    opsets = [helper.make_opsetid("", 17)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def conv_schedules() -> bytes:
    """Return schedules as `aoe` writes them for `conv_model` on the Toy chip."""
    toy = load_chip("Toy")
    head = {
        "format": "ascend_lab tuned schedules", "version": 1, "chip": "Toy",
        "chip_digest": chip_digest(toy), "core_count": toy.core_count, "dtype": "fp16",
        "one_launch": False, "inside": False, "prefetch": False,
    }  # fmt: skip
    tiling = {
        "base_m": 16, "base_k": 144, "base_n": 16, "step_k": 1, "grid_rows": 2, "grid_cols": 1,
        "a_l0_slots": 1, "b_l0_slots": 1, "window": "flat",
    }  # fmt: skip
    kernel = (
        "graph piece (x0: fp16[1, 16, 8, 8]@NC1HWC0, x1: fp16[16, 16, 3, 3]) -> (y0) {\n"
        "  y0: fp16[1, 16, 8, 8]@NC1HWC0 = conv2d(x0, x1) {pad = 1} n0\n}\nx1"
    )
    lines = [head, {"kernel": kernel, "schedule": {"tiling": tiling}}]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def relu_model(size: int | str, width: int | str = 16) -> bytes:
    """Return relu(x @ w) with a name that a terminal would obey."""
    entry = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [size, width])
    weight = numpy_helper.from_array(np.ones((16, 16), np.float32), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], "the product of ü"),
        helper.make_node("Relu", ["h"], ["y"], "relu"),
    ]
    graph = helper.make_graph(nodes, "g", [entry], [onnx.ValueInfoProto(name="y")], [weight])
    opsets = [helper.make_opsetid("", 17)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return bytes(made.SerializeToString())


def _bank() -> bytes:
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "bank.db")
        with Store(file, True):
            pass
        return file.read_bytes()


def files() -> dict[str, bytes]:
    """Return what lies in the folder before each command."""
    arrays = io.BytesIO()
    np.savez(arrays, x=np.ones((1, 16), np.float32))
    frame = io.BytesIO()
    np.save(frame, np.arange(24, dtype=np.uint8))
    values = io.BytesIO()
    np.save(values, np.linspace(-1, 2, 64, dtype=np.float32))
    words = io.BytesIO()
    with zipfile.ZipFile(words, "w") as archive:
        archive.writestr("x.npy", "no array")
    toy = (ROOT / "ascend_lab/machine/chip/presets/Toy.toml").read_bytes()
    trace = [{"ph": "X", "name": "a", "ts": 1, "dur": 2, "args": {}}]
    return {
        "rubbish": bytes(range(256)) * 4,
        "empty": b"",
        "old.json": b'"what the user had"',
        "null.json": b"null",
        "list.json": b'[1, "a", {"op": []}]',
        "deep.json": b"[" * 3000,
        "words.toml": b'name = "a"\n[clock]\nhz = "fast"\n',
        "words.csv": b"a,b\n1\n\xc2\xb2,x,y\n",
        "words.npz": words.getvalue(),
        "x.npz": arrays.getvalue(),
        "frame.npy": frame.getvalue(),
        "aipp.cfg": b"aipp_op { aipp_mode: static input_format: RGB888_U8 "
        b"src_image_size_w: 4 src_image_size_h: 2 }",
        "x.npy": values.getvalue(),
        "amct.cfg": b"common_config { hfmg_quantize { num_of_bins: 1024 } }",
        "model.onnx": relu_model(1),
        "open.onnx": relu_model("n"),
        "half.onnx": relu_model(1)[:90],
        "found.onnx": found_model(),
        "model.alm": bytes(compile_offline({None: import_model(relu_model(1))}, load_chip("Toy"))),
        "models/a.onnx": relu_model(1),
        "chip.toml": toy.replace(b'name = "Toy"', b'name = "My\\u001b[31m\\nchip"'),
        "cluster.toml": (
            b'name = "a\\u001b[31m\\nb"\ndevices = ["a", "b"]\nservers = [["a"], ["b"]]\n'
            b'[[links]]\nfrom = "a"\nto = "b"\nalpha_us = 2\ngbytes_per_s = 12.5\n'
        ),
        "server.toml": (
            b'[service]\nlaw = "erlang"\nmean_s = 1\nshape = 2\n[arrivals]\nlaw = "closed"\n'
            b"clients = 3\n[run]\nrequests = 100\n"
        ),
        "kernel.py": (ROOT / "notebooks/my_kernel.py").read_bytes(),
        "op.json": b'{"op": "relu", "shapes": [[4, 16]]}',
        "ops.json": b'{"tune_ops_type": ["relu"]}',
        "switch.cfg": b'{"Switch": {"GraphFusion": {"ALL": "off"}}}',
        "tuned.jsonl": conv_schedules(),
        "conv.onnx": conv_model(),
        "roster.csv": b"id,name,late_minutes,log\nada,Ada,0,20\nbob,Bob B.,90,10\n",
        "bank.db": _bank(),
        "bank.jsonl": b"{}\n",
        "buffers.csv": b"id,lower,upper,size\na,0,3,4\nb,1,2,8\n",
        "space.csv": b"a,b,time_ms\n1,2,3.5\n1,4,\n2,2,1.25\n2,8,2\n",
        "subgraph.json": data_path("mlsys2026/mlsys-2026-1.json").read_bytes(),
        "strategy.json": (ROOT / "tests/data/iopddl/example.json").read_bytes(),
        "gradients.csv": b"name,ready_us,bytes\na,1,100\nb\x1b,2,200\n",
        "trace.json": json.dumps({"traceEvents": trace}).encode(),
        "measured.csv": b"case,chip,operator,inputs,dtype,attributes,l2,timing,measured_us\n"
        b"a,Toy,relu,64x64,fp16,,warm,kernel,3\n"
        b"b,Toy,softmax,8x64,fp16,axis=-1,cold,wall,9.5\n",
        "op_summary.csv": (ROOT / "tests/data/compare/op_summary.csv").read_bytes(),
        "table.csv": b"device,bytes,ranks,time_s\na,100,2,1e-5\na,1000,4,2e-5\na,9000,2,4e-5\n",
    }


def fill(folder: Path, contents: dict[str, bytes]) -> None:
    """Write the files, a folder, a link to itself and one that leads nowhere."""
    for name, data in contents.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    (folder / "folder").mkdir()
    (folder / "loop").symlink_to("loop")
    (folder / "dangling").symlink_to("absent")


def parsers() -> dict[str, tuple[list[str], argparse.ArgumentParser]]:
    """Return every verb's words and its own parser."""
    found = {"aoe": (["aoe"], aoe_parser())}
    for words, parser in ((["ascend-lab"], parser_of(VERBS)), (["aoe", "bank"], bank_parser())):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, verb in action.choices.items():
                    found[" ".join([*words[1:], name])] = ([*words, name], verb)
    return found


PARSERS = parsers()


def command(choose: Choose) -> list[str]:
    """Return a command: all that is required, some flags, mostly good values."""
    name = choose(sorted(PARSERS.keys() - {"serve"}))  # which waits for clients
    words, parser = PARSERS[name]
    seldom = (False,) * max(3, len(parser._actions) // 3)
    flags: list[str] = []
    places: list[str] = []
    exclusive = {id(a): g for g in parser._mutually_exclusive_groups for a in g._group_actions}
    chosen = {id(g): choose(g._group_actions) for g in parser._mutually_exclusive_groups}
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        group = exclusive.get(id(action))
        often = (True, True, False) if f"{name} {action.dest}" in QUICK else (*seldom, True)
        wanted = action.required or choose(often)
        if group is not None:
            wanted = chosen[id(group)] is action
        if not wanted and action.option_strings:
            continue
        if action.nargs == 0:
            flags.append(choose(action.option_strings))
        elif action.option_strings:
            value = _value(name, action, choose)
            flag = choose(action.option_strings)
            flags += [f"{flag}={value}"] if choose((True, False)) else [flag, value]
        else:
            counts = {"*": (1, 2, 1, 2, 0, 3, 4), "?": (1, 1, 0)}.get(str(action.nargs), (1,))
            places += [_value(name, action, choose) for _ in range(choose(counts))]
    if name == "op" and choose((True, True, False)):
        return [*words, *_operator(choose), *flags]
    return [*words, *places, *flags]


def _operator(choose: Choose) -> list[str]:
    """Return an operator with the shapes and attributes of an example, one perhaps spoiled."""
    operator = choose([op for op in ops.OPERATORS.values() if op.examples])
    example = choose(operator.examples)
    attrs = {**operator.attrs, **example.attrs}
    spoiled = choose([None, *attrs])
    shapes = ("x".join(map(str, shape)) for shape in example.shapes)
    found = [operator.name, *shapes, "--chip=Toy"]
    for key, value in attrs.items():
        wrong = str(choose((*NUMBERS, "(1,)", "(-1,0)", "[[1]]", "True", "None", "{}", "a", "()")))
        found.append(f"--attr={key}={wrong if key == spoiled else value}")
    return found


def _value(verb: str, action: argparse.Action, choose: Choose) -> str:
    good = GOOD.get(f"{verb} {action.dest}") or GOOD.get(action.dest)
    kind = action.type if action.type in SMALL else None
    if action.choices is not None:
        good = tuple(map(str, action.choices))
    elif kind is not None:
        quick = QUICK.get(f"{verb} {action.dest}")
        good = SMALL[kind] if quick is None else (quick,)
    if good is not None and choose((True,) * 9 + (False,)):
        return str(choose(good))
    return str(choose(NUMBERS if kind is not None else TEXTS))


class HangError(Exception):
    """A command took too long."""


@contextlib.contextmanager
def _within(limit_s: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise HangError(f"more than {limit_s} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(words: Sequence[str]) -> tuple[int, str, str]:
    """Run a command in this process; return its exit code, what it printed and its errors."""
    main = aoe if words[0] == "aoe" else lab
    out = io.StringIO()
    err = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _within(HANG_S):
        code = main(words[1:])
    return code, out.getvalue(), err.getvalue()


def check(words: Sequence[str], contents: dict[str, bytes], folder: Path) -> None:
    """Run a command in a folder and judge the answer; `folder` is the working directory."""
    fill(folder, contents)
    code, out, err = run(words)
    lines = err.splitlines()
    assert code in (0, 1, 2), (code, err)
    assert all(line.startswith(f"{words[0]}: ") and len(line) < 12_000 for line in lines), err
    assert (code == 2) <= bool(lines), "no reason is given"
    assert err.isascii() or all(line.isprintable() for line in lines), err
    assert all(line.isprintable() for line in out.split("\n")), "terminal codes"
    _check_files(words, code, contents, folder)


def _check_files(words: Sequence[str], code: int, contents: dict[str, bytes], folder: Path) -> None:
    """Inputs are as they were; an output is as it was, or whole."""
    flags = [f"--{name.replace('_', '-')}" for name in OUTPUTS]
    named = {word.partition("=")[2] for word in words if word.partition("=")[0] in flags}
    named |= {word for flag, word in pairwise(words) if flag in flags}
    for name, data in contents.items():
        now = (folder / name).read_bytes()
        if now == data or name == "bank.db":
            continue
        own = name in named or (words[:3] == ["aoe", "bank", "export"] and name in words)
        assert own, f"{name} was changed"
        assert code in (0, 1), f"{name} was changed by a command that failed"
        array = now.startswith((b"\x93NUMPY", MAGIC)) or zipfile.is_zipfile(io.BytesIO(now))
        if not array and not {"export", "quantize", "migrate"} & set(words):
            json.loads(now)
    assert (folder / "loop").readlink() == Path("loop") and not any(folder.glob(".ascend_lab-*"))


# -- files that lie -------------------------------------------------------------------------------
STRANGE = (None, True, -1, 0, 2**63, 1e999, 1.5, "", "x", "\r", [], {}, [[]], {"": None}, [None, 1])
"""Values of every type, to stand where another is expected."""
WORDS = ("\r", "\n", ",", "-1", "9" * 30, "nan", "\x00", '"', "[", "=", "a.b = 1\n", "\ufeff")
READERS = {
    "model.onnx": (["simulate", "--chip=Toy"], ["run", "--inputs=x.npz"], ["migrate", "--chip=Toy",
                   "--output=new.onnx"], ["quantize", "--calibration=x.npz", "--output=new.onnx"]),
    "model.alm": (["run", "--inputs=x.npz"], ["simulate", "--chip=Toy"]),
    "x.npz": (["run", "model.onnx", "--inputs"], ["run", "model.alm", "--inputs"]),
    "x.npy": (["calibrate"],),
    "tuned.jsonl": (["simulate", "conv.onnx", "--chip=Toy", "--tuned"],),
    "bank.jsonl": (["aoe", "bank", "import", "bank.db"],),
    "chip.toml": (["chips"], ["gemm", "32", "32", "32", "--chip"]),
    "cluster.toml": (["collective", "--op=allreduce", "--bytes=1e3", "--topology"],),
    "server.toml": (["serve-sim"],),
    "aipp.cfg": (["aipp", "--image=frame.npy", "--output=new.json"],),
    "amct.cfg": (["quantize", "model.onnx", "--calibration=x.npz", "--output=new.onnx",
                  "--config"],),
    "buffers.csv": (["plan-memory", "--time-limit=1"],),
    "space.csv": (["replay", "--budget=2", "--seeds=2"],),
    "subgraph.json": (["subgraph", "--evaluations=20"],),
    "strategy.json": (["strategy", "--time-limit=1"],),
    "gradients.csv": (["gradient-plan", "--alpha-us=1", "--beta-us-per-byte=0.001"],),
    "trace.json": (["gradient-plan", "--alpha-us=1", "--beta-us-per-byte=0.001"],),
    "table.csv": (["fit-collective"],),
    "measured.csv": (["compare"],),
    "op_summary.csv": (["compare", "--chip=Toy"],),
}  # fmt: skip
"""Commands that read a file, whose name comes last."""


def lying(choose: Choose) -> tuple[list[str], dict[str, bytes]]:
    """Return a command and the one file that it reads, spoiled in one to three places."""
    name = choose(sorted(READERS))
    words = choose(READERS[name])
    # A flag that waits for its value stands last; a verb that takes the file stands first.
    if words[0] != "aoe":
        words = ["ascend-lab", words[0], *words[1:]]
    at_end = words[-1].startswith("--") and "=" not in words[-1]
    words = [*words, name] if at_end or words[0] == "aoe" else [*words[:2], name, *words[2:]]
    data = files_once()[name]
    for _ in range(choose((1, 1, 2, 3))):
        data = spoiled(name, data, choose)
    return words, {name: data}


@functools.cache
def files_once() -> dict[str, bytes]:
    """Return `files()`, made once."""
    return files()


def spoiled(name: str, data: bytes, choose: Choose) -> bytes:
    """Return a file with one mistake: of its structure where that is known, or of its bytes."""
    ending = Path(name).suffix
    if choose((True, True, True, False)):
        # What earlier mistakes left may be no JSON or no model any more.
        with contextlib.suppress(ValueError, IndexError, DecodeError):
            if ending == ".json":
                return json.dumps(_spoiled_json(json.loads(data), choose)).encode()
            if ending == ".jsonl" and data.strip():
                lines = data.decode().splitlines()
                place = choose(range(len(lines)))
                lines[place] = json.dumps(_spoiled_json(json.loads(lines[place]), choose))
                return "\n".join(lines).encode()
            if ending == ".onnx":
                return _spoiled_model(data, choose)
            if ending in (".csv", ".toml", ".cfg"):
                place = choose(range(len(data) + 1))
                return data[:place] + choose(WORDS).encode() + data[place + choose((0, 1, 3)) :]
    place = choose(range(len(data) + 1))
    return choose((
        data[:place],
        data[:place] + bytes([choose(range(256))]) + data[place + 1 :],
        data[:place] + data[place + choose((1, 4, 16)) :],
        data[:place] + choose((b"\xff" * 8, b"\x00" * 8, b"\r")) + data[place:],
    ))  # fmt: skip


def _spoiled_json(value: Any, choose: Choose) -> Any:
    """Return a JSON value with one part of another type, missing, or doubled."""
    if isinstance(value, dict) and value and choose((True, True, True, False)):
        key = choose(sorted(value))
        changed = dict(value)
        if choose((True, True, True, False)):
            changed[key] = _spoiled_json(value[key], choose)
        else:
            del changed[key]
        return changed
    if isinstance(value, list) and value and choose((True, True, True, False)):
        place = choose(range(len(value)))
        return [
            *value[:place],
            _spoiled_json(value[place], choose),
            *value[place:][choose((0, 1)) :],
        ]
    return choose(STRANGE)


def _spoiled_model(data: bytes, choose: Choose) -> bytes:
    """Return a model one of whose fields lies: sizes, types, names, versions."""
    model = onnx.ModelProto.FromString(data)
    weight = model.graph.initializer[0] if model.graph.initializer else onnx.TensorProto()
    if not model.graph.node:
        raise ValueError("earlier mistakes left no node")
    node = choose(list(model.graph.node))
    shape = model.graph.input[0].type.tensor_type.shape if model.graph.input else None
    changes: tuple[Callable[[], Any], ...] = (
        lambda: weight.dims.append(choose((0, -1, 2, 2**31, 2**62))),
        lambda: weight.dims.insert(0, choose((0, -1, 3, 2**40))),
        weight.dims.pop,
        lambda: setattr(weight, "data_type", choose((0, 7, 8, 10, 16, 17, 21, 99, -1))),
        lambda: setattr(weight, "raw_data", weight.raw_data[: choose((0, 1, 7))]),
        lambda: setattr(weight, "data_location", 1),
        lambda: weight.float_data.append(1.0),
        lambda: setattr(node, "op_type", choose(("Conv", "Split", "Reshape", "If", "", "Nope"))),
        lambda: setattr(node, "domain", choose(("com.microsoft", "x"))),
        lambda: node.input.append(choose(("", "x", "y", "w"))),
        lambda: node.output.append(choose(("", "x", "y", "z"))),
        node.input.pop,
        lambda: node.attribute.add(name=choose(("pads", "axis", "group")), i=3, type=2),
        lambda: setattr(model.opset_import[0], "version", choose((0, -1, 1, 6, 99, 2**31))),
        lambda: setattr(model, "ir_version", choose((0, -5, 3, 999))),
        lambda: shape and shape.dim.add(dim_value=choose((0, -3, 2**62))),
        lambda: model.graph.ClearField("output"),
        lambda: model.graph.node.append(node),
    )  # fmt: skip
    choose(changes)()
    return bytes(model.SerializeToString())
