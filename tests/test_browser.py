"""The rendered book as a reader meets it: its files opened in Chromium, without a network.

The book is that of _build if it is newer than its sources, else one that is made here of the smoke
set. Where there is no Chromium the tests are skipped, but under CI they fail.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
import yaml

import build as runner

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

PROJECT = Path(__file__).resolve().parents[1]
TOC = yaml.safe_load((PROJECT / "_toc.yml").read_text("utf-8"))
PAGES = [f"{name}.html" for name in runner.toc_files(TOC)]
CHROMIUM = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"]
SCHEMES = ["light", "dark"]
PHONE, DESKTOP = 400, 1300
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]

UNFOLD = "for (const folded of document.querySelectorAll('details')) folded.open = true"
LINKS = "[...document.links].map(link => link.href)"
# Until sidebars stand still and those who watch for new sizes have seen them; an animation that
# never comes to its end is not waited for.
SETTLE = """async () => {
  const frame = () => new Promise(requestAnimationFrame);
  const settled = async () => {
    await frame();
    await Promise.all(document.getAnimations().map(animation => animation.finished));
    await frame();
    await frame();
  };
  await Promise.race([settled(), new Promise(done => setTimeout(done, 3000))]);
}"""

CONTENT_FAULTS = r"""() => {
  const faults = [];
  const broken = "math merror, .math:not(:has(math)), math:not(:has(*))";
  for (const formula of document.querySelectorAll(broken)) {
    faults.push(`no formula: ${formula.textContent}`);
  }
  for (const warning of document.querySelectorAll(".stderr")) {
    faults.push(`a warning: ${warning.textContent}`);
  }
  for (const formula of document.querySelectorAll("main math")) {
    const { width, height } = formula.getBoundingClientRect();
    if (!width || !height) faults.push(`invisible formula: ${formula.textContent}`);
  }
  const texts = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const { data, parentElement } = texts.currentNode;
    if (/\$|\\[([]/.test(data) && !parentElement.closest("code, pre, script, style")) {
      faults.push(`raw formula: ${data}`);
    }
  }
  return faults;
}"""

# What scrolls in a box of its own must be within reach of the keyboard, and nothing may be cut off.
WIDTH_FAULTS = """() => {
  const faults = [];
  const { scrollWidth } = document.scrollingElement;
  if (scrollWidth > innerWidth + 1) faults.push(`the page is ${scrollWidth} wide`);
  for (const box of document.querySelectorAll("main, main :not(math *)")) {
    const { overflowX } = getComputedStyle(box);
    if (overflowX == "visible" || !box.clientWidth) continue;
    if (box.scrollWidth <= box.clientWidth + 1) continue;
    const cut = overflowX == "hidden" || overflowX == "clip" || matchMedia("print").matches;
    if (cut || box.tabIndex < 0) {
      const fault = cut ? "cut off" : "out of reach";
      faults.push(`${fault}: ${box.localName}.${box.className} ${box.textContent.slice(0, 60)}`);
    }
  }
  return faults;
}"""

# Axe takes its time for each element. A coloured word of each kind will do in code; and contrast
# depends on colours, sizes and grounds alone, so one text of each combination will do for it.
AXE = """async only => {
  const words = new Set();
  for (const word of document.querySelectorAll("pre span, .sig span")) {
    const kind = `${word.className} ${word.closest("pre, .sig").parentElement.className}`;
    if (words.has(kind)) word.replaceWith(...word.childNodes);
    words.add(kind);
  }
  document.querySelectorAll("pre, .sig").forEach(block => block.normalize());
  const kinds = new Map();
  const look = (element, above) => {
    element.removeAttribute("data-sample");
    const style = getComputedStyle(element);
    if (style.display == "none") return;
    const { backgroundColor, backgroundImage, color, fontSize, fontWeight, opacity } = style;
    const ground = `${above}/${backgroundColor} ${backgroundImage} ${opacity}`
      .replace("/rgba(0, 0, 0, 0) none 1", "");
    const texts = [...element.childNodes].filter(node => node.nodeType == Node.TEXT_NODE);
    const length = Math.max(...texts.map(node => node.data.trim().length));
    const kind = `${ground} ${color} ${fontSize} ${fontWeight}`;
    // The longest that shows, since axe says nothing of a single letter or of what is hidden.
    const shows = style.visibility == "visible" && element.getBoundingClientRect().width > 1;
    if (shows && length > (kinds.get(kind)?.length ?? 0)) kinds.set(kind, { element, length });
    for (const child of element.children) look(child, ground);
  };
  look(document.body, "");
  for (const { element } of kinds.values()) element.dataset.sample = "";
  axe.configure({ rules: [{ id: "color-contrast", selector: "[data-sample]" }] });
  const options = { runOnly: only, preload: false, resultTypes: ["violations"] };
  const faults = [];
  for (const { id, nodes } of (await axe.run(options)).violations) {
    for (const { html, failureSummary } of nodes) {
      faults.push(`${id}: ${html.slice(0, 200)} ${failureSummary}`);
    }
  }
  return faults;
}"""

# What has the focus, whether it is on the screen, and whether it looks otherwise than without.
FOCUSED = """() => {
  const focused = document.activeElement;
  const look = () => {
    const { outlineStyle, outlineWidth, boxShadow } = getComputedStyle(focused);
    return [outlineStyle, outlineWidth, boxShadow].join();
  };
  const { top, bottom } = focused.getBoundingClientRect();
  const seen = look();
  focused.blur();
  const unseen = look();
  focused.focus({ preventScroll: true });
  return [focused.parentElement.id + focused.localName + "." + focused.className,
          bottom > 0 && top < innerHeight && seen != unseen];
}"""


def skip_unless_ci(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(f"{reason}, and CI must not do without")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if not chromium:
        skip_unless_ci(f"no Chromium found by the names {', '.join(CHROMIUM)}")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        skip_unless_ci("playwright is not installed")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=chromium)
        yield started
        started.close()


@pytest.fixture(scope="module")
def html(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the rendered book."""
    made = PROJECT / "_build" / "html" / "index.html"
    sources = [PROJECT / "_config.yml", PROJECT / "_toc.yml"]
    sources += [path for part in ("book", "qdq") for path in (PROJECT / part).rglob("*")]
    newest = max(path.stat().st_mtime for path in sources if path.suffix not in ("", ".pyc"))
    if made.exists() and made.stat().st_mtime > newest:
        return made.parent
    # The copy has the notebooks that are run already.
    copy = tmp_path_factory.mktemp("project")
    leave = shutil.ignore_patterns(".*", "__pycache__", "html", "stage")
    shutil.copytree(PROJECT, copy, ignore=leave, dirs_exist_ok=True)
    command = [sys.executable, "book/build.py", "--params", "smoke"]
    subprocess.run(command, cwd=copy, check=True)
    return copy / "_build" / "html"


@pytest.fixture(scope="module")
def anchors(html: Path) -> dict[Path, set[str]]:
    """Return the names that a link can go to, on each page."""
    name = re.compile(r'\bid="([^"]+)"')
    return {page: set(name.findall(page.read_text("utf-8"))) for page in html.rglob("*.html")}


@dataclass
class Opened:
    page: Page
    faults: list[str] = field(default_factory=list)

    def look(self, *, scheme: str = "light", width: int = DESKTOP, media: Any = "screen") -> Page:
        self.page.emulate_media(color_scheme=scheme, media=media)  # type: ignore[arg-type]
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.evaluate(SETTLE)
        return self.page


def open_page(browser: Browser, path: Path) -> Opened:
    """Open a page in a browser that knows none yet, and note what goes wrong from now on."""
    opened = Opened(browser.new_context().new_page())
    page, faults = opened.page, opened.faults
    page.route(re.compile("^(https?|wss?):"), lambda route: route.abort())
    page.on("request", lambda r: faults.append(f"asked for {r.url}") if "http" in r.url[:4] else 0)
    page.on("requestfailed", lambda request: faults.append(f"did not get {request.url}"))
    page.on("pageerror", lambda error: faults.append(f"script error: {error}"))
    page.on("console", lambda m: faults.append(m.text) if m.type in ("error", "warning") else None)
    page.goto(path.as_uri())
    return opened


@pytest.fixture(scope="module", params=PAGES)
def opened(request: pytest.FixtureRequest, browser: Browser, html: Path) -> Iterator[Opened]:
    """Open each page of the book once, for all tests of it."""
    opened = open_page(browser, html / request.param)
    opened.page.evaluate(UNFOLD)
    yield opened
    opened.page.context.close()


# --------------------------------------------------------------------------------------------------
# Every page
# --------------------------------------------------------------------------------------------------


def test_nothing_is_missing_or_comes_from_elsewhere(
    opened: Opened, html: Path, anchors: dict[Path, set[str]]
) -> None:
    page = opened.look()
    assert opened.faults == []
    assert page.evaluate(CONTENT_FAULTS) == []
    for link in page.evaluate(LINKS):
        address = urlsplit(link)
        if address.scheme == "file":
            target = Path(url2pathname(address.path))
            assert target.is_file(), link
            assert html in target.parents, link
            assert not address.fragment or address.fragment in anchors[target], link
        else:
            assert address.scheme in ("http", "https", "mailto"), link


def test_images_show_something_and_say_what(opened: Opened) -> None:
    from PIL import Image

    images = opened.page.evaluate(
        "[...document.images].map(image => [image.src, image.alt, image.naturalWidth])"
    )
    for source, alt, width in images:
        path = Path(url2pathname(urlsplit(source).path))
        assert width > 0, path
        with Image.open(path) as image:
            assert any(low < high for low, high in image.convert("RGB").getextrema()), path
        assert len(alt.split()) > 3, (path, alt)
        assert path.stem not in alt
    assert len({alt for _, alt, _ in images}) == len(images)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_width_makes_the_page_scroll_sideways(opened: Opened, scheme: str) -> None:
    for width in (PHONE, 768, DESKTOP, 2000):
        page = opened.look(scheme=scheme, width=width)
        assert page.get_attribute("html", "data-theme") == scheme
        assert page.evaluate(WIDTH_FAULTS) == [], width


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_axe_finds_no_fault(opened: Opened, scheme: str, width: int) -> None:
    base = pytest.importorskip("axe_playwright_python.base")
    page = opened.look(scheme=scheme, width=width)
    page.evaluate(base.AXE_SCRIPT)
    # The other rules know no colours.
    assert page.evaluate(AXE, RULES if scheme == "light" else ["color-contrast"]) == []


def test_paper_shows_the_text_alone_and_all_of_it(opened: Opened) -> None:
    page = opened.look(width=718, media="print")  # A4 between margins of a centimetre
    for beside in (".bd-sidebar-primary", ".bd-sidebar-secondary", ".bd-header-article"):
        assert not page.locator(beside).first.is_visible(), beside
    assert page.locator("main h1").first.is_visible()
    assert page.evaluate(WIDTH_FAULTS) == []


# --------------------------------------------------------------------------------------------------
# Keyboard and search, on one page
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(browser: Browser, html: Path) -> Iterator[Opened]:
    """Open a page as it is at first, and see that all went well in the end."""
    opened = open_page(browser, html / "book" / "scenarios" / "homogeneous.html")
    yield opened
    assert opened.faults == []
    opened.page.context.close()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_keyboard_reaches_everything_and_shows_where_it_is(fresh: Opened, scheme: str) -> None:
    page = fresh.look(scheme=scheme)
    stops: list[str] = []
    while True:
        page.keyboard.press("Tab")
        page.evaluate(SETTLE)
        name, shows = page.evaluate(FOCUSED)
        if name == "body.scrolled":  # round again
            break
        assert shows, name
        stops.append(name)
    wanted = ["pst-skip-link", "search-button", "current", "theme-switch-button", "summary"]
    found = [next(i for i, stop in enumerate(stops) if part in stop) for part in wanted]
    assert found[0] == 0
    assert found == sorted(found)
    assert stops.count("summary.") == page.locator("summary").count()


def test_enter_unfolds_and_switches(fresh: Opened) -> None:
    page = fresh.look()
    folded = page.locator("details").first
    folded.locator("summary").focus()
    assert folded.get_attribute("open") is None
    page.keyboard.press("Enter")
    assert folded.get_attribute("open") == ""
    page.locator(".theme-switch-button").first.focus()
    for mode, theme in (("dark", "dark"), ("light", "light"), ("auto", "light")):
        page.keyboard.press("Enter")
        assert page.get_attribute("html", "data-mode") == mode
        assert page.get_attribute("html", "data-theme") == theme


def test_on_a_phone_the_contents_open_and_close_by_keyboard(fresh: Opened) -> None:
    page = fresh.look(width=PHONE)
    contents = page.get_by_role("link", name="Communication delay").first
    assert not contents.is_visible()
    page.locator(".primary-toggle").focus()
    page.keyboard.press("Enter")
    contents.wait_for(state="visible")
    page.keyboard.press("Escape")
    contents.wait_for(state="hidden")
    assert "primary-toggle" in page.evaluate(FOCUSED)[0]


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_search_finds_pages(fresh: Opened, html: Path, width: int) -> None:
    page = fresh.look(width=width)
    page.keyboard.press("Control+k")
    page.keyboard.type("Little")
    page.keyboard.press("Enter")
    page.wait_for_url(re.compile(r"search\.html\?q=Little"))
    page.get_by_text(re.compile("found [0-9]+ page")).wait_for()
    found = page.locator("#search-results li a")
    addresses = {urlsplit(link.get_attribute("href") or "").path for link in found.all()}
    assert {"book/model.html", "book/reference/glossary.html"} <= addresses
    assert all((html / address).is_file() for address in addresses)
