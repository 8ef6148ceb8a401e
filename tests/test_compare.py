"""`ascend-lab compare`: measured rows against the model; every row and file here is made up."""

import csv
import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
from command_lines import refused, run, run_json

from ascend_lab.cluster import collective_time, load_topology
from ascend_lab.compare import Compared, compare, group_of
from ascend_lab.compare.chains import attention
from ascend_lab.compare.profile import Task, reading
from ascend_lab.compare.table import COLUMNS
from ascend_lab.compare.words import CHIP_ALIASES
from ascend_lab.compiler import bound_of, compile_stages, zoo
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import load_chip
from ascend_lab.operators import ops

DATA = Path(__file__).parent / "data" / "compare"
B2 = load_chip("Ascend910B2")
PLAIN = {
    "group": "made up",
    "chip": "Ascend910B2",
    "operator": "add",
    "inputs": "512x1024;512x1024",
    "dtype": "fp16",
    "attributes": "",
    "l2": "cold",
    "timing": "kernel",
    "measured_us": "10",
    "kernels": "",
    "source": "nobody",
    "note": "",
}


def table(folder: Path, *rows: dict[str, str]) -> Path:
    """Write a table of the plain row with what each of some rows says instead."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for place, row in enumerate(rows):
        writer.writerow({"case": f"row {place}", **PLAIN, **row})
    path = folder / "rows.csv"
    path.write_text(text.getvalue(), "utf-8")
    return path


def one(folder: Path, **row: str) -> Compared:
    """Return the only row of a table."""
    (found,) = compare(table(folder, row)).rows
    return found


# -- what the model says ---------------------------------------------------------------------------
SHAPES = ((512, 1024), (512, 1024))


def test_a_kernel_is_without_the_launch_of_the_host_and_a_wall_clock_with_it(
    tmp_path: Path,
) -> None:
    line = ops.time("add", SHAPES, ("fp16", "fp16"), B2)
    kernel = one(tmp_path)
    wall = one(tmp_path, timing="wall")
    assert wall.model_s == pytest.approx(line.time_s)
    assert kernel.model_s == pytest.approx(line.task_s)
    by_host_s = B2.launch_overhead_s - B2.queued_launch_s
    assert wall.model_s - kernel.model_s == pytest.approx(by_host_s)
    assert wall.bound_s == pytest.approx(kernel.bound_s + B2.launch_overhead_s)
    assert kernel.error == pytest.approx(kernel.model_s / 10e-6 - 1)


def test_a_kernel_on_cores_of_two_kinds_keeps_their_start(tmp_path: Path) -> None:
    shapes = ((1, 2, 256, 64),) * 3
    line = ops.time("flash_attention", shapes, ("fp16",) * 3, B2, warm_l2=True)
    assert line.mix_cycles > 0
    inputs = ";".join(["1x2x256x64"] * 3)
    found = one(tmp_path, operator="flash_attention", inputs=inputs, l2="warm")
    assert found.model_s == pytest.approx(line.task_s)


def test_a_warm_l2_is_obeyed_and_an_unknown_one_is_marked(tmp_path: Path) -> None:
    product = {"operator": "add", "inputs": "4096x4096;4096x4096"}
    cold, warm, unknown = compare(
        table(tmp_path, *({**product, "l2": state} for state in ("cold", "warm", "unknown")))
    ).rows
    shapes = ((4096, 4096), (4096, 4096))
    line = ops.time("add", shapes, ("fp16", "fp16"), B2, warm_l2=True)
    assert warm.model_s == pytest.approx(line.task_s)
    assert warm.model_s < cold.model_s and warm.bound_s < cold.bound_s
    assert unknown.model_s == cold.model_s
    assert (cold.marks, unknown.marks) == ((), ("l2 unknown: timed cold",))


@pytest.mark.parametrize(
    ("operator", "inputs", "dtype", "attributes"),
    [
        ("add", "512x1024;512x1024", "fp32", ""),
        ("matmul", "512x1024;512x1024", "bf16", "trans_b=True"),
        ("softmax", "100x1000", "fp32", "axis=0"),
        ("transpose", "64x96x128", "fp16", "perm=(2,0,1)"),
        ("adam", ";".join(["256x512"] * 4), "fp32", "beta1=0.5;weight_decay=0.1"),
        ("conv2d", "2x32x28x28;64x32x3x3", "fp16", "pad=((1,1),(1,1));stride=(1,1)"),
        ("scatter_add", "64x128;64;64x128", "fp16", "segments=64"),
        ("flash_attention", "1x2x256x64;1x2x256x64;1x2x256x64", "fp16", "heads=2"),
        ("reduce_prod", "16x256x256", "fp32", "axis=1"),
        ("gather", "100x64;32", "fp16;int32", "axis=0"),
        ("scatter_update", "2064x512;496;496x512", "int32", ""),
        ("square", "528x272", "fp16", ""),
        ("concat", "32x80x64;16x80x64", "int32", "axis=0"),
    ],
)
@pytest.mark.parametrize("chip", ["Ascend910B2", "Ascend310"])  # an L2 of each kind
def test_no_model_time_is_below_its_bound(
    tmp_path: Path, chip: str, operator: str, inputs: str, dtype: str, attributes: str
) -> None:
    if chip == "Ascend310" and "bf16" in dtype:
        dtype = "fp16"
    said = {"operator": operator, "inputs": inputs, "dtype": dtype, "attributes": attributes}
    said["chip"] = chip
    rows = [{**said, "timing": timing} for timing in ("kernel", "wall")]
    rows += [{**said, "l2": "warm"}]
    for row in compare(table(tmp_path, *rows)).rows:
        assert row.refused is None
        assert row.limit
        assert 0 <= row.bound_s <= row.model_s


def test_halves_of_gelu_are_computed_in_fp32_as_measured(tmp_path: Path) -> None:
    row = {"operator": "gelu", "inputs": "512x1024"}
    halves, brains = (one(tmp_path, **row, dtype=dtype) for dtype in ("fp16", "bf16"))
    assert halves.model_s == brains.model_s
    assert any("fp32" in mark for mark in halves.marks) and not brains.marks
    older = one(tmp_path, **row, chip="Ascend910A")
    assert not older.marks


@pytest.mark.parametrize("name", ["swi_glu", "dynamic_quant", "arg_max"])
def test_the_bound_of_a_chain_counts_the_bytes_that_it_reads(tmp_path: Path, name: str) -> None:
    """A cut of a tensor is free in a network; alone a kernel has to read it all."""
    row = {"case": f"cb/{name}/1", "operator": "", "inputs": "4096x8192", "attributes": ""}
    if name != "dynamic_quant":
        row["attributes"] = "axis=-1"
    found = one(tmp_path, **row)
    read_s = 4096 * 8192 * 2 / B2.memory_peak_bytes_per_s
    assert found.refused is None and read_s <= found.bound_s <= found.model_s


def test_a_row_of_an_unprinted_bin_has_no_bound(tmp_path: Path) -> None:
    (row,) = compare(table(tmp_path, {"chip": "A2, bin not named"})).rows
    assert row.bound_s is None and row.model_s is not None and not row.is_below_bound
    assert "bin not printed" in row.marks[0] and "-" in row.line()


def test_fewer_cores_are_used_and_more_are_another_chip(tmp_path: Path) -> None:
    product = {"operator": "matmul", "inputs": "2048x2048;2048x2048"}
    rows = [{**product, "attributes": text} for text in ("", "cores=8", "cores=32", "cores=x")]
    whole, eight, more, word = compare(table(tmp_path, *rows)).rows
    assert eight.model_s > 2 * whole.model_s
    assert "cores from 1 to 24" in more.refused and "got 32" in more.refused
    assert "cores from 1 to 24" in word.refused


def test_a_network_takes_its_batch_and_its_sizes(tmp_path: Path) -> None:
    said = {"operator": "zoo:squeezenet", "chip": "Ascend310", "timing": "step"}
    rows = [
        {**said, "inputs": "2x3x224x224", "attributes": "batch=2;printed_fps=7.5"},
        {**said, "inputs": "", "attributes": "batch=2"},
        {**said, "inputs": "2x3x224x224", "timing": "kernel"},
        {**said, "inputs": "4x3x224x224", "attributes": "batch=2"},
        {**said, "inputs": "2x3x200", "attributes": "batch=2"},
        {**said, "inputs": "2x3x224x224", "attributes": "batch=2;cards=8"},
        {**said, "inputs": "2x3x224x224", "attributes": "batch=2", "dtype": "fp32"},
        {**said, "inputs": "2x3x224x224", "attributes": "batch=2", "group": "training step"},
    ]
    whole, short, kernels, *others = compare(table(tmp_path, *rows)).rows
    chip = load_chip("Ascend310")
    stages = compile_stages(zoo.build("squeezenet", batch=2), chip)
    times = stages.timeline()
    bound = bound_of(stages.rewritten, chip)
    assert whole.model_s == short.model_s == pytest.approx(times.time_s)
    by_host_s = chip.launch_overhead_s - chip.queued_launch_s
    assert kernels.model_s == pytest.approx(times.time_s - by_host_s)
    assert (whole.bound_s, kernels.bound_s) == pytest.approx((bound.time_s, bound.work_s))
    for row, word in zip(others, ("batch", "2, 3", "cards=8", "fp32", "training"), strict=True):
        assert word in row.refused


def test_a_collective_is_that_of_its_topology(tmp_path: Path) -> None:
    said = {"chip": "8 boards", "operator": "all_reduce", "inputs": "bytes=4194304"}
    rows = [
        {**said, "attributes": text}
        for text in (
            "ranks=8;topology=910b-server",
            "ranks=9;topology=910b-server",
            "ranks=8;topology=a pod",
            "topology=910b-server",
            "ranks=8;topology=910b-server;overlap=True",
        )
    ]
    right, *wrong = compare(table(tmp_path, *rows, {**rows[0], "timing": "wall"})).rows
    timed = collective_time("all_reduce", load_topology("910b-server"), 4194304)
    assert (right.model_s, right.bound_s) == (timed.time_s, timed.lower_bound_s)
    said_so = one(
        tmp_path,
        **{**said, "operator": "all_to_all", "attributes": "ranks=32;topology=A3 pod, HCCS;ep=32"},
    )
    pod = collective_time("all_to_all", load_topology("a3-pod:32"), 4194304)
    assert said_so.model_s == pod.time_s
    assert "topology: as a3-pod" in said_so.marks
    words = ("got 9", "a topology among", "got None", "overlap=True", "timing=kernel; got wall")
    for row, word in zip(wrong, words, strict=True):
        assert word in row.refused


def test_experts_tokens_are_also_moved_in_memory(tmp_path: Path) -> None:
    said = {"chip": "A3 (pod)", "operator": "all_to_all", "inputs": "bytes=8000000"}
    words = "ranks=8;topology=A3 pod, HCCS;ep=8;tokens=100;hidden=10000;topk=8"
    rows = [{**said, "attributes": words, "dtype": dtype} for dtype in ("int8", "bf16", "fp32")]
    no_experts = {**rows[0], "attributes": words + ";topk=0"}
    dispatch, combine, *wrong = compare(table(tmp_path, *rows, no_experts)).rows
    links_s = collective_time("all_to_all", load_topology("a3-pod:8"), 8000000).time_s
    rate = load_chip("Ascend910C").device_memory.rate_bytes_per_s
    assert dispatch.model_s == pytest.approx(links_s + 16000000 / rate)
    assert combine.model_s == pytest.approx(links_s + 9000000 / rate)
    assert any("late hosts" in mark for mark in dispatch.marks)
    for row, word in zip(wrong, ("tokens in", "topk"), strict=True):
        assert word in row.refused


@pytest.mark.parametrize("words", list(CHIP_ALIASES))
def test_a_chip_in_other_words_is_timed_as_a_preset_and_marked(tmp_path: Path, words: str) -> None:
    preset, doubt = CHIP_ALIASES[words]
    as_words, as_preset = compare(table(tmp_path, {"chip": words}, {"chip": preset})).rows
    assert as_words.model_s == as_preset.model_s is not None
    (mark,) = set(as_words.marks) - set(as_preset.marks)
    assert mark.startswith(f"chip: as {preset}") and mark.endswith(doubt)
    assert bool(doubt) == (", " in mark)


# -- refused or marked, never guessed --------------------------------------------------------------
QKV = "1x2x256x64;1x2x256x64;1x2x256x64"


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"operator": ""}, "operator"),
        ({"operator": "adds_up"}, "adds_up"),
        ({"chip": "a board with 20 cores"}, "a board with 20 cores"),
        ({"chip": ""}, "chip"),
        ({"chip": "/etc/passwd.toml"}, "chip: one of"),
        ({"measured_us": "nan"}, "measured_us"),
        ({"measured_us": "-1"}, "measured_us"),
        ({"measured_us": "0"}, "measured_us"),
        ({"measured_us": "1e300"}, "measured_us"),
        ({"measured_us": "ten"}, "measured_us"),
        ({"l2": "hot"}, "l2"),
        ({"timing": "cpu"}, "timing"),
        ({"inputs": "512by1024"}, "inputs"),
        ({"inputs": "0x4;0x4"}, "inputs"),
        ({"inputs": "bytes=12"}, "all_reduce"),
        ({"inputs": "bytes=all", "operator": "all_reduce"}, "bytes=N"),
        ({"inputs": "512x1024"}, "2 inputs"),
        ({"inputs": "3000000000;3000000000"}, "2147483647"),
        ({"inputs": "512x1024;3x7"}, "add"),
        ({"dtype": "int64"}, "int64"),
        ({"dtype": "fp16;fp16;fp16"}, "dtype"),
        ({"attributes": "axis"}, "attributes"),
        ({"attributes": "a=1;a=2"}, "a once"),
        ({"attributes": "epilogue=gelu"}, "epilogue"),
        ({"attributes": "metric=us per token"}, "per unit"),
        ({"operator": "flash_attention", "inputs": QKV, "attributes": "window=64"}, "window=64"),
        ({"operator": "batch_matmul", "inputs": "4x32x64;4x64x32", "attributes": "groups=5"}, "5"),
        ({"operator": "softmax", "inputs": "4x8", "attributes": "axis=7"}, "axis"),
        ({"operator": "softmax", "inputs": "4x8", "attributes": "axis={1: [2]}"}, "axis"),
    ],
)
def test_a_row_that_cannot_be_timed_says_why_and_stops_no_other(
    tmp_path: Path, row: dict[str, str], word: str
) -> None:
    first, bad, last = compare(table(tmp_path, {}, row, {})).rows
    assert first.error == last.error is not None
    assert bad.error is None and bad.model_s is None
    assert word in bad.refused
    assert "mistake of ours" not in bad.refused


def test_what_the_model_computes_more_or_otherwise_is_marked(tmp_path: Path) -> None:
    rows = [
        {"operator": "flash_attention", "inputs": QKV, "attributes": "layout=BSND"},
        {"operator": "flash_attention", "inputs": QKV, "attributes": "causal=False"},
        {"operator": "gelu", "inputs": "64x64", "attributes": "approximate=none"},
        {"operator": "matmul", "inputs": "64x64;64x64", "attributes": "base=128,256,64"},
        {"kernels": "Mul*2+Add"},
    ]
    found = [row.marks for row in compare(table(tmp_path, *rows)).rows]
    assert "BSND" in found[0][0] and found[1] == (attention.LIBRARY,)
    assert "tanh form" in found[2][0] and "base" in found[3][0] and "Mul*2+Add" in found[4][0]


# -- attention in the words of its sources ---------------------------------------------------------
READ_S = 25 * B2.device_memory.latency_cycles / B2.clock_hz
"""The library's tiling data is 1596 bytes, on 25 lines of 64."""


def test_a_causal_row_skips_whole_tiles_and_masks_the_others(tmp_path: Path) -> None:
    """Of 4 tiles of 512 keys blocks of 512 rows see 1, 2, 3 and 4, in the mean 1280 keys."""
    qkv = ";".join(["4x8x2048x128"] * 3)
    row = {"operator": "flash_attention", "inputs": qkv}
    full = one(tmp_path, **row)
    causal = one(tmp_path, **row, attributes="causal=True;queries=2048")
    masked = {**row, "inputs": f"{qkv};2048x2048"}
    with_mask = one(tmp_path, **masked, attributes="causal=True;queries=2048")
    in_full = one(tmp_path, **masked, attributes="causal=False")
    assert causal.model_s == with_mask.model_s
    assert with_mask.marks == (attention.SKIPPED, attention.LIBRARY)
    q = (4, 8, 2048, 128)
    seen = (4, 8, 1280, 128)
    dealt = replace(B2, core_count=22)  # 128 blocks of 512 rows in 6 turns
    line = ops.time("flash_attention", (q, seen, seen, (2048, 1280)), ("fp16",) * 4, dealt)
    assert causal.model_s == pytest.approx(line.task_s + READ_S)
    assert causal.bound_s < full.bound_s and causal.model_s < in_full.model_s


@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
def test_latent_attention_is_one_kernel_with_one_key_head(tmp_path: Path, layout: str) -> None:
    sizes = {"BSND": ("2x3x16x", "2x300x1x"), "BNSD": ("2x16x3x", "2x1x300x")}
    q, k = sizes[layout]
    inputs = f"{q}512;{q}64;{k}512;{k}64;{k}512"
    words = f"layout={layout};causal=True"
    row = {"case": "cb/mla/1", "operator": "", "inputs": inputs, "attributes": words}
    found = one(tmp_path, **row)
    shapes = (2, 16, 3, 576), (2, 1, 300, 576), (2, 1, 300, 512), (3, 300)
    line = ops.time("flash_attention", shapes, ("fp16",) * 4, B2)
    assert found.model_s == pytest.approx(line.task_s + READ_S)
    assert "layout" in one(tmp_path, **{**row, "attributes": "layout=SBH"}).refused
    assert "5 inputs" in one(tmp_path, **{**row, "inputs": f"{q}512"}).refused


def test_selected_keys_are_gathered_beside_the_products(tmp_path: Path) -> None:
    inputs = "2x4x16x64;2x500x1x64;2x500x1x32;2x4x1x128"
    row = {
        "case": "cb/sparse_flash_attention/1",
        "operator": "",
        "inputs": inputs,
        "dtype": "fp16;fp16;fp16;int32",
        "attributes": "layout=BSND;selected=128",
    }
    found = one(tmp_path, **row)
    assert found.model_s > found.bound_s > 0
    alone = ((8, 16, 64), (1, 128, 64), (1, 128, 32))
    products = ops.time("flash_attention", alone, ("fp16",) * 3, B2)
    first_s = 64 * (10 + math.ceil(128 / 60.2)) / B2.clock_hz  # half of the rows, 128 bytes each
    assert products.task_s + first_s < found.model_s < products.task_s + first_s + 0.3e-6
    again = {**row, "inputs": inputs.replace("x128", "x256")}
    assert one(tmp_path, **again).model_s > found.model_s
    sliced = {**row, "kernels": "Slice*4+SparseFlashAttention"}
    turned = {**row, "kernels": "Transpose*2+SparseFlashAttention"}
    starts_s = B2.queued_launch_s
    assert one(tmp_path, **sliced).model_s > found.model_s + 4 * starts_s
    assert one(tmp_path, **turned).model_s > found.model_s + 2 * starts_s
    assert "4 inputs" in one(tmp_path, **{**row, "inputs": "2x4x16x64"}).refused


def test_blocks_of_512_rows_are_dealt_whole(tmp_path: Path) -> None:
    """32 blocks on 24 cores take two turns: as long as on 16. A warm row is no library's."""
    shape = (4, 8, 500, 128)
    row = {"operator": "flash_attention", "inputs": ";".join(["4x8x500x128"] * 3)}
    found = one(tmp_path, **row)
    fewer = replace(B2, core_count=16)
    line = ops.time("flash_attention", (shape,) * 3, ("fp16",) * 3, fewer)
    assert attention.tiling_read_s(B2) == READ_S
    assert found.model_s == pytest.approx(line.task_s + READ_S)
    assert attention.LIBRARY in found.marks
    by_hand = one(tmp_path, **row, l2="warm")
    assert by_hand.model_s < found.model_s and attention.LIBRARY not in by_hand.marks


def test_a_mistake_of_ours_stops_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object, **attributes: object) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(ops, "compile", fails)
    found = compare(table(tmp_path, {}, {"operator": ""}))
    assert "mistake of ours" in found.rows[0].refused and "operator" in found.rows[1].refused


def test_equal_work_is_timed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    written = ops.compile
    monkeypatch.setattr(ops, "compile", lambda *a, **k: seen.append(a) or written(*a, **k))
    rows = compare(table(tmp_path, {}, {"measured_us": "20"}, {"dtype": "fp32"}, {})).rows
    assert len(seen) == 2
    assert rows[0].model_s == rows[1].model_s and rows[0].error > rows[1].error


# -- groups ----------------------------------------------------------------------------------------
def test_groups_say_bias_and_spread() -> None:
    def row(model_s: float | None, bound_s: float = 0.5) -> Compared:
        return Compared("x", "g", 1.0, model_s, bound_s if model_s else None)

    group = group_of("g", [row(2.0), row(0.5), row(1.0, 1.5), row(None)])
    assert (group.rows, group.timed, group.below_bound) == (4, 3, 1)
    assert group.bias == pytest.approx(0.0)  # twice and half cancel
    assert group.median == pytest.approx(0.5)
    assert group.p90 == pytest.approx(0.9)
    empty = group_of("g", [row(None)])
    assert (empty.timed, empty.bias, empty.median, empty.p90) == (0, None, None, None)


# -- profiles --------------------------------------------------------------------------------------
def test_a_profile_is_read_row_by_row() -> None:
    found = compare(DATA / "op_summary.csv", B2)
    dense, add, total, turn, conv, host, reduce = found.rows
    line = ops.time("matmul", ((1024, 512), (2048, 512)), ("fp16", "fp16"), B2, trans_b=True)
    assert dense.model_s == pytest.approx(line.task_s)
    assert dense.measured_s == pytest.approx(31.5e-6)
    assert dense.busy == {"AIC.M": 0.41, "AIC.MTE2": 0.83}
    assert {"M", "MTE2"} <= set(dense.model_busy)
    line = ops.time("add", ((1024, 2048), (1,)), ("fp16", "fp16"), B2)
    assert add.model_s == pytest.approx(line.task_s)  # a scalar has no sizes
    line = ops.time("reduce_sum", ((1024, 2048),), ("fp32",), B2, axis=(1,), keepdims=True)
    assert total.model_s == pytest.approx(line.task_s)
    for row, word in (
        (turn, "one permutation"),
        (conv, "a format"),
        (host, "AI_CPU"),
        (reduce, "HCCL"),
    ):
        assert word in row.refused, row
    assert [group.group for group in found.groups()][:2] == ["MatMulV2", "Add"]


def test_heads_in_uneven_groups_and_unknown_collectives_are_named(tmp_path: Path) -> None:
    heads = one(tmp_path, operator="flash_attention", inputs="2x8x64x64;2x3x64x64;2x3x64x64")
    assert "heads of q" in heads.refused and "8 and 3" in heads.refused
    words = {"operator": "all_gather", "inputs": "bytes=1048576", "attributes": "ranks=8"}
    gathered = one(tmp_path, chip="", **words)
    assert "all_reduce and all_to_all" in gathered.refused and "all_gather" in gathered.refused


def test_what_follows_from_shapes_is_read_and_what_does_not_is_refused() -> None:
    half = ("fp16",) * 3

    def read(kind: str, shapes: tuple, output: tuple | None) -> tuple[str, dict, tuple]:
        found = reading(Task(kind, shapes, half[: len(shapes)], output, ""))
        return found.operator, dict(found.attributes), found.marks

    square = ((64, 64), (64, 64))
    name, attributes, marks = read("MatMulV3", square, (64, 64))
    assert (name, attributes) == ("matmul", {}) and "transposes" in marks[0]
    assert read("MatMulV3", ((8, 64), (32, 64)), (8, 32))[1] == {"trans_b": True}
    assert read("MatMul", ((8, 64), (64, 32), (32,)), (8, 32))[2] == ("the bias is left out",)
    turned = read("Transpose", ((2, 3, 4),), (4, 2, 3))
    assert turned[1] == {"perm": (2, 0, 1)}
    assert read("ReduceMaxD", ((2, 3, 4),), (2, 4))[1] == {"axis": (1,), "keepdims": False}
    assert "last" in read("SoftmaxV2", ((2, 3),), (2, 3))[2][0]
    assert read("RmsNorm", ((2, 3), (3,)), (2, 3))[0] == "rms_norm"
    for kind, shapes, output in (
        ("MatMul", ((8, 64), (63, 32)), (8, 32)),
        ("MatMul", ((8, 64),), (8, 32)),
        ("Transpose", ((4, 4),), (4, 4)),
        ("Transpose", ((2, 3),), None),
        ("ReduceSum", ((4, 4),), (4,)),
        ("RmsNorm", ((2, 3), (2,)), (2, 3)),
        ("Conv2D", ((1, 16, 8, 8), (16, 16, 3, 3)), None),
        ("FusedInferAttentionScore", ((1, 2, 3, 4),) * 3, None),
        ("MyOwnKernel", ((2, 3),), (2, 3)),
    ):
        with pytest.raises(InputError):
            read(kind, shapes, output)


# -- the command -----------------------------------------------------------------------------------
def test_the_command_answers_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, "compare", DATA / "measured.csv")
    keys = {"case", "group", "measured_s", "model_s", "bound_s", "error", "refused"}
    assert all(keys <= row.keys() for row in data["rows"])
    keys = {"group", "rows", "timed", "bias", "median", "p90", "below_bound"}
    assert all(keys == group.keys() for group in data["groups"])
    assert len(data["rows"]) == sum(group["rows"] for group in data["groups"]) == 7
    for row in data["rows"]:
        assert (row["refused"] is None) == (row["error"] is not None)
        if row["error"] is not None:
            assert row["error"] == pytest.approx(row["model_s"] / row["measured_s"] - 1)
    (refusal,) = (row for row in data["rows"] if row["refused"])
    assert refusal["case"] == "mine/window" and "window=256" in refusal["refused"]


def test_the_command_draws_and_says_what_it_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = tmp_path / "compared.svg"
    code, out, err = run(capsys, "compare", DATA / "measured.csv", "--figure", figure)
    assert (code, err) == (0, "")
    assert "refused: flash_attention" in out and "below bound" in out
    svg = figure.read_text("utf-8")
    assert svg.startswith("<svg") and 'role="img"' in svg
    assert "<title>Model over measured times of measured.csv" in svg and "gemm: 2 rows" in svg
    nothing = table(tmp_path, {"operator": ""})
    code, out, err = run(capsys, "compare", nothing, "--figure", figure)
    assert (code, err) == (1, "")
    assert "no row is timed" in out
    assert f"{figure}: the figure" in out
    assert "No row is timed" in figure.read_text("utf-8")


def test_a_chip_of_ones_own_takes_the_rows_that_name_it_or_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chip = tmp_path / "half.toml"
    count = 'count = { value = 12, source = "TEAM", trust = "assumed" }'
    chip.write_text(
        'base = "Ascend910B2"\nname = "Half"\nsummary = "half"\ncombined = false\n'
        f"[core]\n{count}\n",
        "utf-8",
    )
    rows = [{"chip": name, "inputs": "4096x4096;4096x4096"} for name in ("Half", "", "Ascend910B2")]
    data = run_json(capsys, "compare", table(tmp_path, *rows), "--chip", chip)["rows"]
    assert data[0]["model_s"] == data[1]["model_s"]
    assert all(row["refused"] is None for row in data)


def test_a_file_that_is_too_large_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ascend_lab.compare.ROWS", 3)
    assert "at most 3" in refused(capsys, "compare", table(tmp_path, *[{}] * 4))
    monkeypatch.setattr("ascend_lab.compare.TABLE_BYTES", 100)
    assert "at most 100 bytes" in refused(capsys, "compare", table(tmp_path, {}))
