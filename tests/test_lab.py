"""lab.py and book/build.py: environment, verbs, messages; refreshed notebooks that do not churn."""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from scripts import load_script

ROOT = Path(__file__).resolve().parent.parent
PINNED = ("requirements.txt", "constraints.txt", "pyproject.toml")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with lab.py and the pinned lists, its name with a space, and no environment."""
    root = tmp_path / "my book"
    root.mkdir()
    for name in ("lab.py", *PINNED):
        shutil.copy(ROOT / name, root / name)
    return root


def run_lab(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "lab.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=root.parent)


# --- Python and venv ------------------------------------------------------------------------------
@pytest.mark.parametrize("version", [(3, 8), (3, 10), (3, 14), (4, 0)])
def test_an_unsuitable_python_gets_one_line(lab, version):
    line = lab.python_problem(version)
    assert "3.11, 3.12 or 3.13" in line
    assert "%d.%d" % version in line  # noqa: UP031
    assert "\n" not in line


def test_the_line_names_a_python_that_is_there(lab, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "python3.12" else None)
    assert "this machine has python3.12" in lab.python_problem((3, 9))


def test_an_old_python_can_read_the_script():
    source = (ROOT / "lab.py").read_text(encoding="ascii")
    ast.parse(source, feature_version=(3, 7))


def test_a_missing_venv_module_gets_one_line(lab):
    missing = lab.venv_problem(lambda name: None if name == "ensurepip" else name)
    assert f"sudo apt install python3.{sys.version_info[1]}-venv" in missing
    assert "\n" not in missing
    assert lab.venv_problem(lambda name: name) == ""


# --- the environment ------------------------------------------------------------------------------
def test_the_stamp_follows_place_and_pins(lab, checkout):
    first = lab.wanted_stamp(checkout)
    assert first["root"] == str(checkout)
    path = checkout / "constraints.txt"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert lab.wanted_stamp(checkout) == first, "line ends of another system change nothing"
    path.write_text(path.read_text() + "another==1.0\n")
    assert lab.wanted_stamp(checkout)["pins"] != first["pins"]


@pytest.fixture
def told(lab, monkeypatch):
    """The words of the commands that lab.py would run; each of them ends well."""
    found: list[tuple[object, ...]] = []
    monkeypatch.setattr(lab, "python", lambda *words, **_: found.append(words) or 0)
    return found


@pytest.fixture
def watched(lab, checkout, monkeypatch):
    """lab.py on a checkout whose environment is only pretended; the list holds what it did."""
    done: list[str] = []
    (checkout / ".venv").mkdir()
    for name, path in {"ROOT": "", "VENV": ".venv", "STAMP": ".venv/stamp.json"}.items():
        monkeypatch.setattr(lab, name, checkout / path)
    stamp = lab.wanted_stamp(checkout)
    monkeypatch.setattr(lab, "wanted_stamp", lambda: stamp)
    monkeypatch.setattr(lab, "is_inside", lambda: False)
    monkeypatch.setattr(lab, "is_usable", lambda: True)
    monkeypatch.setattr(lab, "make_venv", lambda: done.append("venv"))
    monkeypatch.setattr(lab, "pip_install", lambda *words: done.append(words[0]))
    return lab, done


def test_a_second_run_installs_nothing(watched):
    lab, done = watched
    lab.ensure_environment()
    assert done == ["-r", "--no-deps"], "a usable environment without a stamp is completed"
    lab.ensure_environment()
    assert done == ["-r", "--no-deps"]
    lab.STAMP.write_text("not json")
    lab.ensure_environment()
    assert done == ["-r", "--no-deps"] * 2


def test_an_unusable_environment_is_made_anew(watched, monkeypatch):
    lab, done = watched
    monkeypatch.setattr(lab, "is_usable", lambda: False)
    lab.ensure_environment()
    assert done == ["venv", "-r", "--no-deps"]


def test_an_environment_that_does_not_start_is_unusable(lab, checkout, monkeypatch):
    monkeypatch.setattr(lab, "VENV", checkout / ".venv")
    assert not lab.is_usable()
    lab.venv_python().parent.mkdir(parents=True)
    lab.venv_python().write_text("not a program")
    assert not lab.is_usable()
    monkeypatch.setattr(lab, "VENV", Path(sys.prefix))
    monkeypatch.setattr(lab, "STAMP", checkout / "stamp.json")
    assert lab.is_usable()
    lab.STAMP.write_text(json.dumps({"root": "/elsewhere"}))
    assert not lab.is_usable(), "a moved checkout has scripts that point to the old place"


def test_pip_without_an_index_ends_with_one_clear_line(lab, checkout, monkeypatch):
    monkeypatch.setattr(lab, "VENV", Path(sys.prefix))
    monkeypatch.setattr(lab, "ROOT", checkout)
    (checkout / "requirements.txt").write_text("a-package-that-is-not-there==1.0\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(lab.LabError, match=r"PIP_INDEX_URL .* PIP_FIND_LINKS"):
        lab.pip_install("-r", "requirements.txt")


def test_children_see_the_environment_and_not_the_users_own(lab, monkeypatch):
    theirs = {"PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "MPLBACKEND", "PIP_USER"}
    for name in theirs:
        monkeypatch.setenv(name, "x")
    env = lab.child_environment()
    assert not theirs & set(env)
    assert env["PATH"].split(os.pathsep)[0] == str(lab.venv_python().parent)


# --- verbs ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("words", [[], ["help"], ["--help"], ["copies", "-h"], ["test", "--help"]])
def test_help_names_every_verb(lab, capsys, words):
    assert lab.main(words) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert listed == list(lab.VERBS)


def test_an_unknown_verb_is_refused_in_one_line(checkout):
    done = run_lab(checkout, "bok")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("lab: no verb 'bok'; there are: book, test")
    assert not (checkout / ".venv").exists()


def test_every_step_runs_and_the_failed_ones_are_named(lab, monkeypatch, capsys):
    monkeypatch.setattr(lab, "STEPS", {"a": lambda: 0, "b": lambda: 3, "c": lambda: 0})
    monkeypatch.setattr(lab, "CHAINS", (("a", "b", "c"),))
    with pytest.raises(lab.LabError, match=r"^FAILED: b \(a 0 s, b 0 s, c 0 s\)$"):
        lab.do_test([])
    assert lab.do_test(["a", "c"]) == 0
    assert "all passed (a 0 s, c 0 s)" in capsys.readouterr().out
    with pytest.raises(lab.LabError, match="a b c"):
        lab.do_test(["d"])


def test_chains_run_beside_the_first_and_say_their_own(lab, told, monkeypatch, tmp_path, capsys):
    script = tmp_path / "other.py"
    script.write_text("import sys; print('aside', sys.argv[1:]); sys.exit('k' in sys.argv[2])")
    monkeypatch.setattr(lab, "__file__", str(script))
    monkeypatch.setattr(lab, "BUILD", tmp_path / "made")
    failed = "notebooks"
    words = r"package 0 s, notebooks \d s, lint \+ book \+ browser \d s"
    with pytest.raises(lab.LabError, match=rf"^FAILED: {failed} \({words}\)$"):
        lab.do_test([])
    said = capsys.readouterr().out
    assert "aside ['test', 'lint', 'book', 'browser']" in said
    assert "aside ['test', 'notebooks']" in said
    (session,) = told
    assert session[3:7] == ("-n", "2", "--dist", "loadfile")
    assert session[-1] == "tests"
    told.clear()
    assert lab.do_test(["book", "browser"]) == 0
    assert told[0][1:] == ("book", "--saved")
    assert told[1][-3:] == ("-m", "browser", "tests/test_browser.py")


@pytest.mark.parametrize("verb", ["copies", "slides", "browser"])
@pytest.mark.parametrize("words", [["a", "b"], [""], ["--help"]])
def test_a_verb_that_writes_takes_one_folder(lab, verb, words):
    with pytest.raises(lab.LabError, match="one folder"):
        getattr(lab, f"do_{verb}")(words)


def test_pdf_needs_a_book_and_takes_one_file(lab, tmp_path, monkeypatch):
    monkeypatch.setattr(lab, "HTML", tmp_path / "html")
    with pytest.raises(lab.LabError, match=r"no book yet; run: python3 lab\.py book"):
        lab.do_pdf([])
    for words in (["--a4"], ["a", "b"], [""]):
        with pytest.raises(lab.LabError, match="one file"):
            lab.do_pdf(words)
    (tmp_path / "html").mkdir()
    (tmp_path / "html" / "index.html").touch()
    monkeypatch.setattr(lab, "python", lambda *words: print(*words) or 1)
    with pytest.raises(lab.LabError, match="no PDF was written"):
        lab.do_pdf(["my.pdf"])


def test_the_browser_site_installs_jupyterlite_once_and_says_what_it_needs(
    lab, told, monkeypatch, capsys
):
    monkeypatch.setattr(lab, "pip_install", lambda *words: told.append(words))
    for spec in (None, object()):
        monkeypatch.setattr(lab.importlib.util, "find_spec", lambda name, spec=spec: spec)
        assert lab.do_browser([]) == 0
    installed, *built = told
    assert {str(word).split("=")[0] for word in installed[:-2]} == {
        "jupyterlite-core",
        "jupyterlite-pyodide-kernel",
    }
    assert installed[-2:] == ("-c", "requirements.txt")
    assert built == [(lab.SITE, lab.BUILD / "browser")] * 2
    said = capsys.readouterr().out
    assert said.count("installing JupyterLite into .venv") == 1
    assert said.count("needs a network") == 2


def test_the_browser_site_has_copies_that_install_the_package(copies, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "copies", copies)
    site = load_script(ROOT / "book" / "browser.py")
    v4 = site.nbformat.v4
    code = v4.new_notebook(cells=[v4.new_markdown_cell("# One"), v4.new_code_cell("1")])
    text = v4.new_notebook(cells=[v4.new_markdown_cell("# Sources")])
    monkeypatch.setattr(site, "all_copies", lambda: {"a.ipynb": code, "b.ipynb": text})
    site.write_copies(tmp_path / "files")
    found = [
        json.loads((tmp_path / "files" / name).read_text("utf-8"))
        for name in ("a.ipynb", "b.ipynb")
    ]
    kinds = [[cell["cell_type"] for cell in notebook["cells"]] for notebook in found]
    assert kinds == [["markdown", "code", "code"], ["markdown"]]
    assert "".join(found[0]["cells"][1]["source"]).startswith("%pip install -q ascend-lab")
    with pytest.raises(SystemExit, match="a folder of its own"):
        site.main(tmp_path)
    assert (tmp_path / "files" / "a.ipynb").exists()


def test_a_relative_folder_for_copies_is_the_users(lab, monkeypatch, tmp_path):
    done: list[tuple[object, ...]] = []
    monkeypatch.setattr(lab, "python", lambda *words, **options: done.append((words, options)) or 0)
    monkeypatch.setattr(lab, "ensure_environment", lambda: None)
    monkeypatch.setattr(lab, "is_inside", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert lab.main(["copies", "mine"]) == 0
    assert done == [((lab.ROOT / "lab.py", "copies", "mine"), {"cwd": None})]
    assert lab.do_copies(["mine"]) == 0
    assert lab.do_copies([]) == 0
    folders = [words[0][1] for words in done[1:]]
    assert folders == [tmp_path / "mine", lab.ROOT / "my_notebooks"]


def test_git_and_clean_leave_the_readers_copies_alone(checkout):
    assert "/my_notebooks/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    (checkout / "my_notebooks").mkdir()
    assert run_lab(checkout, "clean", "--all").returncode == 0
    assert (checkout / "my_notebooks").exists()


def test_serve_answers_on_this_machine_only(checkout):
    assert "run: python3 lab.py book" in run_lab(checkout, "serve").stderr
    (checkout / "_build" / "html").mkdir(parents=True)
    (checkout / "_build" / "html" / "index.html").write_text("<p>the book</p>")
    command = [sys.executable, str(checkout / "lab.py"), "serve", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            address = server.stdout.readline().split()[1]
            assert address.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(address) as answer:
                assert answer.read() == b"<p>the book</p>"
        finally:
            server.terminate()


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX systems")
def test_ctrl_c_ends_quietly(checkout):
    (checkout / "_build" / "html").mkdir(parents=True)
    (checkout / "_build" / "html" / "index.html").write_text("")
    # A shell in the background hands down an ignored Ctrl-C; Python's own handler is wanted here.
    program = "import signal, runpy, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
    program += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", program, str(checkout / "lab.py"), "serve", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        server.send_signal(signal.SIGINT)
        _, said = server.communicate()
    assert (server.returncode, said) == (130, "lab: stopped\n")


def test_clean_keeps_sources_and_environment(checkout):
    for name in ("_build/html", ".venv/bin", "book", ".pytest_cache"):
        (checkout / name).mkdir(parents=True)
    assert run_lab(checkout, "clean").returncode == 0
    assert not (checkout / "_build").exists()
    assert not (checkout / ".pytest_cache").exists()
    assert (checkout / ".venv").exists()
    assert run_lab(checkout, "clean", "--all").returncode == 0
    assert not (checkout / ".venv").exists()
    assert (checkout / "book").exists()


# --- notebooks ------------------------------------------------------------------------------------
def write_notebook(path: Path, *sources: str) -> nbformat.NotebookNode:
    notebook = nbformat.v4.new_notebook(metadata={"custom": 1})
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in sources]
    for cell in notebook.cells:
        cell.metadata.update(execution={"iopub.status.busy": "now"}, tags=["kept"])
    nbformat.write(notebook, path)
    return notebook


def refresh(build: ModuleType, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run build.py's refresh on another folder, in a process of its own as lab.py does."""
    (folder / "book").mkdir(exist_ok=True)
    script = shutil.copy(build.__file__, folder / "book")
    shutil.copy(ROOT / "book" / "reading_time.py", folder / "book")
    command = [sys.executable, str(script), "refresh"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_refresh_keeps_ids_and_writes_the_same_twice(build, tmp_path):
    path = tmp_path / "notebooks" / "01_a.ipynb"
    path.parent.mkdir()
    widget = "import ipywidgets\nprint(1)\nipywidgets.interact(lambda k: print(k), k=(1, 5));"
    before = write_notebook(path, widget, "ipywidgets.VBox([ipywidgets.IntSlider(2)])")
    assert refresh(build, tmp_path).returncode == 0
    first = path.read_bytes()
    after = nbformat.read(path, as_version=4)
    assert [cell.id for cell in after.cells] == [cell.id for cell in before.cells]
    assert [dict(cell.metadata) for cell in after.cells] == [{"tags": ["kept"]}] * 2
    assert set(after.metadata) == {"kernelspec", "language_info"}
    assert after.cells[0].outputs[0].text == "1\n"
    assert refresh(build, tmp_path).returncode == 0
    assert path.read_bytes() == first, "no chance and no clock in what is saved"


def test_a_failing_cell_leaves_every_notebook_alone(build, tmp_path):
    (tmp_path / "notebooks").mkdir()
    paths = [tmp_path / "notebooks" / name for name in ("01_a.ipynb", "02_b.ipynb")]
    write_notebook(paths[0], "print(1)")
    write_notebook(paths[1], "1 / 0")
    before = [path.read_bytes() for path in paths]
    done = refresh(build, tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("02_b.ipynb raised an error:")
    assert "ZeroDivisionError" in done.stderr
    assert [path.read_bytes() for path in paths] == before


def test_the_names_of_refresh_are_prefixes(build, tmp_path):
    for name in ("01_a.ipynb", "02_b.ipynb"):
        write_notebook(tmp_path / name)
    assert [path.name for path in build.find_notebooks(tmp_path, ["02"])] == ["02_b.ipynb"]
    with pytest.raises(build.BuildError, match="no notebook 03"):
        build.find_notebooks(tmp_path, ["03"])


def test_the_status_table_says_what_was_run(build):
    table = build.run_times_table({"01_a.ipynb": 1.26})
    assert "| 01_a.ipynb | 1.3 |" in table
    assert "| numpy | " in table
    assert "not executed again" in build.run_times_table({})
