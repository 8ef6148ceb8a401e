"""`ascend-lab plan-memory` and its CSV form: the contract, exit codes, and every bad file."""

import json
from contextlib import suppress

from hypothesis import given, settings, strategies as st

from ascend_lab.cli import ascend_lab as main
from ascend_lab.compiler import memory_file as table
from ascend_lab.compiler.memory import Buffer, Plan, verify
from ascend_lab.compiler.memory_file import read_csv
from ascend_lab.data import data_path
from ascend_lab.errors import InputError

SAMPLE = data_path("minimalloc/example.input.12.csv")
KEYS = {"height_bytes", "lower_bound_bytes", "capacity_bytes", "fits", "gap", "method", "offsets"}


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main(["plan-memory", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_json_keeps_the_contract(capsys):
    code, out, err = run(capsys, SAMPLE, "--capacity", 12, "--time-limit", 5, "--json", "-")
    data = json.loads(out)
    assert (code, err) == (0, "")
    assert data.keys() >= KEYS
    assert (data["height_bytes"], data["lower_bound_bytes"], data["fits"]) == (12, 12, True)
    verify(Plan(data["offsets"], 12, 12, data["method"], True), read_csv(SAMPLE))


def test_a_plan_that_does_not_fit_says_so_and_is_still_given(capsys):
    code, out, _ = run(capsys, SAMPLE, "--capacity", 11)
    assert code == 1
    assert "NOT packed into the capacity of 11" in out
    code, out, _ = run(capsys, SAMPLE, "--capacity", 11, "--json", "-")
    data = json.loads(out)
    assert (code, data["fits"], data["height_bytes"]) == (1, False, 12)


def test_alignment_method_and_file_are_used(capsys, tmp_path):
    target = tmp_path / "plan.json"
    arguments = ("--alignment", 512, "--method", "greedy-by-start", "--json", target)
    code, out, _ = run(capsys, SAMPLE, *arguments)
    data = json.loads(target.read_text("utf-8"))
    assert (code, out, data["method"], data["height_bytes"]) == (0, "", "greedy-by-start", 1536)
    assert all(offset % 512 == 0 for offset in data["offsets"].values())


def test_files_that_are_absent_huge_long_or_no_text(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(table, "MAX_FILE_BYTES", 1000)
    monkeypatch.setattr(table, "MAX_ROWS", 3)
    huge, long, noise = (tmp_path / name for name in ("huge", "long", "noise"))
    huge.write_text("id,lower,upper,size\n" * 100)
    long.write_text("id,lower,upper,size\n" + "".join(f"{k},0,1,1\n" for k in range(4)))
    noise.write_bytes(bytes(range(256)))
    for file in (tmp_path / "absent", tmp_path, huge, long, noise):
        code, out, err = run(capsys, file)
        assert (code, out, err.count("\n")) == (2, "", 1)


@settings(max_examples=100)
@given(st.binary(max_size=120))
def test_noise_is_read_or_refused(tmp_path_factory, data):
    file = tmp_path_factory.getbasetemp() / "noise.csv"
    file.write_bytes(b"id,lower,upper,size\n" + data)
    with suppress(InputError):  # any other error fails the test
        assert all(b.upper > b.lower and b.size_bytes >= 0 for b in read_csv(file))


def test_csv_keeps_odd_names_and_any_column_order(tmp_path):
    file = tmp_path / "b.csv"
    buffers = [Buffer('x, "y"', -3, 4, 0), Buffer("z", 0, 1, 7)]
    file.write_text('id,lower,upper,size\n"x, ""y""",-3,4,0\nz,0,1,7\n')
    assert read_csv(file) == buffers
    file.write_text("size,id,upper,lower\r\n7,z,1,0\r\n")
    assert read_csv(file) == buffers[1:]
