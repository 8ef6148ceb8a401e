"""The built book and JupyterLab in a headless Chromium: complete, offline, drawn, alive.

`lab.py test` runs these after the book is built; by hand: `pytest -m browser`. Without a Chromium
(or the one named by CHROMIUM) or without a built book they are skipped and say so.
"""

import contextlib
import functools
import http.server
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser, Page, sync_playwright

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parent.parent
BOOK = Path(os.environ.get("ASCEND_LAB_BOOK", ROOT / "_build" / "html"))
PAGES = sorted(
    path.relative_to(BOOK).as_posix()
    for path in BOOK.rglob("*.html")
    if "_static" not in path.parts and "_sources" not in path.parts
)
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "msedge")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
CUT_FORMULAS = """[...document.querySelectorAll('mjx-container[display]')]
    .filter(box => box.scrollWidth > box.clientWidth + 1)
    .map(box => box.closest('div.math').id || box.innerText)"""
WIDGET_VIEW = 'script[type="application/vnd.jupyter.widget-view+json"]'


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves without writing a line per request."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class' name
        pass


class Watch:
    """Everything a page did wrong: console errors, failed requests, requests to other machines."""

    def __init__(self, page: Page, home: str) -> None:
        self.errors: list[str] = []
        self.external: list[str] = []
        self.failed: list[str] = []
        self.home = home
        page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.note(request.url))
        page.on("requestfailed", lambda request: self.failed.append(request.url))
        page.on("response", lambda r: self.failed.append(r.url) if r.status >= 400 else None)

    def note(self, url: str) -> None:
        if not url.startswith((self.home, "data:", "blob:", "about:")):
            self.external.append(url)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium in PATH: install one or set CHROMIUM to run the browser tests")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """Serve the built book on loopback; return its address."""
    if not PAGES:
        pytest.skip(f"no built book in {BOOK}: run python3 lab.py book")
    handler = functools.partial(Quiet, directory=str(BOOK))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 1600})
    context.set_default_timeout(10_000)
    yield context.new_page()
    context.close()


def test_there_is_a_book_to_look_at(site: str) -> None:
    assert "book/index.html" in PAGES
    assert "search.html" in PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_complete_and_offline(browser: Browser, site: str, page: Page, name: str) -> None:
    watch = Watch(page, site)
    page.goto(site + name, wait_until="networkidle")
    check_math(page)
    check_widgets(page)
    check_images(page)
    assert (watch.errors, watch.failed, watch.external) == ([], [], [])


def check_math(page: Page) -> None:
    """Every formula is typeset, none as an error."""
    formulas = page.locator(".math:not(.math .math)").count()
    if formulas:
        page.wait_for_function("document.querySelectorAll('mjx-container').length > 0")
        page.wait_for_function(
            "[...document.querySelectorAll('.math')].every(m => m.querySelector('mjx-container'))"
        )
        assert page.locator("mjx-merror, [data-mjx-error]").count() == 0
        assert page.evaluate(CUT_FORMULAS) == [], "formulas wider than the page"
        page.set_viewport_size({"width": 420, "height": 1600})
        assert "equation-eq-conv-sizes" not in page.evaluate(CUT_FORMULAS)
        page.set_viewport_size({"width": 1280, "height": 1600})


def check_widgets(page: Page) -> None:
    """Every saved widget view became a widget that takes room on the page."""
    views = page.locator(WIDGET_VIEW).count()
    if views:
        page.wait_for_function(f"document.querySelectorAll('.widget-subarea').length >= {views}")
        page.wait_for_function(
            "[...document.querySelectorAll('.widget-subarea')].every("
            "area => area.querySelector('.jupyter-widgets')?.getBoundingClientRect().height > 4)"
        )
        # Icon fonts load when an icon is drawn, which is a matter of chance; ask for all of them.
        page.evaluate("Promise.all([...document.fonts].map(font => font.load()))")


def check_images(page: Page) -> None:
    """Every picture is loaded and has an alt text (a widget's stands as text below it)."""
    page.evaluate("[...document.images].forEach(image => image.loading = 'eager')")
    page.wait_for_function("[...document.images].every(image => image.complete)")
    seen = page.evaluate(
        "[...document.images].map(image => [image.currentSrc.slice(-60), image.naturalWidth,"
        " image.closest('.jupyter-widgets') ? 'below' : image.alt.trim()])"
    )
    assert [name for name, width, _ in seen if not width] == [], "not loaded"
    assert [name for name, _, alt in seen if not alt] == [], "without alt text"


def test_the_search_box_finds_the_double_buffer(site: str, page: Page) -> None:
    watch = Watch(page, site)
    page.goto(site + "book/index.html")
    page.keyboard.press("Control+k")
    box = page.locator(".search-button__wrapper.show input[name=q]")
    box.fill("double buffer")
    box.press("Enter")
    page.wait_for_url("**/search.html?q=double*")
    page.wait_for_selector("ul.search li a")
    assert page.locator("ul.search li").count() >= 1
    assert (watch.errors, watch.failed, watch.external) == ([], [], [])


# --- JupyterLab -----------------------------------------------------------------------------------

CELL = """
from ascend_lab.figures.core_map import fig_core_path
from ascend_lab.widgets import explore

explore(fig_core_path, size_kib=(1, 32, 1))
"""


@pytest.fixture
def jupyterlab(tmp_path: Path) -> Iterator[str]:
    """Start JupyterLab on a small notebook, with settings of its own; return its address."""
    notebook = nbformat.v4.new_notebook()
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    notebook.cells = [nbformat.v4.new_code_cell(CELL.strip())]
    (tmp_path / "work").mkdir()
    nbformat.write(notebook, tmp_path / "work" / "slider.ipynb")
    settings = tmp_path / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    quiet = {"fetchNews": "false", "checkForUpdates": False}
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(quiet))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {f"JUPYTER_{name}_DIR": str(tmp_path / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    own |= {f"JUPYTERLAB_{n}_DIR": str(tmp_path / n.lower()) for n in ("WORKSPACES", "SETTINGS")}
    options = [
        f"--port={port}",
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        "--IdentityProvider.token=",
        "--ServerApp.password=",
        "--ServerApp.disable_check_xsrf=True",
        "--LabApp.extension_manager=readonly",
    ]
    command = [sys.executable, "-m", "jupyterlab", *options, str(tmp_path / "work")]
    address = f"http://127.0.0.1:{port}/"
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log) as server,
    ):
        try:
            wait_for(address + "api/status", server, tmp_path / "log")
            yield address
        finally:
            server.terminate()
            server.wait(30)


def wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Return once the server answers; fail with its log when it ends or a minute has passed."""
    for _ in range(300):
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(address):
            return
        if server.poll() is not None:
            break
        time.sleep(0.2)
    pytest.fail("JupyterLab did not start:\n" + log.read_text())


def test_a_slider_in_jupyterlab_redraws_the_figure(jupyterlab: str, page: Page) -> None:
    page.set_default_timeout(60_000)
    watch = Watch(page, jupyterlab)
    page.goto(jupyterlab + "lab/tree/slider.ipynb?reset")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    page.get_by_text("| Idle").wait_for()  # the kernel is connected; before, "run" does nothing
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.locator('li.lm-Menu-item[data-command="runmenu:run-all"]').click()
    handle = page.locator(".jp-OutputArea .noUi-handle").first
    picture = page.locator(".jp-OutputArea .widget-image, .jp-OutputArea img").first
    handle.wait_for()
    before = picture.get_attribute("src")
    handle.focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    page.wait_for_function(
        "([image, old]) => image.src !== old && image.complete && image.naturalWidth > 100",
        arg=[picture.element_handle(), before],
    )
    assert watch.external == []
