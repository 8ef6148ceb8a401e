"""Progress bars: shown to a terminal, not to a file."""

import io

from ascend_lab.aoe.drive import OVERALL, Bars


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_file_gets_no_bars():
    stream = io.StringIO()
    with Bars(stream=stream) as bars:
        bars("1/2 matmul", 1, 10, "7")
    assert stream.getvalue() == "" and bars.bar is None


def test_a_terminal_can_be_told_to_get_none():
    stream = Terminal()
    with Bars(False, stream) as bars:
        bars("1/2 matmul", 1, 10, "7")
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar_per_label():
    stream = Terminal()
    with Bars(stream=stream) as bars:
        for done in range(1, 11):
            bars("1/2 matmul", done, 10, f"{7 + (done - 4) ** 2} us")
        assert bars.bar.postfix == "best 7 us"
        first = bars.bar
        assert (first.n, first.total, first.desc) == (10, 10, "1/2 matmul")
        bars("2/2 conv2d", 3, 10, "")
        assert bars.bar is not first and bars.bar.n == 3
    assert "1/2 matmul" in stream.getvalue() and "2/2 conv2d" in stream.getvalue()
    assert bars.bar is None


def test_the_whole_run_has_a_bar_of_its_own_above():
    stream = Terminal()
    with Bars(stream=stream) as bars:
        bars(OVERALL, 1, 3, "")
        bars("bounds", 2, 7, "")
        whole = bars.overall
        assert (whole.n, whole.total, whole.unit, bars.bar.unit) == (1, 3, "step", "operator")
        bars(OVERALL, 2, 9, "")
        bars("2/7 matmul, proof", 1, 9, "")
        assert bars.overall is whole and (whole.n, whole.total) == (2, 9)
        assert bars.bar.unit == "kernel" and bars.bar.pos == -1
    assert bars.bar is bars.overall is None
