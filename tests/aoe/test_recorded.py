"""Recorded spaces: what a file must be, and what replaying a search on one gives."""

import gzip
import json
import math

import numpy as np
import pytest

from ascend_lab.aoe.recorded import read_recorded, recorded, replay
from ascend_lab.aoe.search import SEARCHES
from ascend_lab.cli import solve as cli_replay
from ascend_lab.cli.verbs import run
from ascend_lab.data import data_path
from ascend_lab.errors import InputError

FOLDER = data_path("autotune_bruteforce/README.md").parent
SMALL = "a,b,time_ms\n1,2,3.5\n1,4,\n2,2,1.25\n2,8,2\n"


@pytest.mark.parametrize(
    ("name", "size", "optimum", "close"),
    [
        ("conv2d_A100", 4362, 0.5536, 1),
        ("dedispersion_MI250X", 11130, 49.5725, 19),
        ("gemm_RTX_3090", 17956, 5.65784, 6),
    ],
)
def test_the_three_recorded_spaces(name, size, optimum, close):
    found = read_recorded(FOLDER / f"{name}.csv.gz")
    assert (found.space.size, found.optimum) == (size, optimum)
    assert np.sum(found.costs <= 1.05 * optimum) == close
    rows = gzip.decompress((FOLDER / f"{name}.csv.gz").read_bytes()).decode().split()
    for row in rows[1 :: size // 50]:
        *point, time_ms = (float(cell or "inf") for cell in row.split(","))
        assert found.costs[found.space.row(tuple(point))] == time_ms


def test_plain_and_gzipped_files_and_failures(tmp_path):
    (tmp_path / "a.csv").write_text(SMALL)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(SMALL.replace("\n", "\r\n").encode()))
    one, two = (read_recorded(tmp_path / f) for f in ("a.csv", "a.csv.gz"))
    assert one.space.names == ("a", "b") and list(one.space.points()) == list(two.space.points())
    assert one.costs.tolist() == two.costs.tolist() == [3.5, math.inf, 1.25, 2.0]
    assert one.optimum == one((2, 2)) == 1.25
    with pytest.raises(InputError, match=r"ran; got \(1, 4\), which failed"):
        one((1, 4))


def test_words_and_fractions_are_values_too(tmp_path):
    (tmp_path / "w.csv").write_text("order,share,time_ms\nrow,0.5,1\ncolumn,2,2\n")
    space = read_recorded(tmp_path / "w.csv").space
    assert list(space.points()) == [("column", 2.0), ("row", 0.5)]


BAD = {
    "a,b\n1,2\n": "then time_ms; got the columns a, b",
    "time_ms,a\n1,2\n": "then time_ms; got the columns time_ms, a",
    "time_ms\n1\n": "then time_ms",
    "a,a,time_ms\n1,2,3\n": "different names",
    "": r"\(none\)",
    "a,b,time_ms\n": "rows of configurations; got none",
    "a,b,time_ms\n1,2\n": "3 cells in every row; got 2 in row 2",
    "a,b,time_ms\n1,2,3\n1,x,4\n": "numbers in the column b; got 'x' in row 3",
    "a,b,time_ms\n1,2,3\n1,,4\n": "numbers in the column b; got '' in row 3",
    "a,b,time_ms\n1,2,3\n1,nan,4\n": "numbers in the column b; got 'nan' in row 3",
    "a,b,time_ms\n1,2,3\n1,inf,4\n": "numbers in the column b; got 'inf' in row 3",
    "a,b,time_ms\n1,2,fast\n": "in the column time_ms; got 'fast' in row 2",
    "a,b,time_ms\n1,2,-3\n": "a time above 0",
    "a,b,time_ms\n1,2,nan\n": "a time above 0",
    "a,b,time_ms\n1,2,inf\n": "a time above 0",
    "a,b,time_ms\n1,2,3\n1,2,4\n": r"every configuration once; got \(1, 2\) twice",
    "a,b,time_ms\n1,2,3\n1,2.0,4\n": "every configuration once",
    "a,b,time_ms\n1,2,\n1,3,\n": "a configuration that ran; got 2 failed ones",
    '"a,b,time_ms\n1,2,3\n': "a CSV file",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_files_say_what_is_wrong(tmp_path, text):
    file = tmp_path / "bad.csv"
    file.write_text(text)
    with pytest.raises(InputError, match=BAD[text]) as caught:
        read_recorded(file)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(gzip.compress(SMALL.encode())[:-9])
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    for file in (cut, binary, tmp_path, tmp_path / "none.csv"):
        with pytest.raises(InputError, match="a CSV file"):
            read_recorded(file)


def test_a_replay_with_the_full_budget_is_exact():
    space = recorded(("a", "b"), [(1, 1, 2, 2), (2, 4, 2, 8)], (3.5, math.inf, 1.25, 2.0))
    for search in SEARCHES.values():
        found = replay(space, search, 10, range(3))
        assert found.best_per_seed == (1.25,) * 3 and found.evaluations_per_seed == (4,) * 3
        assert found.median_ratio == 1.0 and found.share_within(0.0) == 1.0


def test_the_first_trial_of_a_replay_may_fail():
    space = recorded(("a",), [(1, 2)], (math.inf, 2.0))
    found = replay(space, SEARCHES["exhaustive"], 1, range(2))
    assert found.best_per_seed == (math.inf, math.inf)
    assert found.median_ratio == math.inf and found.share_within(0.05) == 0.0


def run_verb(*words: str) -> tuple[dict, str]:
    out: list = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli_replay, "emit", lambda _, data, lines: out.append((data, lines)))
        assert run(["replay", *words]) == 0
    return out[0][0], "\n".join(out[0][1])


@pytest.mark.parametrize("name", [*SEARCHES, "sa", "ga"])
def test_the_verb_counts_trials_and_gives_ratios(name):
    file = str(FOLDER / "conv2d_A100.csv.gz")
    data, text = run_verb(file, "--search", name, "--budget", "60", "--seeds", "3", "--json", "-")
    again, _ = run_verb(file, "--search", name, "--budget", "60", "--seeds", "3", "--json", "-")
    assert data == again == json.loads(json.dumps(data))
    assert data["optimum"] == 0.5536 and data["evaluations_per_seed"] == [60, 60, 60]
    ratios = sorted(best / 0.5536 for best in data["best_per_seed"])
    assert ratios[0] >= 1 and data["median_ratio"] == pytest.approx(ratios[1])
    assert data["within_5_percent"] == np.mean([r <= 1.05 for r in ratios])
    assert f"{data['median_ratio']:.4f}" in text


def test_the_verb_refuses_what_means_nothing(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text(SMALL)
    for words in (["--budget", "0"], ["--seeds", "0"], ["--search", "luck"]):
        with pytest.raises(InputError, match=words[0].removeprefix("--")):
            run_verb(str(file), *words)


def test_the_verb_says_when_no_trial_ran(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("a,time_ms\n1,\n2,3\n")
    words = ["--search", "exhaustive", "--budget", "1", "--seeds", "2"]
    data, text = run_verb(str(file), *words)
    assert data["best_per_seed"] == [math.inf] * 2 and data["median_ratio"] == math.inf
    assert "inf" in text
