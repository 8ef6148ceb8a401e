"""The program of the confined process that runs a hand-in's functions.

`sandbox` starts it as `python -I -S -B inside.py` in an empty folder. It reads lines of JSON from
its standard input, first the task and then the calls. To each it replies with one line on its
standard output; the first reply reports which confinements the system grants. It contains no
reference answer and no judge, so a hand-in that changes this process can only change its own
answers.
"""

import ast
import builtins
import ctypes
import importlib.abc
import importlib.util
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

try:  # imported now: the account that runs the hand-in may not be able to read this module
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]


def main() -> None:
    """Read the task, confine this process, run the hand-in, answer call by call."""
    questions = os.fdopen(os.dup(0), "rb")
    task = json.loads(questions.readline())
    answers = os.dup(1)

    def send_line(line: dict[str, Any]) -> None:
        """Send one line of JSON to the grader."""
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        while data:
            data = data[os.write(answers, data) :]

    try:
        wall = _build_wall(task)
    except PermissionError as error:
        send_line({"refused": str(error)})
        return
    _look_only_at(task["path"], task["moved"])
    sys.meta_path.insert(0, _Denied(task["denied"]))
    send_line({"wall": wall})
    names: dict[str, Any] = {"__name__": "handin", "__builtins__": builtins}
    wire = _wire(send_line, questions, task, names) if task["lenient"] else None
    _more_time(task["start_s"])
    send_line({"at": -1, **_run(task, names)})
    for line in questions:
        call = json.loads(line)
        _more_time(task["case_s"])
        if wire is None:
            send_line(_answer(task, names, call))
        elif "begin" in call:
            wire = _wire(send_line, questions, task, names)
            send_line({"began": True})
        else:
            wire.serve(call)


def _wire(send_line: Any, questions: Any, task: dict[str, Any], names: dict[str, Any]) -> Any:
    """Return a `Wire` by which checks of the book call functions of the hand-in."""
    from ascend_lab.course.wire import Wire

    return Wire(
        send_line,
        lambda: json.loads(questions.readline()),
        names,
        lambda error: _place_of(error, task),
    )


def _run(task: dict[str, Any], names: dict[str, Any]) -> dict[str, str]:
    """Run the file and return its error, if any.

    A lenient run continues after a statement that fails, and returns the first error as a remark.
    """
    file = task["file"]
    remark = ""
    try:
        if not task["lenient"]:
            exec(compile(task["source"], file, "exec"), names)
        for node in ast.parse(task["source"], file).body if task["lenient"] else ():
            try:
                exec(compile(ast.Module([node], []), file, "exec"), names)
            except Exception as error:
                remark = remark or _line_of(error, task)
    except BaseException as error:
        return {"error": _line_of(error, task)}
    return {"remark": remark}


def _answer(task: dict[str, Any], names: dict[str, Any], call: dict[str, Any]) -> dict[str, Any]:
    """Call a function of the hand-in and return its result as plain data, or its error."""
    number = call["number"]
    try:
        for name, text in call["files"].items():
            Path(name).write_text(text, "utf-8")
        function = names.get(call["function"])
        if not callable(function):
            raise NameError(f"no function {call['function']}")
        reply = {"at": number, "value": _plain(function(**call["arguments"]))}
        json.dumps(reply, allow_nan=False)
    except BaseException as error:
        reply = {"at": number, "error": _line_of(error, task)}
    return reply


def _build_wall(task: dict[str, Any]) -> dict[str, Any]:
    """Confine this process as far as the system allows, and return which parts were granted.

    Raises `PermissionError` if the process is root and cannot become another account.
    """
    wall: dict[str, Any] = {"account": -1, "files": False, "network": False, "disk": False}
    if os.name == "posix":
        folder = str(Path.cwd())
        confine = _neighbour("confine")
        account = confine.account_of(os.getpid())
        libc = ctypes.CDLL(None, use_errno=True)
        ruleset = None
        if sys.platform == "linux":
            confine.handles(task["handles"])
            wall["network"], wall["disk"] = confine.into_name_spaces(libc, folder)
            ruleset = confine.rules(libc, task["readable"], task["listed"])
        _redirect(task["output_bytes"])
        wall["account"] = confine.leave_root(account)
        if sys.platform == "linux":
            wall["files"] = confine.confine(libc, ruleset)
    else:
        _redirect(task["output_bytes"])
    _limit(task)
    return wall


def _neighbour(name: str) -> Any:
    """Import a file of this folder without importing the package."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _redirect(output_bytes: int) -> None:
    """Send standard output and error to a file, and make standard input empty."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for source, targets in (
        (os.open("output.txt", flags, 0o644), (1, 2)),
        (os.open(os.devnull, os.O_RDONLY), (0,)),
    ):
        for target in targets:
            os.dup2(source, target)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


def _limit(task: dict[str, Any]) -> None:
    """Limit memory, file sizes and open files, and forbid the start of other processes."""
    if resource is None:
        return
    limits = {
        "RLIMIT_AS": task["memory_bytes"],
        "RLIMIT_FSIZE": task["output_bytes"],
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
        "RLIMIT_NPROC": 0,
    }
    for name, limit in limits.items():
        with suppress(OSError, ValueError, AttributeError):
            resource.setrlimit(getattr(resource, name), (limit, limit))


def _look_only_at(path: list[str], moved: list[str]) -> None:
    """Import only from these folders; packages that are loaded already get their new path.

    `moved` holds the path of the standard library so far, and the path by which the account that
    runs the hand-in reaches it.
    """
    sys.path[:] = path
    sys.path_importer_cache.clear()
    old_root, new_root = moved
    for module in list(sys.modules.values()):
        places = getattr(module, "__path__", None)
        if isinstance(places, list):
            places[:] = [
                new_root + place[len(old_root) :] if place.startswith(old_root) else place
                for place in places
            ]


def _more_time(case_s: float) -> None:
    """Allow `case_s` more seconds of processor time, rounded up."""
    if resource is None:
        return
    with suppress(OSError, ValueError):
        soft = int(time.process_time() + case_s) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


class _Denied(importlib.abc.MetaPathFinder):
    """An import finder that refuses modules with reference answers, and gives the reason."""

    def __init__(self, denied: list[str]) -> None:
        self.denied = tuple(denied)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Raise `ImportError` for modules that the assignment denies."""
        if any(name == root or name.startswith(f"{root}.") for root in self.denied):
            raise ImportError(f"{name} is closed in this assignment")


def _plain(value: Any) -> Any:
    """Return a value as plain data (numbers, texts, lists, tables); NumPy arrays become lists."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return [_plain(item) for item in value]
    if kind is dict:
        return {str(key): _plain(item) for key, item in value.items()}
    if kind.__module__ == "numpy":
        return _plain(value.tolist())
    raise TypeError(f"plain data, got {kind.__name__}: return lists, numbers, text")


def _place_of(error: BaseException, task: dict[str, Any]) -> str:
    """Return the line of the hand-in in which an error arose, for a notebook with its cell."""
    line = 0
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == task["file"]:
            line = trace.tb_lineno
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.filename == task["file"]:
        line = error.lineno or 0
    if not line:
        return ""
    lines = task["source"].splitlines()[:line]
    heads = [(i, text) for i, text in enumerate(lines, 1) if text.startswith("# %% code cell ")]
    cell = f" of {heads[-1][1][5:]}" if heads else ""
    return f" in line {line - (heads[-1][0] if heads else 0)}{cell} of {task['file']}"


def _line_of(error: BaseException, task: dict[str, Any]) -> str:
    """Return an error as one line of text, with its line of the hand-in."""
    try:
        message = error.msg if isinstance(error, SyntaxError) else str(error)
    except BaseException:  # a hand-in's own error class may fail here
        message = ""
    return f"{type(error).__name__}{_place_of(error, task)}: {message}"[:400].replace("\n", " ")


if __name__ == "__main__":
    main()
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(0)
