"""Print the built book as one PDF whose links work: `lab.py pdf`, by a headless browser.

python book/pdf.py HTML FILE [PAGE ...]

Each page is drawn as a reader sees it, formulas and sliders included. What lies in its article is
taken out, with all that is folded open and links made to lead inside; the articles, one behind the
other, are printed.
"""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Error, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "msedge")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NO_BROWSER = (
    "a PDF needs Chromium, Chrome or Edge, and none is in PATH; "
    "install one, or set CHROMIUM to the path of yours"
)
JOINED = "_joined.html"

CONTENTS = """() => [location, ...document.querySelectorAll('nav.bd-links a[href]')]
    .map(link => link.href.split('#')[0])"""

DRAWN = """() => {
  document.querySelectorAll('img').forEach(image => image.loading = 'eager');
  const all = query => [...document.querySelectorAll(query)];
  return all('.math').every(m => m.querySelector('mjx-container'))
    && [...document.images].every(image => image.complete);
}"""

ARTICLE = """slugs => {
  const live = document.querySelector('article.bd-article'), copy = live.cloneNode(true);
  const all = query => [...copy.querySelectorAll(query)];
  const slug = slugs[location.pathname];
  const sources = [...live.querySelectorAll('img')].map(image => image.src);
  all('img').forEach((image, i) => { image.src = sources[i]; image.removeAttribute('loading'); });
  all('script, button, .headerlink, .copybtn, mjx-assistive-mml').forEach(part => part.remove());
  all('details').forEach(fold => fold.open = true);
  all('.toggle-hidden').forEach(fold => fold.classList.remove('toggle-hidden'));
  all('[id]').forEach(part => part.id = slug + '--' + part.id);
  all('a[href]').forEach(link => {
    const to = new URL(link.getAttribute('href'), location.href);
    if (to.origin !== location.origin) return;
    const there = slugs[to.pathname];
    if (!there) link.removeAttribute('href');
    else link.setAttribute('href', '#' + there + (to.hash ? '--' + to.hash.slice(1) : ''));
  });
  const own = document.querySelector('style#MJX-CHTML-styles');
  return {
    html: `<section class="lab-page" id="${slug}">${copy.innerHTML}</section>`,
    rules: own ? [...own.sheet.cssRules].map(rule => rule.cssText) : [],
    sheets: [...document.querySelectorAll('link[rel=stylesheet]')].map(sheet => sheet.href),
  };
}"""


class PdfError(Exception):
    """Something the reader has to put right; the message says what."""


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves without writing a line per request."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class' name
        """Say nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine only; give its address."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def browser_path() -> str:
    """Return the path of a browser that prints, or raise."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None or not Path(found).exists():
        raise PdfError(NO_BROWSER)
    return found


def pages_of(page: Page, site: str, html: Path) -> list[str]:
    """Return the addresses of the book's pages, below `site`, in the order of its contents."""
    page.goto(f"{site}/book/index.html", wait_until="networkidle")
    listed = [address.removeprefix(f"{site}/") for address in page.evaluate(CONTENTS)]
    return [name for name in dict.fromkeys(listed) if (html / name).is_file()]


def joined(page: Page, site: str, names: Sequence[str]) -> str:
    """Return one page that holds the articles of all, drawn."""
    slugs = {f"/{name}": name.removesuffix(".html").replace("/", "-") for name in names}
    parts, rules, sheets = [], {}, {}
    for name in names:
        page.goto(f"{site}/{name}", wait_until="networkidle")
        page.wait_for_function(DRAWN)
        drawn = page.evaluate(ARTICLE, slugs)
        parts.append(drawn["html"])
        rules |= dict.fromkeys(drawn["rules"])
        sheets |= dict.fromkeys(drawn["sheets"])
    links = "".join(f'<link rel="stylesheet" href="{sheet}">' for sheet in sheets)
    return (
        f'<!DOCTYPE html><html lang="en" data-theme="light"><head><meta charset="utf-8">'
        f"<title>NPUs and their compilers</title>{links}<style>{''.join(rules)}</style></head>"
        f'<body><div class="bd-article-container lab-print"><article class="bd-article">'
        f"{''.join(parts)}</article></div></body></html>"
    )


def print_book(browser: Browser, html: Path, target: Path, names: Sequence[str] = ()) -> int:
    """Print the pages `names` (all, in the book's order, if none) to `target`; return how many."""
    beside = html / JOINED
    with served(html) as site:
        page = browser.new_page(viewport={"width": 1280, "height": 1600}, color_scheme="light")
        page.set_default_timeout(120_000)
        try:
            names = names or pages_of(page, site, html)
            beside.write_text(joined(page, site, names), encoding="utf-8")
            page.goto(f"{site}/{JOINED}", wait_until="networkidle")
            page.pdf(
                path=target,
                prefer_css_page_size=True,
                print_background=True,
                outline=True,
                tagged=True,
            )
        finally:
            beside.unlink(missing_ok=True)
            page.close()
    return len(names)


def main(arguments: list[str]) -> int:
    """Print the book and say where it lies."""
    html, target, names = Path(arguments[0]), Path(arguments[1]), arguments[2:]
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=browser_path(), args=FLAGS)
            count = print_book(browser, html, target, names)
            browser.close()
    except (PdfError, Error, OSError) as error:
        print(f"{error}".splitlines()[0], file=sys.stderr)
        return 1
    print(f"lab: {count} pages of the book, {target.stat().st_size / 1e6:.0f} MB: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
