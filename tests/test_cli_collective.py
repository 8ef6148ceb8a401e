"""`ascend-lab collective`."""

import json

import pytest

from ascend_lab.cli import ascend_lab as main
from ascend_lab.cli.cluster import parse_bytes
from ascend_lab.errors import InputError


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["collective", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("op", ["allreduce", "all-reduce", "all_reduce"])
def test_json_has_what_is_promised(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "--op", op, "--algorithm", "ring", *at("1e6", "star:4"), "--json", "-"
    )
    found = json.loads(out)
    assert code == 0
    assert found["op"] == "all_reduce" and found["algorithm"] == "ring" and found["ranks"] == 4
    assert found["steps"] == 6 and found["bytes"] == 1e6
    expected_s = 6 * (5e-6 + 1e6 / 4 * 1e-10)
    assert found["time_s"] == pytest.approx(expected_s)
    assert found["algorithm_bandwidth"] == pytest.approx(1e6 / expected_s)
    assert found["bus_bandwidth"] == pytest.approx(1e6 / expected_s * 2 * 3 / 4)
    assert 0 < found["lower_bound_s"] <= found["time_s"]


def at(size: str, topology: str) -> tuple[str, ...]:
    return ("--bytes", size, "--topology", topology)


def test_auto_takes_the_quickest(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--op", "allreduce", *at("64M", "910b-roce:16"), "--json", "-")
    found = json.loads(run(capsys, *arguments)[1])
    assert found["bytes"] == 64 * 2**20
    assert found["time_s"] == min(found["candidates"].values())
    assert found["candidates"][found["algorithm"]] == found["time_s"]
    again = json.loads(run(capsys, *arguments, "--algorithm", found["algorithm"])[1])
    assert again["time_s"] == found["time_s"] and "candidates" not in again


def test_the_table_has_a_row_for_each_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--op", "alltoall", *at("1MB", "910a-server"))
    assert code == 0
    for name in ("mesh", "pairwise", "bruck", "no schedule is faster"):
        assert name in out
    code, out, _ = run(capsys, "--op", "broadcast", *at("1MB", "star:8"), "--algorithm", "tree")
    assert "tree" in out and "chain" not in out


def test_fewer_ranks_and_another_root(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--ranks", "4", "--root", "3", "--json", "-")
    found = json.loads(run(capsys, "--op", "reduce", *at("8", "910a-server"), *options)[1])
    assert found["ranks"] == 4


def test_nothing_to_move(capsys: pytest.CaptureFixture[str]) -> None:
    for size, topology in (("0", "star:4"), ("1e9", "star:1")):
        arguments = ("--op", "allreduce", *at(size, topology), "--json", "-")
        found = json.loads(run(capsys, *arguments)[1])
        assert found["time_s"] == found["algorithm_bandwidth"] == found["steps"] == 0


SIZES = {"0": 0, "1e6": 1e6, "64M": 2**26, "1.5k": 1536, "2GiB": 2**31, "3GB": 3e9, "7b": 7}


@pytest.mark.parametrize(("text", "size_bytes"), SIZES.items())
def test_sizes(text: str, size_bytes: float) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "-1", "M", "1.2.3", "1e30", "nan", "inf", "5X", "1e999"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match="bytes from 0"):
        parse_bytes(text)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--op", "sum", *at("1", "star:4")),
        ("--op", "allreduce", "--algorithm", "magic", *at("1", "star:4")),
        ("--op", "allreduce", *at("1", "nowhere")),
        ("--op", "allreduce", *at("many", "star:4")),
        ("--op", "reduce", "--root", "4", *at("1", "star:4")),
        ("--op", "allreduce", "--root", "3", *at("1", "star:4")),
        ("--op", "reduce", "--ranks", "5", *at("1", "star:4")),
        (
            "--op",
            "allreduce",
            "--algorithm",
            "hierarchical",
            "--ranks",
            "12",
            *at("1", "910b-roce:16"),
        ),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2 and not out and err.count("\n") == 1 and err.startswith("ascend-lab: ")
