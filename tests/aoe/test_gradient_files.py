"""Profiles from files, plans in the forms of frameworks, and the verb `gradient-plan`."""

import gzip
import json
import math
from dataclasses import replace

import pytest
from gradient_cases import costs, profiles, rows_of
from hypothesis import given, settings, strategies as st

from ascend_lab.aoe.gradient import AlphaBeta, Gradient, end_of, plan
from ascend_lab.aoe.gradient.planning import by_size, forms_of, split_by_size
from ascend_lab.aoe.gradient.readers import read_profile
from ascend_lab.cli import ascend_lab as main
from ascend_lab.errors import InputError

CSV = "name,ready_us,bytes\nfc,0,1000\nconv,2.5,300\n"


def written(folder, text, name="p.csv"):
    file = folder / name
    file.write_text(text, "utf-8")
    return file


def test_a_table_is_read(tmp_path):
    rows = read_profile(written(tmp_path, "﻿" + CSV + "\n# a remark\n"))
    assert rows == (Gradient("fc", 0.0, 1000), Gradient("conv", 2.5e-6, 300))
    text = "gradient_size(byte),data_type,graph_id,gradient_node_name,ready_us\n8,fp32,1,a/grad,1\n"
    assert read_profile(written(tmp_path, text)) == (Gradient("a/grad", 1e-6, 8, "fp32"),)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("none.csv", None, "No such file"),
        ("latin.csv", b"name,ready_us,bytes\n\xe9,1,1\n", "UTF-8"),
        ("t.json.gz", b"no gzip", "JSON"),
        ("t.json", b"{", "JSON"),
        ("t.json", b"3", "Chrome trace"),
        ("t.json", b'{"rows": []}', r"key traceEvents .* got an object with the keys rows"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, data, message):
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=message):
        read_profile(tmp_path / name)


def test_the_bank_of_the_published_tuner_is_read(tmp_path):
    value = {"gradientTime": [777, 1000, 2000], "gradientSize": [4, 8, 0]}
    file = written(tmp_path, json.dumps([{"modelhash": "1", "modelvalue": value}]), "g.json")
    found = read_profile(file)
    assert [g.ready_s for g in found] == pytest.approx([0.0, 1e-6, 3e-6])
    assert [g.size_bytes for g in found] == [4, 8, 0]
    value["gradientSize"] = [1]
    with pytest.raises(InputError, match="of one length"):
        read_profile(written(tmp_path, json.dumps([{"modelvalue": value}]), "g.json"))
    falling = {"gradientSize": [1, 2, 3], "gradientTime": [5, 9, -1]}
    with pytest.raises(InputError, match="gradient 2: a gradientTime of at least 0"):
        read_profile(written(tmp_path, json.dumps([{"modelvalue": falling}]), "g.json"))
    value |= {"gradientSize": [1, None, 2]}
    with pytest.raises(InputError, match="gradient 1: gradientSize as a number"):
        read_profile(written(tmp_path, json.dumps([{"modelvalue": value}]), "g.json"))


# -- traces ----------------------------------------------------------------------------------------
def event(name, ts, dur=1.0, cat="cpu_op", **args):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "args": args}


def reduce_event(ts, count, cat="cpu_op", dtype="Float"):
    args = {"Collective name": "allreduce", "In msg nelems": count, "dtype": dtype}
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL" if cat == "kernel" else "record_param_comms"
    return event(name, ts, 5.0, cat, **args)


def accumulate(ts, shape, dur=2.0):
    dims = {"Input Dims": [shape], "Input type": ["float"]}
    return event("torch::autograd::AccumulateGrad", ts, dur, **dims)


HOST = [
    event("ProfilerStep#3", 0, 1000, "user_annotation"),
    accumulate(100, [9, 9]),
    event("ProfilerStep#4", 1000, 1000, "user_annotation"),
    event("autograd::engine::evaluate_function: AddmmBackward0", 1100, 50),
    reduce_event(1165, 30),
    accumulate(1150, [10, 2]),
    accumulate(1120, [10]),
    {"ph": "i", "name": "mark", "ts": 3},
]


def trace_rows(folder, events):
    rows = read_profile(written(folder, json.dumps({"traceEvents": events}), "t.json"))
    return [(round(g.ready_s * 1e6, 3), g.size_bytes, g.dtype) for g in rows]


def test_on_the_host_gradients_are_done_when_they_are_accumulated(tmp_path):
    assert trace_rows(tmp_path, HOST) == [(22.0, 40, "fp32"), (52.0, 80, "fp32")]
    packed = gzip.compress(json.dumps(HOST).encode())  # a bare list of events is a trace too
    (tmp_path / "t.json.gz").write_bytes(packed)
    names = [g.name for g in read_profile(tmp_path / "t.json.gz")]
    assert names == ["gradient 0 10", "gradient 1 10x2"]


def test_without_shapes_the_all_reduces_of_the_host_count(tmp_path):
    bare = [e for e in HOST if "Accumulate" not in e["name"]]
    assert trace_rows(tmp_path, bare) == [(65.0, 120, "fp32")]
    alone = [reduce_event(50, 2, dtype="c10::BFloat16"), reduce_event(70, 4, dtype="Half")]
    assert trace_rows(tmp_path, alone) == [(0.0, 4, "bf16"), (20.0, 8, "fp16")]


def test_on_a_device_its_own_kernels_count(tmp_path):
    device = [
        *HOST,
        event("ProfilerStep#3", 20, 1000, "gpu_user_annotation"),
        event("ProfilerStep#4", 1120, 1000, "gpu_user_annotation"),
        reduce_event(1110, 77, "kernel"),  # of the step before: the device is behind
        reduce_event(1300, 10, "kernel"),
        reduce_event(1400, 20, "kernel"),
        event("gemm", 1290, 3, "kernel"),
    ]
    rows = trace_rows(tmp_path, device)
    assert [size for _, size, _ in rows] == [40, 80]
    assert rows[1][0] - rows[0][0] == 100.0


def test_traces_of_older_releases_have_shapes_only(tmp_path):
    older = {"Input Dims": [[8, 4]], "Input type": ["c10::Half"]}
    undefined = {"Input Dims": [[]], "Input type": [""]}
    events = [
        event("ncclKernel_AllReduce_RING_LL_Sum_half", 60, 5, "kernel"),
        event("nccl:all_reduce", 50, 1, "user_annotation", **older),
        event("nccl:all_reduce", 55, 1, "user_annotation"),
        accumulate(40, [3]),
        event("torch::autograd::AccumulateGrad", 41, **undefined),
    ]
    assert trace_rows(tmp_path, events) == [(0.0, 64, "fp16")]
    assert trace_rows(tmp_path, events[3:]) == [(0.0, 12, "fp32")]


SHAPES = ([8, 8], [8], [8, 8], [8])
"""Of a model of two equal layers: the row of its gradients repeats itself."""
ONE_STEP = [(256, "fp32"), (32, "fp32"), (256, "fp32"), (32, "fp32")]


def recorded(steps, passes=1, shapes=SHAPES, optimiser=True, forward=True, backward=True):
    """Events of some steps of so many backward passes, as a CPU records them."""
    events = []
    now = 100.0
    for _ in range(steps):
        for _ in range(passes):
            if forward:
                events.append(event("aten::linear", now, 40))
            now += 60
            for shape in shapes:
                if backward:
                    events.append(event(f"autograd::engine::evaluate_function: {shape}", now, 8))
                    events.append(event("aten::mm", now + 1, 2))  # inside: no forward pass
                events.append(accumulate(now + 4, shape))
                now += 50
        if optimiser:
            events.append(event("Optimizer.step#SGD.step", now, 30, "user_annotation"))
        now += 50
    return events


@pytest.mark.parametrize("optimiser", [True, False])
@pytest.mark.parametrize(("steps", "passes"), [(1, 1), (3, 1), (1, 3), (2, 2)])
def test_steps_without_marks_are_told_apart(tmp_path, steps, passes, optimiser):
    rows = trace_rows(tmp_path, recorded(steps, passes, optimiser=optimiser))
    assert [row[1:] for row in rows] == ONE_STEP
    assert rows[0][0] == 6.0  # from the first backward function of its own pass


def test_a_marked_step_of_several_passes_is_one_pass(tmp_path):
    marks = [event("ProfilerStep#0", 50, 3000, "user_annotation")]
    rows = trace_rows(tmp_path, marks + recorded(3))
    assert [row[1:] for row in rows] == ONE_STEP


def test_a_recording_that_ends_in_a_pass_gives_the_last_whole_one(tmp_path):
    events = [e for e in recorded(3, optimiser=False) if e["ts"] < 700]
    rows = trace_rows(tmp_path, events)
    assert [row[1:] for row in rows] == ONE_STEP


def test_passes_that_cannot_be_told_apart_are_refused(tmp_path):
    silent = recorded(3, optimiser=False, forward=False, backward=False)
    with pytest.raises(InputError, match="schedule"):
        trace_rows(tmp_path, silent)
    assert len(trace_rows(tmp_path, recorded(3, forward=False, backward=False))) == len(SHAPES)
    two_networks = [*recorded(1, shapes=SHAPES)]
    late = recorded(1, shapes=([3],))
    two_networks += [{**e, "ts": e["ts"] + 1000} for e in late]
    mark = [event("ProfilerStep#0", 50, 3000, "user_annotation")]
    with pytest.raises(InputError, match="same gradients"):
        trace_rows(tmp_path, mark + two_networks)


@pytest.mark.parametrize("dims", [None, ["x"], [[-3]], [[8, "8"]]])
def test_a_gradient_without_a_shape_is_not_left_out(tmp_path, dims):
    events = recorded(1)
    silent = next(e for e in events if "Accumulate" in e["name"])
    silent["args"] = {"Input type": ["float"]} | ({} if dims is None else {"Input Dims": dims})
    with pytest.raises(InputError, match="Input Dims"):
        trace_rows(tmp_path, events)


def test_kernels_of_a_device_go_by_the_passes_of_the_host(tmp_path):
    host = recorded(3)
    late = [reduce_event(3000 + 10 * k, 8 + k % 2, "kernel") for k in range(6)]
    assert len(trace_rows(tmp_path, host[:-1] + late)) == 2
    host = recorded(3, optimiser=False)
    assert len(trace_rows(tmp_path, host + late)) == 2
    with pytest.raises(InputError, match="marks of steps"):
        trace_rows(tmp_path, host + late[:-1])


def test_traces_without_gradients_say_what_is_missing(tmp_path):
    for events in ([], [event("aten::mm", 1)], [1, None, {"ph": "X", "ts": "x"}]):
        with pytest.raises(InputError, match="record_shapes"):
            trace_rows(tmp_path, events)
    with pytest.raises(InputError, match="number format"):
        trace_rows(tmp_path, [reduce_event(1, 2, dtype="Quaternion")])
    with pytest.raises(InputError, match="In msg nelems"):
        trace_rows(tmp_path, [reduce_event(1, -2)])


# -- forms -----------------------------------------------------------------------------------------
@given(profiles(most=30), costs())
def test_forms_say_the_same_as_the_plan(rows, cost):
    found = plan(rows, cost)
    forms = forms_of(found, rows, cost)
    assert len(forms.hccl.segments) <= 8
    assert forms.by_idx[-1] == len(rows) - 1
    assert list(forms.by_idx) == sorted(set(forms.by_idx))
    assert [*forms.mindspore, len(rows) - 1] == [last for _, last in found.segments]
    assert sum(forms.by_size) == math.fsum(forms.by_size) == 100
    assert 1 <= len(forms.by_size) <= len(forms.by_idx)
    assert all(share > 0 for share in forms.by_size)
    assert forms.hccl.end_s >= found.end_s * (1 - 1e-12)
    assert forms.ddp_end_s == end_of(forms.ddp_segments, rows, cost)
    assert forms.ddp_end_s >= found.end_s * (1 - 1e-12)


def test_forms_follow_the_published_examples():
    rows = rows_of([0] * 160, [1] * 160)
    found = plan(rows, AlphaBeta(1, 1))
    published = replace(found, segments=((0, 20), (21, 100), (101, 159)))
    forms = forms_of(published, rows, AlphaBeta(1, 1))
    assert set(forms.as_dict()) == {"hccl", "mindspore", "pytorch"}
    assert (forms.by_idx, forms.mindspore) == ((20, 100, 159), (20, 100))
    assert by_size(((0, 95), (96, 127), (128, 159)), rows) == (60.0, 20.0, 20.0)
    assert split_by_size((60, 20, 20), rows) == ((0, 95), (96, 127), (128, 159))


@settings(max_examples=100)
@given(st.lists(st.integers(1, 1000), min_size=2, max_size=40), st.data())
def test_shares_of_large_gradients_lead_back_to_the_segments(sizes, data):
    rows = rows_of([0.0] * len(sizes), [1000 + size for size in sizes])
    cuts = data.draw(st.sets(st.integers(0, len(sizes) - 2), max_size=7))
    lasts = [*sorted(cuts), len(sizes) - 1]
    split = tuple(zip([0, *(n + 1 for n in lasts[:-1])], lasts, strict=True))
    assert split_by_size(by_size(split, rows), rows) == split


# -- the verb --------------------------------------------------------------------------------------

PRICE = ["--alpha-us", "1", "--beta-us-per-byte", "1"]


def test_the_verb_answers_in_json(tmp_path, capsys):
    file = written(tmp_path, "name,ready_us,bytes\na,0,10\nb,0.9,0\nc,1.8,0\n")
    assert main(["gradient-plan", str(file), *PRICE, "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["segments"] == [[0, 0], [1, 2]]
    assert data["end_us"] == pytest.approx(12.0)
    assert data["optimal"] is True
    assert data["baselines"]["mg_wfbp"] == pytest.approx(12.8)
    assert data["forms"]["hccl"]["set_split_strategy_by_idx"] == [0, 2]
    assert "scenario" not in data
    assert main(["gradient-plan", str(file), *PRICE, "--max-segments", "1", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["segments"] == [[0, 2]]


def test_the_table_says_what_limits_and_small_sizes_mean(tmp_path, capsys):
    file = written(tmp_path, CSV + "scale,5,0\n")
    price = ("--alpha-us", "0.001", "--beta-us-per-byte", "0.0001")
    assert main(["gradient-plan", str(file), *price, "--max-bytes", "100"]) == 0
    out = capsys.readouterr().out
    assert "2 gradients are larger than 100 bytes: each is a segment by itself" in out
    assert "optimal (among splits into segments of at most 100 bytes)" in out
    assert "smaller than any useful cap" in out
    assert ", 0.0]" not in out
    assert "1 segments too small for a share are joined with a neighbour" in out
    assert "segments larger than asked" not in out
    many = CSV + "".join(f"g{i},9,200\n" for i in range(9))
    file = written(tmp_path, many, "many.csv")
    assert main(["gradient-plan", str(file), *price, "--max-bytes", "100"]) == 0
    out = capsys.readouterr().out
    assert "11 gradients in 11 segments" in out
    assert "# segments larger than asked: HCCL takes 8" in out
    assert main(["gradient-plan", str(file), *PRICE]) == 0
    assert "optimal (among all splits)" in capsys.readouterr().out
