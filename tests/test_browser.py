"""The built book and JupyterLab in a headless Chromium: complete, offline, drawn, alive.

`lab.py test` runs these after the book is built; by hand: `pytest -m browser`. Without a Chromium
(or the one named by CHROMIUM) or without a built book they are skipped and say so.
"""

import contextlib
import html
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
from scripts import load_script

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parent.parent
BOOK = Path(os.environ.get("ASCEND_LAB_BOOK", ROOT / "_build" / "html"))
PAGES = sorted(
    path.relative_to(BOOK).as_posix()
    for path in BOOK.rglob("*.html")
    if not {"_static", "_sources", "_modules"} & set(path.parts)
)
printer = load_script(ROOT / "book" / "pdf.py")
FRAMES = "application/vnd.ascend-lab.frames+json"
Copies = dict[str, nbformat.NotebookNode]
PARTS = """width => {
  const said = e => (e.closest('[id]')?.id || '') + ': ' + e.textContent.trim().slice(0, 60);
  const wide = e => e.scrollWidth > e.clientWidth + 1;
  const all = query => [...document.querySelectorAll(query)];
  const cut = box => {  // beyond the edge of what hides it, with no way to scroll there
    const end = (box.querySelector('mjx-math') || box).getBoundingClientRect().right;
    for (let up = box.parentElement; up !== document.body; up = up.parentElement) {
      const look = getComputedStyle(up).overflowX, edge = up.getBoundingClientRect().right;
      if (look === 'hidden' || look === 'clip') { if (end > edge + 1) return true; }
      else if (look !== 'visible' && edge <= innerWidth + 1) return false;
    }
    return end > innerWidth + 1;
  };
  const code = all('.cell_input pre, div.highlight-python pre').filter(wide);
  const lost = pre => {  // its first characters, left of what scrolls or hides it
    const start = pre.getBoundingClientRect().left;
    for (let up = pre.parentElement; up !== document.body; up = up.parentElement)
      if (getComputedStyle(up).overflowX !== 'visible'
          && up.getBoundingClientRect().left > start + 1) return true;
    return false;
  };
  const printed = all('.cell_output .output.stream pre');
  const wraps = pre => getComputedStyle(pre).whiteSpace !== 'pre';
  return {
    'code wider than the column': width < 1280 ? [] : code.map(said),
    'code cut off at its left': all('.cell pre').filter(lost).map(said),
    'printed tables that wrap': width < 1280 ? printed.filter(wraps).map(said) : [],
    'printed lines that scroll': width < 1280 ? [] : printed.filter(wide).map(said),
    'formulas cut off': all('mjx-container').filter(cut).map(said),
    'the page scrolls sideways': all('html').filter(wide).map(e => e.scrollWidth),
  };
}"""
OPENED = """() => {
  document.querySelectorAll('.toggle-hidden').forEach(e => e.classList.remove('toggle-hidden'));
  document.querySelectorAll('details').forEach(fold => fold.open = true);
}"""
BITMAPS = """async () => {
  const figures = [...document.querySelectorAll('.cell_output img, figure img')];
  const kind = async image => (await (await fetch(image.src)).blob()).type;
  const kinds = await Promise.all(figures.map(kind));
  return figures.filter((_, i) => kinds[i] !== 'image/svg+xml').map(image => image.src);
}"""
AXE = Path(os.environ.get("AXE_CORE", ROOT / "node_modules" / "axe-core" / "axe.min.js"))
WCAG = """async () => (await axe.run(document, {
  runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa'], resultTypes: ['violations'],
})).violations.map(found => [found.id, ...found.nodes.map(node => node.target.join(' '))])"""


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
    try:
        found = printer.browser_path()
    except printer.PdfError as error:
        pytest.skip(str(error))
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=printer.FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """Serve the built book on loopback; return its address."""
    if not PAGES:
        pytest.skip(f"no built book in {BOOK}: run python3 lab.py book")
    with printer.served(BOOK) as address:
        yield f"{address}/"


@pytest.fixture(scope="module")
def window(browser: Browser) -> Iterator[BrowserContext]:
    """One for all pages: what one has fetched, the next one finds."""
    context = browser.new_context(viewport={"width": 1280, "height": 1600})
    context.set_default_timeout(10_000)
    yield context
    context.close()


@pytest.fixture
def page(window: BrowserContext) -> Iterator[Page]:
    page = window.new_page()
    yield page
    page.close()


def test_there_is_a_book_to_look_at(site: str) -> None:
    assert "book/index.html" in PAGES
    assert "search.html" in PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_complete_and_offline(site: str, page: Page, name: str) -> None:
    watch = Watch(page, site)
    page.goto(site + name, wait_until="networkidle")
    check_math(page)
    check_images(page)
    check_parts(page)
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


def check_images(page: Page) -> None:
    """Every picture is loaded and has an alt text."""
    page.evaluate("[...document.images].forEach(image => image.loading = 'eager')")
    page.wait_for_function("[...document.images].every(image => image.complete)")
    seen = page.evaluate(
        "[...document.images].map(image => [image.currentSrc.slice(-60), image.naturalWidth,"
        " image.alt.trim()])"
    )
    assert [name for name, width, _ in seen if not width] == [], "not loaded"
    assert [name for name, _, alt in seen if not alt] == [], "without alt text"


def check_parts(page: Page) -> None:
    """Nothing is cut off, wrapped or a bitmap, in a window on a desk and on a telephone."""
    page.evaluate(OPENED)
    assert page.evaluate(BITMAPS) == [], "bitmaps among the figures"
    for width in (1280, 420):
        page.set_viewport_size({"width": width, "height": 1600})
        found = page.evaluate(PARTS, width)
        assert {name: parts for name, parts in found.items() if parts} == {}, f"at {width} px"


def test_the_measures_of_a_page_bite(page: Page) -> None:
    long = "x" * 300
    page.set_content(
        f"<div class=cell_input><pre>{long}</pre></div>"
        f"<div class=cell_output><div class='output stream'>"
        f"<pre style='white-space: pre-wrap'>{long}</pre></div></div>"
        f"<div style='overflow: auto'><div class=cell style='margin-left: -9px'>"
        f"<pre>def f():</pre></div></div>"
        f"<div style='overflow: hidden; width: 99px'><mjx-container>{long}</mjx-container></div>"
        f"<div style='overflow: auto; width: 99px'><mjx-container>{long}</mjx-container></div>"
        "<figure><img src='data:image/png;base64,'></figure>"
    )
    found = page.evaluate(PARTS, 1280)
    assert [len(parts) for parts in found.values()] == [1, 1, 0, 1, 1, 1]
    found = page.evaluate(PARTS, 420)
    assert [len(parts) for parts in found.values()] == [0, 1, 1, 0, 1, 1]
    assert len(page.evaluate(BITMAPS)) == 1


def test_a_pdf_has_the_pages_their_formulas_and_links_that_work(
    browser: Browser, site: str, tmp_path: Path
) -> None:
    names = ["book/index.html", "notebooks/03_memory_roofline.html", "book/part1.html"]
    assert printer.print_book(browser, BOOK, tmp_path / "book.pdf", names) == 3
    made = (tmp_path / "book.pdf").read_bytes()
    assert made.startswith(b"%PDF")
    assert made.count(b"/Type /Page\n") > 15
    links = set(re.findall(rb"/Dest /([\w#.-]+)", made))
    assert {b"notebooks-03_memory_roofline", b"book-part1"} <= links
    assert any(link.startswith(b"notebooks-03_memory_roofline--") for link in links)
    assert b"/Outlines" in made
    assert not (BOOK / printer.JOINED).exists()


def test_the_pdf_takes_every_page_in_the_order_of_the_book(site: str, page: Page) -> None:
    names = printer.pages_of(page, site.rstrip("/"), BOOK)
    assert names[0] == "book/index.html"
    assert names.index("book/part1.html") < names.index("notebooks/01_simd_simt.html")
    generated = {"index.html", "search.html", "genindex.html", "py-modindex.html"}
    assert set(PAGES) - set(names) <= generated


def test_the_map_leads_to_the_chapters(site: str, page: Page) -> None:
    page.goto(site + "book/index.html", wait_until="networkidle")
    cards = page.locator(".lab-station:visible")
    assert cards.count() == 11
    beyond = """cards => cards.flatMap(card => {
      const edge = card.querySelector('.lab-card').getBoundingClientRect().right;
      const texts = [...card.querySelectorAll('text')];
      return texts.filter(t => t.getBoundingClientRect().right > edge - 4).map(t => t.textContent);
    })"""
    assert cards.evaluate_all(beyond) == []
    page.set_viewport_size({"width": 420, "height": 1600})
    assert cards.count() == 11
    assert cards.evaluate_all(beyond) == []
    edges = "cards => cards.map(card => card.getBoundingClientRect().right)"
    assert max(cards.evaluate_all(edges)) < 420, "the whole road without scrolling"
    page.locator(".lab-road a:visible", has_text="Matmul on the cube").click()
    page.wait_for_url("**/notebooks/07_matmul.html")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_keeps_the_rules_of_accessibility(site: str, page: Page, name: str) -> None:
    """No violation of WCAG A or AA that axe-core sees: on a desk, on a telephone in the dark."""
    if not AXE.exists():
        pytest.skip("npm install --no-save axe-core, or set AXE_CORE to its axe.min.js")
    page.goto(site + name, wait_until="networkidle")
    page.evaluate(OPENED)
    page.add_script_tag(path=AXE)
    for scheme, width in (("light", 1280), ("dark", 420)):
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 1600})
        # Folds fade in: half-faded letters have less contrast than those that a reader reads.
        page.evaluate("Promise.all(document.getAnimations().map(moving => moving.finished))")
        page.wait_for_function(f"document.documentElement.dataset.theme === '{scheme}'")
        assert page.evaluate(WCAG) == [], scheme


def test_a_wrong_prediction_learns_by_which_factor(site: str, page: Page) -> None:
    watch = Watch(page, site)
    page.goto(site + "notebooks/02_da_vinci_core.html", wait_until="networkidle")
    form = page.locator(".lab-guess")
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url))
    for guess, answer in (
        ("2,090", "You guessed 2,090 cycles; the model says 1,045 cycles: your guess is too high"),
        ("104.5", "your guess is too low by a factor of 10."),
        ("1000 cycles", "within 5%, well predicted."),
        ("-45", "your guess is too low by 1,090 cycles."),
        ("many", "Write a number, such as 2.5."),
    ):
        form.get_by_label("Both jobs in one program").fill(guess)
        form.get_by_role("button", name="Compare").click()
        assert answer in form.get_by_role("status").inner_text()
    form.get_by_label("Both jobs in one program").fill("3135")
    page.keyboard.press("Enter")
    assert "too high by a factor of 3." in form.get_by_role("status").inner_text()
    # Fonts and icons of the page may still arrive; nothing that was typed goes anywhere.
    assert [url for url in sent if "/_static/" not in url] == watch.errors == []


def test_every_prediction_of_a_chapter_is_a_box(site: str) -> None:
    for name in CHAPTERS:
        notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
        outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
        asked = sum("\nYour guess" in f"\n{out.get('text', '')}" for out in outputs)
        drawn = sum(FRAMES in out.get("data", {}) for out in outputs)
        text = (BOOK / "notebooks" / f"{name}.html").read_text(encoding="utf-8")
        assert text.count('class="lab-guess"') == asked, name
        assert text.count('class="lab-explore"') == drawn, name
        assert "Add guess=" not in text


def test_the_arrow_keys_move_a_slider_of_the_page(site: str, page: Page) -> None:
    watch = Watch(page, site)
    page.goto(site + "notebooks/03_memory_roofline.html", wait_until="networkidle")
    box = page.locator(".lab-explore")
    slider = box.get_by_label("tile m")
    picture, caption = box.locator("img"), box.locator(".lab-caption")
    assert "tiles of 64 × 64" in caption.inner_text()
    before = picture.get_attribute("src")
    slider.focus()
    page.keyboard.press("ArrowRight")
    box.get_by_text("tiles of 128 × 64").wait_for()
    assert slider.get_attribute("aria-valuetext") == "128"
    assert picture.get_attribute("src") != before
    page.wait_for_function("i => i.complete && i.naturalWidth > 100", arg=picture.element_handle())
    assert (watch.errors, watch.failed, watch.external) == ([], [], [])


def test_a_refused_setting_keeps_the_picture_and_says_why(site: str, page: Page) -> None:
    page.goto(site + "notebooks/04_overlap.html", wait_until="networkidle")
    box = page.locator(".lab-explore")
    before = box.locator("img").get_attribute("src")
    box.get_by_label("buffers").press("End")
    box.get_by_text("CapacityError: y_out").wait_for()
    assert box.locator("img").get_attribute("src") == before
    box.get_by_label("buffers").press("ArrowLeft")
    box.get_by_text("buffers 4:").wait_for()
    assert box.locator("img").get_attribute("src") != before


def test_a_setting_that_was_not_drawn_snaps_to_one_that_was(site: str, page: Page) -> None:
    page.goto(site + "notebooks/07_matmul.html", wait_until="networkidle")
    box = page.locator(".lab-explore")
    box.get_by_label("tile m").press("Home")
    box.get_by_label("step k").press("Home")
    said = "Not drawn together on this page; set back: tile m."
    assert box.get_by_role("status").inner_text() == said
    assert box.get_by_label("tile m").get_attribute("aria-valuetext") == "128"


def test_the_book_is_small_enough_to_hand_on(site: str) -> None:
    sizes = [file.stat().st_size for file in BOOK.rglob("*") if file.is_file()]
    assert sum(sizes) <= 80e6


def test_an_answer_is_folded_until_a_click_opens_it(site: str, page: Page) -> None:
    page.goto(site + "notebooks/08_convolution.html", wait_until="networkidle")
    fold = page.locator("details.hide", has=page.get_by_text("Show the answer")).first
    answer = fold.locator("pre", has_text="The model says")
    assert not answer.is_visible()
    fold.locator("summary").click()
    assert answer.is_visible()


def test_the_search_box_finds_the_double_buffer(site: str, page: Page) -> None:
    watch = Watch(page, site)
    page.goto(site + "book/index.html", wait_until="networkidle")  # leaving early aborts requests
    page.keyboard.press("Control+k")
    box = page.locator(".search-button__wrapper.show input[name=q]")
    box.fill("double buffer")
    box.press("Enter")
    page.wait_for_url("**/search.html?q=double*")
    page.wait_for_selector("ul.search li a")
    page.wait_for_load_state("networkidle")
    assert page.locator("ul.search li").count() >= 1
    assert (watch.errors, watch.failed, watch.external) == ([], [], [])


# --- JupyterLab -----------------------------------------------------------------------------------

CELL = """
from ascend_lab.lab.figures import fig_core_path
from ascend_lab.lab.widgets import explore

explore(fig_core_path, size_kib=(1, 32, 1))
"""


@pytest.fixture(scope="module")
def jupyterlab(tmp_path_factory: pytest.TempPathFactory, copies: ModuleType) -> Iterator[str]:
    """Start JupyterLab on a small notebook and the copies, with settings of its own."""
    tmp_path = tmp_path_factory.mktemp("lab")
    notebook = nbformat.v4.new_notebook()
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    notebook.cells = [nbformat.v4.new_code_cell(CELL.strip())]
    (tmp_path / "work").mkdir()
    nbformat.write(notebook, tmp_path / "work" / "slider.ipynb")
    copies.write_copies(tmp_path / "work")
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


@pytest.fixture(scope="module")
def made(copies: ModuleType) -> Copies:
    return copies.all_copies()


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


@pytest.mark.parametrize(
    ("name", "title", "caption", "check"),
    [
        ("02_da_vinci_core", "Exercise 2.3: The deepest tile", "Figure 2.1. Data", "ex_02_3"),
        ("08_convolution", "Exercise 8.2: The address generator", "Figure 8.4. Below", "ex_08_2"),
        ("22_collectives", "Exercise 22.4: Two levels", "Figure 22.1. A ring", "ex_22_4"),
    ],
)
def test_a_copy_opens_cleanly_in_jupyterlab(
    jupyterlab: str, page: Page, made: Copies, name: str, title: str, caption: str, check: str
) -> None:
    page.set_default_timeout(60_000)
    watch = Watch(page, jupyterlab)
    page.goto(f"{jupyterlab}lab/tree/{name}.ipynb?reset")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    page.get_by_text("| Idle").wait_for()
    page.locator("h3", has_text=title).wait_for()
    page.locator(".jp-RenderedMarkdown p", has_text=caption).wait_for()
    solutions = sum("<details>" in cell.source for cell in made[f"{name}.ipynb"].cells)
    page.wait_for_function(f"document.querySelectorAll('details').length === {solutions}")
    page.wait_for_function("document.querySelectorAll('mjx-container').length > 9")
    assert page.locator("mjx-merror, [data-mjx-error]").count() == 0
    seen = "\n".join(page.locator(".jp-RenderedMarkdown").all_text_contents())
    assert not re.search(r"\{(cite|glue|numref|eq|ref|exercise|solution|math)\b|:label:|```", seen)
    assert not re.search(r"\]\((#|https:|\w+\.ipynb)|</?details|<a ", seen)
    assert page.locator("details[open]").count() == 0
    assert not any(code.is_visible() for code in page.locator("details pre").all())
    assert page.get_by_text(re.compile(r"^ex \d+\.\d+ (passed|not yet)")).count() == 0
    assert page.get_by_text(re.compile(r"the model says", re.IGNORECASE)).count() == 0
    cells = page.locator(".jp-Notebook .jp-CodeCell")
    stub = cells.filter(has_text=f"checks.check_{check}(")
    for cell in (cells.first, stub):
        cell.locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")
    stub.locator(".jp-OutputArea", has_text="not yet:").wait_for()
    page.locator("summary").last.click()
    page.locator("details[open]").wait_for()
    assert watch.external == []


# --- the copies against the pages -----------------------------------------------------------------

CHAPTERS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_copy_says_the_numbers_of_the_page(site: str, made: Copies, name: str) -> None:
    """Filled-in values, and the numbers of figures, formulas and exercises, are the page's own."""
    page = html.unescape((BOOK / "notebooks" / f"{name}.html").read_text(encoding="utf-8"))
    source = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    cells = made[f"{name}.ipynb"].cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    roles = [
        role
        for cell in source.cells
        if cell.cell_type == "markdown"
        for role in re.finditer(r"([\w ,;(]*)\{glue:text\}`[^`]+`", cell.source)
    ]
    values = re.findall(r'class="pasted-text">([^<]*)<', page)
    assert len(values) == len(roles)
    for role, value in zip(roles, values, strict=True):
        assert role[1] + value in text
    assert re.findall(r'"caption-number">Fig. ([\d.]+) ', page) == re.findall(
        r"^\*\*Figure ([\d.]+)\.\*\*", text, re.MULTILINE
    )
    assert re.findall(r'"eqno">\(([\d.]+)\)', page) == re.findall(r"\\tag\{([\d.]+)\}", text)
    assert re.findall(r'"caption-number">Exercise ([\d.]+) ', page) == re.findall(
        r"^### Exercise ([\d.]+):", text, re.MULTILINE
    )
