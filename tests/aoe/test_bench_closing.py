"""The last lines of the benchmark name every target that was missed."""

from bench.table import Figure, closing


def test_misses_are_named_under_what_they_belong_to():
    met, part = Figure("stem", "4 s", "< 5 s", True), Figure("  again", "9 s", "< 5 s", False)
    assert closing([met]) == "all targets met" == closing([met, Figure("info", "1", "", None)])
    other = Figure("import", "2 s", "< 1 s", False)
    assert closing([met, part, other]).splitlines() == [
        "missed: stem, again: 9 s, target < 5 s",
        "missed: import: 2 s, target < 1 s",
    ]
