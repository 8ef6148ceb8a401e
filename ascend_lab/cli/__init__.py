"""The commands `ascend-lab` and `aoe`: every error is one line on stderr and an exit code.

    0    done
    1    done, with a negative result: values differ, buffers do not fit
    2    bad input: the line says what is needed, what was given, and what to do
    70   a bug of this package
    130  interrupted

A verb is a subcommand such as `gemm`, a record of `common.Verb`; `verbs.VERBS` lists them all.
Modules are imported inside the handler of errors, so that Ctrl-C is one line from the start on.

>>> from ascend_lab.cli import ascend_lab
>>> ascend_lab(["gemm", "512", "512", "512", "--chip", "Ascend910B2"])  # doctest: +ELLIPSIS
gemm m 512, n 512, k 512, fp16, on 24 cores of Ascend910B2 (model result)
...
0
"""

from __future__ import annotations

import os
import sys

from ascend_lab.errors import INTERRUPTED, AscendLabError, InputError, complain, drop

TYPE_CHECKING = False
if TYPE_CHECKING:  # the handler of errors must be ready at once
    from collections.abc import Sequence

BAD_INPUT = 2
MISTAKE = 70
AFTER_CTRL_C = {"aoe": "; --reload goes on with what the bank holds"}


def ascend_lab(argv: Sequence[str] | None = None) -> int:
    """Run the command `ascend-lab` and return its exit code."""
    return _guarded("ascend-lab", argv)


def aoe(argv: Sequence[str] | None = None) -> int:
    """Run the command `aoe` and return its exit code."""
    return _guarded("aoe", argv)


def _guarded(name: str, argv: Sequence[str] | None) -> int:
    """Run a command on `argv`, by default the process's arguments, and explain what it raises."""
    try:
        try:
            _prepare_streams()
            words = list(sys.argv[1:] if argv is None else argv)
            _check_words(words)
            # Each command imports only what it needs: `ascend-lab chips` needs no search.
            if name == "aoe":
                from ascend_lab.cli.tune import run

                code = run(words)
            else:
                from ascend_lab.cli import common, verbs

                code = common.run_one(verbs.VERBS, words)
        finally:
            # --help leaves by SystemExit and passes here, too. A full disk is noticed only now.
            if sys.stdout is not None:
                sys.stdout.flush()
    except AscendLabError as error:
        code = complain(name, str(error), BAD_INPUT)
    except (KeyboardInterrupt, Exception) as error:
        if _from_ctrl_c(error):
            code = complain(name, f"interrupted{AFTER_CTRL_C.get(name, '')}", INTERRUPTED)
        else:
            code = _explain(name, error)
    if argv is None:  # the process ends: a last garbage collection would be wasted time
        import gc

        gc.freeze()
    return code


def _prepare_streams() -> None:
    """Print unencodable characters as escapes; let no file take the place of a closed stream."""
    # `ascend-lab chips >&-` starts without file 1: the first file opened would become it, and lines
    # would be printed into that file. Files 0 to 2 are filled with the null device first.
    while sys.stdout is None or sys.stderr is None:
        if (handle := os.open(os.devnull, os.O_RDWR)) > 2:
            os.close(handle)
            break
    # A caller's own stream, as in a notebook, may have no encoding to set.
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def _check_words(words: Sequence[str]) -> None:
    """Raise for empty arguments: they must not count as left out."""
    for previous, word in zip(["", *words], words, strict=False):
        flag, equals, text = word.partition("=")
        if not word:
            where = f"'' after {previous}" if previous else "''"
            raise InputError("arguments that are not empty", where, "leave it out or fill it in")
        # argparse takes the two dashes of --flag=-- for the end of all flags, and gives a list.
        if flag.startswith("-") and equals and text in ("", "--"):
            raise InputError(f"a value for {flag}", word, "leave it out or fill it in")
        if "\0" in word:
            raise InputError("arguments without zero bytes", repr(word[:40]))


def _explain(name: str, error: BaseException) -> int:
    """Print an error that the command itself has not handled, and return the exit code.

    `ASCEND_LAB_DEBUG=1` shows where the error comes from.
    """
    kind = type(error).__name__
    place = _place(error)
    if isinstance(error, OSError) and error.filename is None and place.startswith("cli"):
        # A system error without a file name, in modules that only print, concerns the output.
        drop(sys.stdout)
        if isinstance(error, BrokenPipeError):
            return 0  # `ascend-lab chips | head -1`: the reader has enough
        reason = error.strerror or str(error)
        return complain(name, f"standard output cannot be written: {reason}", BAD_INPUT)
    if isinstance(error, OSError) and error.filename is not None:
        # The system refuses a path: it is too long, a loop of links, or not permitted.
        reason = error.strerror or str(error)
        return complain(name, f"{error.filename}: {reason}; name another", BAD_INPUT)
    if os.environ.get("ASCEND_LAB_DEBUG"):
        raise error
    if isinstance(error, MemoryError | RecursionError | OverflowError):
        return complain(name, f"the input is too large ({kind}); use a smaller one", BAD_INPUT)
    mistake = f"a mistake of ours: {kind} in {place}; ASCEND_LAB_DEBUG=1 shows the trace"
    report = "please report it, with the command, where you got ascend_lab from"
    return complain(name, f"{mistake}; {report}", MISTAKE)


def _from_ctrl_c(error: BaseException | None) -> bool:
    """Tell whether Ctrl-C caused an error: imports may turn it into another error."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _place(error: BaseException) -> str:
    """Return the last file and line of this package that an error went through."""
    place = "?"
    trace = error.__traceback__
    package = (sys.modules["ascend_lab"].__file__ or "").removesuffix("__init__.py")
    # The error may come from NumPy: the place where this package called it helps more.
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.startswith(package):
            place = f"{file.removeprefix(package)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
