#!/usr/bin/env python3
"""Set up, build, test and serve the book: `python3 lab.py` lists the verbs.

Standard library only. On first use it makes `.venv` beside this file, installs the pinned packages
there and starts itself again inside; later runs reuse it until a pinned list changes. Everything it
makes lies in `.venv`, `_build` and `my_notebooks`; only `refresh` writes to the sources.
"""

import sys

OLDEST = (3, 11)
NEWEST = (3, 13)


def python_problem(version: tuple) -> str:
    """Return one line saying why Python `version` (major, minor, ...) will not do, or ""."""
    if OLDEST <= tuple(version[:2]) <= NEWEST:
        return ""
    import shutil

    names = ["python%d.%d" % (3, minor) for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]
    found = [name for name in names if shutil.which(name)]
    remedy = "this machine has %s: run it with that" % found[0] if found else "install one"
    wanted = "3.11, 3.12 or 3.13"
    return "lab: Python %s is needed, this is %d.%d; %s" % (wanted, version[0], version[1], remedy)


if __name__ == "__main__" and python_problem(sys.version_info):
    sys.exit(python_problem(sys.version_info))

# From here on the Python is new enough; an older one must still be able to read the lines.
import functools
import hashlib
import http.server
import importlib.util
import json
import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BUILD = ROOT / "_build"
HTML = BUILD / "html"
STAMP = VENV / "lab-stamp.json"
PINNED = ("requirements.txt", "constraints.txt", "pyproject.toml")
BUILDER = ROOT / "book" / "build.py"
COPIER = ROOT / "book" / "copies.py"
PRINTER = ROOT / "book" / "pdf.py"
SLIDES = ROOT / "book" / "slides.py"
SITE = ROOT / "book" / "browser.py"
COPIES = ROOT / "my_notebooks"
CACHES = (".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "build", "dist")


class LabError(Exception):
    """Something the reader has to put right; the message says what."""


# --- the environment ------------------------------------------------------------------------------


def venv_python() -> Path:
    """Return the path of the environment's interpreter on this system."""
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def is_inside() -> bool:
    """Tell whether this process already runs in the environment."""
    return Path(sys.prefix).resolve() == VENV.resolve()


def wanted_stamp(root: Path = ROOT) -> dict[str, str]:
    """Return what a finished environment was made from: the place and the pinned lists."""
    digest = hashlib.sha256()
    for name in PINNED:
        digest.update(name.encode() + (root / name).read_bytes().replace(b"\r\n", b"\n"))
    return {"root": str(root), "pins": digest.hexdigest()}


def read_stamp() -> dict[str, str]:
    """Return the environment's stamp, or {} where there is none that can be read."""
    try:
        return dict(json.loads(STAMP.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def venv_problem(find_spec: Callable = importlib.util.find_spec) -> str:
    """Return one line saying what to install when this Python cannot make environments, or ""."""
    missing = [name for name in ("venv", "ensurepip") if find_spec(name) is None]
    if not missing:
        return ""
    return (
        "this Python lacks the module '%s' that makes environments; on Debian or Ubuntu run: "
        "sudo apt install python%d.%d-venv (elsewhere: a Python from python.org has it)"
        % (missing[0], sys.version_info[0], sys.version_info[1])
    )


def child_environment() -> dict[str, str]:
    """Return the variables of child processes: the user's own set-up stays out."""
    dropped = {"PYTHONHOME", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "MPLBACKEND"}
    dropped |= {"PIP_USER", "PIP_TARGET", "PIP_PREFIX"}
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    env["PATH"] = str(venv_python().parent) + os.pathsep + env.get("PATH", "")
    env["MPLCONFIGDIR"] = str(VENV / "etc" / "matplotlib")
    env["IPYTHONDIR"] = str(VENV / "etc" / "ipython")
    env.update(JUPYTER_PREFER_ENV_PATH="1", PYTHONUTF8="1", PYDEVD_DISABLE_FILE_VALIDATION="1")
    return env


def run(*command: object, **options: object) -> int:
    """Run a command in the checkout and return its exit code; Ctrl-C ends it, then us."""
    options.setdefault("cwd", str(ROOT))
    process = subprocess.Popen([str(c) for c in command], env=child_environment(), **options)
    interrupted = False
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:  # the child got it too and decides when to end
            interrupted = True
    if interrupted:
        raise KeyboardInterrupt
    return code


def python(*arguments: object, **options: object) -> int:
    """Run the environment's interpreter with `arguments` and return its exit code."""
    return run(venv_python(), *arguments, **options)


def is_usable() -> bool:
    """Tell whether `.venv` has an interpreter that starts, suits, was made here and has pip."""
    probe = "import sys, pip; print('%d.%d' % sys.version_info[:2], pip.__version__)"
    if not venv_python().exists() or read_stamp().get("root", str(ROOT)) != str(ROOT):
        return False
    try:
        answer = subprocess.run(
            [str(venv_python()), "-c", probe], capture_output=True, text=True, check=True
        ).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return False
    numbers = [tuple(int(n) for n in text.split(".")[:2]) for text in answer]
    return OLDEST <= numbers[0] <= NEWEST and numbers[1] >= (21, 3)


def make_venv() -> None:
    """Make an empty environment in the place of one that cannot be used."""
    if is_inside():
        raise LabError("run it with the system's Python once; the environment must be made anew")
    if venv_problem():
        raise LabError(venv_problem())
    print("lab: making the environment in", VENV, flush=True)
    shutil.rmtree(VENV, ignore_errors=True)
    if subprocess.call([sys.executable, "-m", "venv", str(VENV)]) != 0:
        raise LabError("python -m venv failed; its message is above")


def pip_install(*arguments: str) -> None:
    """Install with pip, showing one line that counts; its errors pass through."""
    command = [str(venv_python()), "-m", "pip", "install", "--disable-pip-version-check"]
    command += ["--no-input", "--no-compile", *arguments]  # Python compiles what it imports
    process = subprocess.Popen(
        command, cwd=str(ROOT), env=child_environment(), stdout=subprocess.PIPE, text=True
    )
    count = 0
    live = sys.stdout.isatty()
    said = deque(maxlen=12)
    try:
        for line in process.stdout:
            said.append(line)
            if live and line.startswith(("Collecting", "Installing")):
                count += 1
                print("\r  pip: %3d %-60.60s" % (count, line.split("(")[0].strip()), end="")
    finally:
        process.stdout.close()
        code = process.wait()
        if live and count:
            print("\r" + " " * 72 + "\r", end="", flush=True)
    if code != 0:
        sys.stderr.writelines(said)
        raise LabError(
            "pip could not install the packages, its message is above; without a network point "
            "PIP_INDEX_URL to an index that can be reached or PIP_FIND_LINKS to a folder of wheels"
        )


def ensure_environment() -> None:
    """Make or renew `.venv` unless it was finished from these very lists."""
    if not is_inside() and not is_usable():
        make_venv()
    elif read_stamp() == wanted_stamp():
        return
    print("lab: installing the pinned packages (first time: some minutes, 1 GB)", flush=True)
    pip_install("-r", "requirements.txt")
    pip_install("--no-deps", "--no-build-isolation", "--editable", ".")
    STAMP.write_text(json.dumps(wanted_stamp()), encoding="utf-8")


# --- verbs ----------------------------------------------------------------------------------------


def do_book(arguments: list[str]) -> int:
    """Execute every notebook afresh and render the book (--saved: render the saved outputs)."""
    if set(arguments) - {"--saved"}:
        raise LabError("book takes nothing but --saved")
    if python(BUILDER, "book", *arguments) != 0:
        raise LabError("the book has errors (above); the build is strict")
    print("lab: the book is ready:", (HTML / "index.html").as_uri())
    print("lab: open that file, or run 'python3 lab.py serve' (icons need it in some browsers)")
    return 0


def warm_fonts() -> None:
    """Let matplotlib build its font cache: its notice must not become a notebook's output."""
    python("-c", "import matplotlib.font_manager", stderr=subprocess.DEVNULL)


def run_lint() -> int:
    """Run ruff and mypy; return the worst exit code."""
    checks = (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",))
    return max([python("-m", *check) for check in checks])


TESTS = {
    "package": ("tests",),
    "notebooks": ("--nbval", "notebooks"),  # saved outputs against fresh ones, strictly
    "browser": ("-m", "browser", "tests/test_browser.py"),  # the built book and JupyterLab
}

THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def run_tests(name: str) -> int:
    """Run a step of tests; the tests of one file stay together, long files start."""
    if name == "notebooks":
        warm_fonts()
    os.environ["ASCEND_LAB_BOOK"] = str(HTML)
    os.environ.update(dict.fromkeys(THREADS, "1"))  # more would wait for each other, and busily
    cores = [] if name == "browser" else ["-n", "2", "--dist", "loadfile"]
    return python("-m", "pytest", "-q", *cores, "--no-loadscope-reorder", *TESTS[name])


STEPS = {
    "lint": run_lint,
    "book": lambda: python(BUILDER, "book", "--saved"),
    **{name: functools.partial(run_tests, name) for name in TESTS},
}
CHAINS = (("package",), ("notebooks",), ("lint", "book", "browser"))
"""Steps one after another, and what runs beside: much of it waits, for kernels or for Chromium."""


def beside(names: list[str]) -> Callable[[], int]:
    """Start a chain of steps in a process; return what waits for it and prints what it said."""
    BUILD.mkdir(exist_ok=True)
    log = BUILD / f"test_{names[0]}.log"
    with log.open("wb") as out:
        steps = subprocess.Popen([sys.executable, __file__, "test", *names], stdout=out, stderr=out)

    def wait() -> int:
        code = steps.wait()
        print(log.read_text("utf-8", "replace"), end="", flush=True)
        return code

    return wait


def do_test(arguments: list[str]) -> int:
    """Run every test: package, beside it notebooks, and lint, book, browser; or the steps named."""
    if set(arguments) - set(STEPS):
        raise LabError("test takes these steps: " + " ".join(STEPS))
    chains = [[name for name in chain if name in (arguments or STEPS)] for chain in CHAINS]
    own, *others = filter(None, chains)
    started = time.perf_counter()
    results = {}
    last = {" + ".join(names): beside(names) for names in others}
    for name, step in {**{name: STEPS[name] for name in own}, **last}.items():
        print(f"lab: --- {name}", flush=True)
        began = started if name in last else time.perf_counter()
        results[name] = (step(), time.perf_counter() - began)
    summary = ", ".join(f"{name} {seconds:.0f} s" for name, (_, seconds) in results.items())
    failed = [name for name, (code, _) in results.items() if code != 0]
    if failed:
        raise LabError(f"FAILED: {', '.join(failed)} ({summary})")
    print(f"lab: all passed ({summary})")
    return 0


def place(arguments: list[str], default: Path, rule: str) -> Path:
    """Return the file or folder that the user named, or the default; `rule` is the error's text."""
    if len(arguments) > 1 or any(not a or a.startswith("-") for a in arguments):
        raise LabError(f"{rule} (default: {os.path.relpath(default, ROOT)})")
    return Path(arguments[0]).absolute() if arguments else default


def do_pdf(arguments: list[str]) -> int:
    """Print the built book as one PDF by a browser (pdf [FILE], default _build/book.pdf)."""
    target = place(arguments, BUILD / "book.pdf", "pdf takes one file")
    if not (HTML / "index.html").exists():
        raise LabError("there is no book yet; run: python3 lab.py book")
    if python(PRINTER, HTML, target) != 0:
        raise LabError("no PDF was written; the reason is above")
    return 0


def do_slides(arguments: list[str]) -> int:
    """Write the syllabus' figures as offline HTML decks (slides [FOLDER]), one a part."""
    folder = place(arguments, BUILD / "slides", "slides takes one folder")
    if python(SLIDES, folder) != 0:
        raise LabError("no slides were written; the reason is above")
    return 0


def do_browser(arguments: list[str]) -> int:
    """Build a site that runs the chapters in the visitor's browser (browser [FOLDER])."""
    folder = place(arguments, BUILD / "browser", "browser takes one folder")
    if importlib.util.find_spec("jupyterlite_pyodide_kernel") is None:
        import tomllib

        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        print("lab: installing JupyterLite into .venv (for this verb only)", flush=True)
        pip_install(*project["optional-dependencies"]["browser"], "-c", "requirements.txt")
    if python(SITE, folder) != 0:
        raise LabError("no site was written; the reason is above")
    print(
        "lab: the site is in", folder, "(any web server will do; opened as a file it stays empty)"
    )
    print(
        "lab: a visitor's first visit needs a network: Pyodide, NumPy and matplotlib come from it"
    )
    return 0


def do_refresh(arguments: list[str]) -> int:
    """Execute notebooks in place (all, or those named: refresh 02); cell ids stay."""
    if python(BUILDER, "refresh", *arguments) != 0:
        raise LabError("nothing was changed; the reason is above")
    return 0


def do_copies(arguments: list[str]) -> int:
    """Write copies of the chapters to work in (copies [FOLDER]); those you changed stay."""
    folder = place(arguments, COPIES, "copies takes one folder")
    if python(COPIER, folder) != 0:
        raise LabError("not all copies were written; the reason is above")
    return 0


def do_notebooks(arguments: list[str]) -> int:
    """Write the copies in my_notebooks and open them in JupyterLab."""
    do_copies([])
    return python("-m", "jupyterlab", *arguments, COPIES)


def do_serve(arguments: list[str]) -> int:
    """Serve the built book on this machine only (serve [PORT], default 8000)."""
    if not (HTML / "index.html").exists():
        raise LabError("there is no book yet; run: python3 lab.py book")
    if arguments and not (len(arguments) == 1 and arguments[0].isdigit()):
        raise LabError("serve takes one port number")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(HTML))
    make_server = http.server.ThreadingHTTPServer
    try:
        server = make_server(("127.0.0.1", int((arguments or ["8000"])[0])), handler)
    except (OSError, OverflowError):
        server = make_server(("127.0.0.1", 0), handler)  # that port is taken: any free one
    print(f"lab: http://127.0.0.1:{server.server_address[1]}/ (Ctrl-C ends)", flush=True)
    with server:
        server.serve_forever()
    return 0


def do_bench(arguments: list[str]) -> int:
    """Measure speed and fidelity (arguments go to `python -m bench`)."""
    return python("-m", "bench", *arguments)


def do_bank(arguments: list[str]) -> int:
    """Tune the model zoo and write the built-in knowledge bank (hours; it can be stopped)."""
    return python("-m", "bench.presets", *arguments)


def do_real_cluster(arguments: list[str]) -> int:
    """Predict and measure a training step of four local processes (needs torch or mpi4py)."""
    return python("-m", "bench.real_cluster", *arguments)


def do_lint(arguments: list[str]) -> int:
    """Run ruff and mypy."""
    if run_lint() != 0:
        raise LabError("lint found something (above); 'ruff format .' repairs the layout")
    return 0


def do_clean(arguments: list[str]) -> int:
    """Remove what builds and tools left; --all removes the environment too."""
    doomed = [BUILD, *(ROOT / name for name in CACHES), *ROOT.glob("*.egg-info")]
    for path in [*doomed, *([VENV] if "--all" in arguments else [])]:
        shutil.rmtree(path, ignore_errors=True)
    return 0


VERBS = {
    "book": do_book,
    "test": do_test,
    "refresh": do_refresh,
    "copies": do_copies,
    "notebooks": do_notebooks,
    "serve": do_serve,
    "pdf": do_pdf,
    "slides": do_slides,
    "browser": do_browser,
    "bench": do_bench,
    "bank": do_bank,
    "real-cluster": do_real_cluster,
    "lint": do_lint,
    "clean": do_clean,
}
WITHOUT_ENVIRONMENT = ("serve", "clean")


def usage() -> str:
    """Return the help text."""
    lines = ["usage: python3 lab.py VERB [ARGUMENTS]", ""]
    lines += [f"  {name:<12} {(verb.__doc__ or '').strip()}" for name, verb in VERBS.items()]
    return "\n".join(lines)


def reenter(argv: list[str]) -> int:
    """Run this script again inside the environment; it prints its own closing line."""
    try:
        return python(ROOT / "lab.py", *argv, cwd=None)  # a relative path is the user's
    except KeyboardInterrupt:
        return 130


def main(argv: list[str]) -> int:
    """Run one verb in the environment and return the exit code."""
    asked = ("help", "-h", "--help")
    if not argv or argv[0] in asked or (argv[0] != "bench" and argv[-1] in asked[1:]):
        print(usage())
        return 0
    try:
        if argv[0] not in VERBS:
            raise LabError(f"no verb '{argv[0]}'; there are: {', '.join(VERBS)}")
        if argv[0] not in WITHOUT_ENVIRONMENT:
            ensure_environment()
            if not is_inside():
                return reenter(argv)
        return VERBS[argv[0]](argv[1:])
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2 if argv[0] not in VERBS else 1
    except KeyboardInterrupt:
        print("lab: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # of `lab.py | head`; what is left in the buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
