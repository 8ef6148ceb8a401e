"""The cluster verbs against small computations of their own, and what they must refuse."""

import itertools
import json

import pytest
from command_lines import refused, run_json

from ascend_lab.cli.cluster import parse_bytes
from ascend_lab.errors import InputError

# -- collective -----------------------------------------------------------------------------------


def at(size, topology):
    return ("--bytes", size, "--topology", topology)


@pytest.mark.parametrize("op", ["allreduce", "all-reduce", "all_reduce"])
def test_json_has_what_is_promised(capsys, op):
    found = run_json(capsys, "collective", "--op", op, "--algorithm", "ring", *at("1e6", "star:4"))
    assert found["op"] == "all_reduce" and found["algorithm"] == "ring" and found["ranks"] == 4
    assert found["steps"] == 6 and found["bytes"] == 1e6
    expected_s = 6 * (5e-6 + 1e6 / 4 * 1e-10)
    assert found["time_s"] == pytest.approx(expected_s)
    assert found["algorithm_bandwidth"] == pytest.approx(1e6 / expected_s)
    assert found["bus_bandwidth"] == pytest.approx(1e6 / expected_s * 2 * 3 / 4)
    assert 0 < found["lower_bound_s"] <= found["time_s"]


def test_auto_takes_the_quickest(capsys):
    arguments = ("collective", "--op", "allreduce", *at("64M", "910b-roce:16"))
    found = run_json(capsys, *arguments)
    assert found["bytes"] == 64 * 2**20
    assert found["time_s"] == min(found["candidates"].values())
    assert found["candidates"][found["algorithm"]] == found["time_s"]
    again = run_json(capsys, *arguments, "--algorithm", found["algorithm"])
    assert again["time_s"] == found["time_s"] and "candidates" not in again


def test_fewer_ranks_another_root_and_nothing_to_move(capsys):
    options = ("--ranks", "4", "--root", "3")
    assert (
        run_json(capsys, "collective", "--op", "reduce", *at("8", "910a-server"), *options)["ranks"]
        == 4
    )
    for size, topology in (("0", "star:4"), ("1e9", "star:1")):
        found = run_json(capsys, "collective", "--op", "allreduce", *at(size, topology))
        assert found["time_s"] == found["algorithm_bandwidth"] == found["steps"] == 0


SIZES = {"0": 0, "1e6": 1e6, "64M": 2**26, "1.5k": 1536, "2GiB": 2**31, "3GB": 3e9, "7b": 7}


def test_sizes():
    assert {text: parse_bytes(text) for text in SIZES} == SIZES
    for text in ("", "-1", "M", "1.2.3", "1e30", "nan", "inf", "5X", "1e999"):
        with pytest.raises(InputError, match="bytes from 0"):
            parse_bytes(text)


# -- fit-collective -------------------------------------------------------------------------------
def table(file, sizes, ranks):
    """Write a table that follows the ring law, with less alpha and more beta below 1 MB."""
    lines = ["bytes,ranks,time_s"]
    for n, p in itertools.product(sizes, ranks):
        alpha_s, beta = (3e-6, 2e-10) if n < 1e6 else (3e-5, 1e-10)
        lines.append(f"{n!r},{p},{2 * (p - 1) * alpha_s + 2 * (p - 1) / p * n * beta!r}")
    file.write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    return file


def test_too_many_rows_are_refused(capsys, tmp_path):
    sizes = [float(n) for n in range(1000, 2001)]
    assert "at most 2000 rows; got 2002" in refused(
        capsys, "fit-collective", table(tmp_path / "long.csv", sizes, [2, 4])
    )


# -- strategy -------------------------------------------------------------------------------------
def test_costs_written_as_floats_are_whole_numbers(capsys, tmp_path):
    file = tmp_path / "floats.json"
    nodes = {"intervals": [[0, 1]], "costs": [[1e18, 7.0]], "usages": [[1, 1]]}
    file.write_text(json.dumps({"problem": {"nodes": nodes, "edges": {"nodes": [], "costs": []}}}))
    assert run_json(capsys, "strategy", file)["strategies"] == [1]


# -- gradient-plan --------------------------------------------------------------------------------
COST = ("--alpha-us", 10, "--beta-us-per-byte", 0.01)


def test_shares_of_bytes_do_not_beat_the_plan_by_mixing_formats(capsys, tmp_path):
    file = tmp_path / "mixed.csv"
    rows = ["a,0,100000,fp16", "b,1,4,fp32", "c,2,100000,fp16"]  # b's share rounds to nothing
    file.write_text("\n".join(["name,ready_us,bytes,dtype", *rows]))
    found = run_json(capsys, "gradient-plan", file, *COST)
    assert found["segments"] == [[0, 0], [1, 1], [2, 2]]
    assert found["forms"]["hccl"]["by_size_end_us"] >= found["end_us"]


def test_a_trace_with_true_for_a_count_is_refused(capsys, tmp_path):
    file = tmp_path / "trace.json"
    args = {"Collective name": "allreduce", "In msg nelems": True, "dtype": "Float"}
    file.write_text(json.dumps([{"ph": "X", "ts": 1, "name": "x", "args": args}]))
    assert "In msg nelems as a whole number" in refused(capsys, "gradient-plan", file, *COST)


def test_a_table_of_many_sizes_is_fitted(capsys, tmp_path):
    sizes = [float(round(1e3 * 10 ** (i / 20))) for i in range(121)]
    found = run_json(capsys, "fit-collective", table(tmp_path / "many.csv", sizes, [2, 8]))
    low = found["bands"][0]
    high = found["bands"][-1]
    assert low["alpha_s"] == pytest.approx(3e-6, rel=0.02)
    assert high["beta_s_per_byte"] == pytest.approx(1e-10, rel=0.02)
    assert found["rows"] == 242 and 0 <= found["held_out_mape"] < 0.05
