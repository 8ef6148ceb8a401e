"""The tables that chapters print."""

import doctest

import numpy as np
import pytest

from ascend_lab.lab import table, text_table


def test_the_examples_of_the_module_hold() -> None:
    result = doctest.testmod(text_table)
    assert result.attempted and not result.failed


def test_numbers_stand_right_and_words_left(capsys: pytest.CaptureFixture[str]) -> None:
    table(["unit", "busy", "note"], [("MTE2", np.float32(0.25), "x"), ("V", np.int64(70000), "")])
    table(["share", "cores"], [("12 %", None), ("2.1x", 3)])
    assert capsys.readouterr().out.splitlines() == [
        "unit    busy  note",
        "MTE2   0.250  x",
        "V     70,000",
        "share  cores",
        " 12 %      -",
        " 2.1x      3",
    ]


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 2 values"):
        table(["a", "b"], [(1, 2, 3)])
