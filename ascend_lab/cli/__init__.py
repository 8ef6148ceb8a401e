"""The top of both commands: whatever goes wrong is one line on stderr and an exit code.

0 done, 1 checks failed, 2 bad input, 70 a mistake of ours, 130 interrupted. Everything else is
imported inside the guard, so that Ctrl-C is one line from the start on.
"""

from __future__ import annotations

import os
import sys

from ascend_lab.errors import INTERRUPTED, AscendLabError, InputError, complain, drop

TYPE_CHECKING = False
if TYPE_CHECKING:  # the guard itself must be there at once
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
    try:
        try:
            _prepare_streams()
            words = list(sys.argv[1:] if argv is None else argv)
            _check_words(words)
            if name == "aoe":
                from ascend_lab.cli.tune import run

                code = run(words)
            else:
                from ascend_lab.cli import common, verbs

                code = common.run_one(verbs.VERBS, words)
        finally:  # --help leaves by SystemExit
            if sys.stdout is not None:
                sys.stdout.flush()
    except AscendLabError as error:
        code = complain(name, str(error), BAD_INPUT)
    except (KeyboardInterrupt, Exception) as error:
        if _from_ctrl_c(error):
            code = complain(name, f"interrupted{AFTER_CTRL_C.get(name, '')}", INTERRUPTED)
        else:
            code = _what_is_left(name, error)
    if argv is None:  # the process ends: nobody needs a last look for garbage
        import gc

        gc.freeze()
    return code


def _prepare_streams() -> None:
    """Print what an encoding lacks as escapes; let no file take the place of a closed stream."""
    while sys.stdout is None or sys.stderr is None:
        if (handle := os.open(os.devnull, os.O_RDWR)) > 2:
            os.close(handle)
            break
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def _check_words(words: Sequence[str]) -> None:
    """Refuse arguments without a character: they are no way to leave something out."""
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


def _what_is_left(name: str, error: BaseException) -> int:
    """Explain what no other place has explained; `ASCEND_LAB_DEBUG=1` shows where it is from."""
    kind = type(error).__name__
    place = _place(error)
    if isinstance(error, OSError) and error.filename is None and place.startswith("cli"):
        drop(sys.stdout)  # these modules print, and write nothing else
        if isinstance(error, BrokenPipeError):
            return 0
        reason = error.strerror or str(error)
        return complain(name, f"standard output cannot be written: {reason}", BAD_INPUT)
    if isinstance(error, OSError) and error.filename is not None:
        # Whatever the system refuses of a path: too long, a loop of links, no permission.
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
    """Tell whether Ctrl-C is behind an error: imports may turn it into another one."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _place(error: BaseException) -> str:
    """Return the last file and line of this package that an error went through."""
    place = "?"
    trace = error.__traceback__
    package = (sys.modules["ascend_lab"].__file__ or "").removesuffix("__init__.py")
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.startswith(package):
            place = f"{file.removeprefix(package)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
