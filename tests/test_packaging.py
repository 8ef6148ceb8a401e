"""The wheel alone is enough: built from the checkout, installed in an empty environment, used."""

import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import tomllib
import venv
import zipfile
from email.parser import Parser
from importlib.metadata import distributions
from pathlib import Path

import numpy as np
import pytest
from packaging.specifiers import SpecifierSet

import ascend_lab
from ascend_lab.cli import aoe as aoe_main, ascend_lab as ascend_lab_main
from ascend_lab.compiler import GraphBuilder
from ascend_lab.compiler.onnx.export import save_onnx
from ascend_lab.machine.chip import PRESETS

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def run(*command: object, cwd: Path = Path(ROOT.anchor)) -> str:
    """Run a command outside the checkout and return what it printed."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build from a copy of what belongs to the package: building leaves files behind."""
    source = tmp_path_factory.mktemp("source")
    out = tmp_path_factory.mktemp("wheel")
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "ascend_lab", source / "ascend_lab", ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE", "LICENSE-TEXT"):
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, source)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel, and nothing of this checkout, in an empty environment."""
    home = tmp_path_factory.mktemp("empty env")
    venv.create(home, with_pip=False)
    paths = sysconfig.get_paths("venv", vars={"base": str(home), "platbase": str(home)})
    python = next(Path(paths["scripts"]).glob("python*"))
    # The dependencies come from here, so that no index is needed. A path line in a .pth file does
    # not read that folder's own .pth files: an editable install of the checkout stays out.
    here = sysconfig.get_path("purelib")
    (Path(paths["purelib"]) / "dependencies.pth").write_text(here + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    run(*pip, "install", "--no-index", "--no-deps", "--force-reinstall", wheel)
    return Path(paths["scripts"])


def python_in(scripts: Path) -> Path:
    return scripts / ("python.exe" if sys.platform == "win32" else "python")


def test_the_wheel_holds_the_package_and_its_data_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    own = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    there = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "ascend_lab").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert own == there
    assert {f"ascend_lab/machine/chip/presets/{chip}.toml" for chip in PRESETS} <= own
    assert "ascend_lab/py.typed" in own
    assert {Path(name).name for name in names if "/licenses/" in name} == {
        "LICENSE",
        "LICENSE-TEXT",
    }


def test_the_metadata_ask_for_ranges_not_pins(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode("utf-8"))
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {re.split(r"[<>=~ ]", line)[0] for line in needed} == {
        "numpy",
        "matplotlib",
        "ipywidgets",
        "ml_dtypes",
        "onnx",
        "tqdm",
    }
    assert not any("==" in line for line in needed)
    extras = {"fast", "exact", "scale", "serve", "torch", "browser", "book", "dev"}
    assert set(metadata.get_all("Provides-Extra", [])) == extras


def test_the_installed_package_is_the_wheels(scripts: Path) -> None:
    program = (
        "import ascend_lab, sys; print(ascend_lab.__file__); print('matplotlib' in sys.modules)"
    )
    place, loaded = run(python_in(scripts), "-W", "error", "-c", program).splitlines()
    assert Path(place).is_relative_to(scripts.parent)
    assert loaded == "False", "importing the package must stay light"


def test_what_the_readme_shows_runs(
    scripts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each script's first line, and the first program, run as installed; the rest in this process:
    the wheel is file by file what is tested here."""
    text = (ROOT / "README.md").read_text("utf-8")
    (tmp_path / "notebooks").mkdir()
    shutil.copy(ROOT / "notebooks" / "my_kernel.py", tmp_path / "notebooks")
    for place in ("tests/data", "ascend_lab/data", "course"):
        shutil.copytree(ROOT / place, tmp_path / place)
    write_model(tmp_path)
    lines = re.findall(r"^(ascend-lab|aoe) (.+)$", text, re.MULTILINE)
    assert {words.split()[0] for script, words in lines if script == "ascend-lab"} == {
        "chips", "gemm", "conv", "op", "run-kernel", "simulate", "run", "plan-memory", "replay",
        "subgraph", "collective", "fit-collective", "strategy", "train-plan",
        "topologies", "gradient-plan", "compile", "quantize", "calibrate", "migrate", "zoo", "aipp",
        "serve-sim", "course", "compare", "llm",
    }  # fmt: skip
    monkeypatch.setenv("ASCEND_CACHE_PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    mains = {"ascend-lab": ascend_lab_main, "aoe": aoe_main}
    installed = set(mains)
    for script, words in lines:
        if script in installed:
            installed.remove(script)
            assert run(scripts / script, *words.split(), cwd=tmp_path)
        else:
            assert mains[script](words.split()) == 0
    assert all((tmp_path / name).exists() for name in ("gemm.json", "network.json", "outputs.npz"))
    programs = re.findall(r"^```python\n((?:from|import) .+?)^```", text, re.MULTILINE | re.DOTALL)
    small = 'zoo.build("squeezenet"', 'zoo.build("squeezenet", size=32'  # the same in a fifth
    said = [run(python_in(scripts), "-c", programs[0])]
    for program in programs[1:]:
        capsys.readouterr()
        exec(program.replace(*small).replace("budget=32", "budget=4"), {})
        said.append(capsys.readouterr().out)
    assert len(said) == 5
    assert re.match(r"\d+ \w+ \{", said[0])
    assert "KernelTimeline(y: 1 phases" in said[1]
    assert "TbeConv" in said[2]
    assert "improved by" in said[3]
    assert re.match(r"hierarchical.* \d", said[4])
    (heart,) = re.findall(r"^```python\n(with .+?)^```", text, re.MULTILINE | re.DOTALL)
    kernel = (ROOT / "notebooks" / "my_kernel.py").read_text("utf-8")
    assert textwrap.indent(heart, "    ") in kernel


SERVER = """
[service]
law = "deterministic"
mean_s = 0.002
per_item_s = 0.0005
[arrivals]
law = "poisson"
rate_per_s = 800
[server]
instances = 1
max_batch = 8
[run]
requests = 2000
seed = 1
"""


def write_model(folder: Path) -> None:
    """Write the files that the README's command lines name."""
    net = GraphBuilder("small")
    x = net.input("x", (1, 3, 8, 8))
    net.output(net.relu(net.conv2d(x, net.weight((4, 3, 3, 3)), pad=1)))
    save_onnx(net.build(), folder / "model.onnx")
    np.savez(folder / "inputs.npz", x=np.ones((1, 3, 8, 8), np.float32))
    np.save(folder / "values.npy", np.linspace(-1, 2, 64, dtype=np.float32))
    np.save(folder / "frame.npy", np.arange(24, dtype=np.uint8))
    (folder / "camera.cfg").write_text(
        "aipp_op { aipp_mode: static input_format: RGB888_U8 "
        "src_image_size_w: 4 src_image_size_h: 2 }"
    )
    (folder / "server.toml").write_text(SERVER)
    (folder / "handed_in").mkdir()
    shutil.copy(ROOT / "course" / "A1_kernel" / "start.py", folder / "handed_in" / "ada.py")
    (folder / "term.toml").write_text('secret = "of this test"')


@pytest.mark.parametrize("version", ["3.11.2", "3.12.0", "3.13.0"])
def test_every_pin_installs_on_a_fresh_machine(version: str) -> None:
    """Debian 12 has Python 3.11.2: a package that asks for a later 3.11 must not be pinned."""
    refused = [
        f"{dist.name} {dist.version} needs Python {dist.metadata['Requires-Python']}"
        for dist in distributions()
        if not SpecifierSet(dist.metadata.get("Requires-Python") or "").contains(version)
    ]
    assert refused == []


def test_the_version_is_the_same_everywhere() -> None:
    version = PROJECT["version"]
    assert ascend_lab.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text("utf-8")
