"""The built site in a real browser, from the file system and without a network."""

import html
import io
import os
import random
import re
import subprocess
import sys
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree

import nbformat
import numpy as np
import pandas as pd
import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import MEASURED, ROOT
from copying import LABEL, LABEL_OF_TABLE, parts_of, scripts_of
from PIL import Image
from playwright.sync_api import Locator, Page, expect
from pypdfium2 import PdfDocument, PdfPage
from pypdfium2.raw import FPDF_PAGEOBJ_FORM, FPDF_PAGEOBJ_IMAGE
from waiting import PATIENCE

from analysis_book.papers import claims

OWN = ("file:", "data:", "blob:")

pytestmark = pytest.mark.browser


def pages(site: Path) -> list[Path]:
    found = sorted(path for path in site.rglob("*.html") if "_static" not in path.parts)
    assert found
    return found


def notebook_pages(site: Path) -> list[Path]:
    sources = site / "_sources"
    names = [path.relative_to(sources) for path in sorted(sources.rglob("*.ipynb"))]
    assert names
    return [site / name.with_suffix(".html") for name in names]


def visit(page: Page, path: Path) -> None:
    page.goto(path.as_uri())
    page.wait_for_load_state("load")


@dataclass
class Seen:
    """What a browser shows of a page, for all that is asked of it."""

    troubles: list[str] = field(default_factory=list)
    # In bytes, of each file that the browser asks for.
    weights: dict[Path, int] = field(default_factory=dict)
    axe: str = ""
    width: int = 0
    main: str = ""
    body: str = ""
    # Of each picture, its alt text, number and caption; of each named table, its number and
    # caption.
    figures: list[list[str]] = field(default_factory=list)
    tables: list[list[str]] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)
    # What of its tables and captions is to be on paper, whether its figures may be split there, and
    # the paper.
    printed: list[str] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)
    paper: bytes = b""
    download: tuple[str, str] | None = None


FIGURES = """(all) => all.map((image) => {
  const part = (name) => image.closest("figure")?.querySelector(`figcaption .caption-${name}`)?.innerText.trim() ?? "";
  return [image.getAttribute("alt") ?? "", part("number"), part("text")];
})"""
TABLES = """(all) => all.map((table) => {
  const part = (name) => table.querySelector(`caption .caption-${name}`)?.textContent.trim() ?? "";
  return [part("number"), part("text")];
})"""


# A contrast takes longer than all else, and hangs on these alone: one piece of text of each look is
# enough.
SEEN_BEFORE = """(known) => {
  const looks = new Set(known), grounds = new Map([[null, ""]]);
  const ground = (piece) => {
    if (!grounds.has(piece)) {
      const { backgroundColor, backgroundImage, opacity } = getComputedStyle(piece);
      grounds.set(piece, ground(piece.parentElement) + backgroundColor + backgroundImage + opacity);
    }
    return grounds.get(piece);
  };
  for (const piece of document.querySelectorAll("body *")) {
    delete piece.dataset.seen;
    const written = [...piece.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if (!written || !piece.checkVisibility()) continue;
    const { color, fontSize, fontWeight } = getComputedStyle(piece);
    const look = [color, fontSize, fontWeight, ground(piece)].join();
    if (looks.has(look)) piece.dataset.seen = "";
    looks.add(look);
  }
  return [...looks];
}"""
# Colours of another theme come gradually: of what is not shown never by themselves, of what
# inherits them one by one.
SETTLE = """() => {
  const changing = () => document.getAnimations().filter((animation) => animation instanceof CSSTransition);
  for (let some = changing(); some.length; some = changing()) some.forEach((transition) => transition.finish());
}"""
AXE = Axe()
AXE.axe_script += 'axe.configure({rules: [{id: "color-contrast", selector: "*:not([data-seen])"}]})'


@pytest.fixture(scope="module")
def seen(smoke_site, browser) -> tuple[dict[Path, Seen], dict[Path, Seen]]:
    """Every page on a phone, dark, then in a wide window, light, and on paper: loaded once, for all
    that is asked.
    """
    on_phone, on_desk, looks = {}, {}, {}
    with browser.new_context(accept_downloads=True) as context:
        context.set_default_timeout(200 * PATIENCE)
        context.add_init_script("localStorage.setItem('mode', 'auto')")
        page = context.new_page()
        page.on("console", lambda m: m.type == "error" and seen.troubles.append(m.text))
        page.on("pageerror", lambda error: seen.troubles.append(str(error)))
        # A picture far below that is still loading when the next page is opened is no trouble.
        page.on(
            "requestfailed",
            lambda r: r.failure == "net::ERR_ABORTED" or seen.troubles.append(f"failed: {r.url}"),
        )
        page.on(
            "request", lambda r: r.url.startswith(OWN) or seen.troubles.append(f"asked: {r.url}")
        )
        page.on(
            "request",
            lambda r: r.url.startswith("file:") and asked.add(Path(unquote(urlsplit(r.url).path))),
        )
        for path in pages(smoke_site):
            seen, asked = on_phone.setdefault(path, Seen()), set()
            show(page, 400, "dark")
            visit(page, path)
            look(page, seen, "dark", looks)
            seen = on_desk.setdefault(path, Seen())
            show(page, 1300, "light")
            look(page, seen, "light", looks)
            # Before all pictures are loaded for the paper.
            seen.weights = {file: file.stat().st_size for file in asked if file.is_file()}
            read(page, seen)
    return on_phone, on_desk


@pytest.fixture(scope="module")
def phone(seen) -> dict[Path, Seen]:
    """Every page on a phone, dark."""
    return seen[0]


@pytest.fixture(scope="module")
def desk(seen) -> dict[Path, Seen]:
    """Every page in a wide window, light; then on paper."""
    return seen[1]


def show(page: Page, width: int, theme: str) -> None:
    """Give the window a width, and the site the theme that the system prefers."""
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme=theme)


def look(page: Page, seen: Seen, theme: str, looks: dict[str, list[str]]) -> None:
    """How wide a page is, and what axe says of it; ``looks`` of text are those that it has seen, by
    theme.
    """
    page.wait_for_function("(theme) => document.documentElement.dataset.theme === theme", arg=theme)
    page.evaluate(SETTLE)
    seen.width = page.evaluate("document.documentElement.scrollWidth")
    looks[theme] = page.evaluate(SEEN_BEFORE, looks.get(theme, []))
    # It cannot read the style sheets of a file once more, and would complain.
    violations = AXE.run(page, options={"resultTypes": ["violations"], "preload": False})
    seen.axe = violations.generate_report() if violations.violations_count else ""


def read(page: Page, seen: Seen) -> None:
    """What a page says, on the screen and on paper, and its notebook."""
    article = page.locator("article.bd-article")
    seen.main, seen.body = page.inner_text("main"), page.inner_text("body")
    seen.figures = article.locator("img:not(.finding img)").evaluate_all(FIGURES)
    seen.tables = article.locator("table[id]").evaluate_all(TABLES)
    seen.verdicts = page.locator("details.claim a").evaluate_all("(all) => all.map((a) => a.href)")
    page.emulate_media(media="print")
    seen.printed = article.locator("td, th, figcaption, caption").all_inner_texts()
    breaks = "(all) => all.map((figure) => getComputedStyle(figure).breakInside)"
    seen.breaks = article.locator("figure:has(img)").evaluate_all(breaks)
    seen.paper = page.pdf(format="A4")
    page.emulate_media(media="screen")
    if page.locator("a.btn-download-source-button[href$='.ipynb']").count():
        page.locator(".dropdown-download-buttons > button").click()
        with page.expect_download() as download:
            page.locator("a.btn-download-source-button").click()
        seen.download = (
            download.value.suggested_filename,
            download.value.path().read_text(encoding="utf-8"),
        )


def test_every_page_loads_itself_and_nothing_else_without_an_error(desk, phone):
    for seen in (desk, phone):
        assert not {path.name: page.troubles for path, page in seen.items() if page.troubles}


def test_every_figure_can_be_taken_along(smoke_site):
    """Each numbered figure as PNG and SVG, nearly all with their numbers."""
    linked = re.compile(r'href="([^"]+)" download')
    pictures, tables = 0, 0
    for path in notebook_pages(smoke_site):
        found = [path.parent / link for link in linked.findall(path.read_text(encoding="utf-8"))]
        assert all(file.is_file() for file in found), path
        for file in found:
            if file.suffix == ".svg":
                assert ElementTree.parse(file).getroot().tag.endswith("svg")
                assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
                pictures += 1
            elif file.suffix == ".png":
                assert file.with_suffix(".svg") in found
            elif file.suffix == ".csv":
                assert len(pd.read_csv(file)), file
                tables += 1
    assert pictures > 40
    assert tables > 0.9 * pictures


LEADS = """(all) => all.filter((image) => image.checkVisibility()).map((image) => {
  const card = image.closest("figure").getBoundingClientRect(), box = image.getBoundingClientRect();
  const text = image.closest("article").getBoundingClientRect();
  const over = Math.max(card.left - box.left, box.right - card.right, card.right - text.right);
  return [image.src, box.width, over];
})"""


def least_letters(picture: Path) -> float:
    """The smallest letters of an SVG, as a share of its width."""
    root = ElementTree.parse(picture).getroot()
    sizes = []
    for element in root.iter():
        style = element.get("style", "")
        sizes += map(float, re.findall(r"font(?:-size)?: [^;]*?([\d.]+)px", style))
    assert sizes, picture
    return min(sizes) / float(root.get("viewBox").split()[2])


@pytest.mark.parametrize("width", [1280, 390])
def test_a_lead_figure_stands_once_on_its_page_and_can_be_read(smoke_site, page, width):
    """Its letters are at least 9 pixels high, and nothing is over its card."""
    page.set_viewport_size({"width": width, "height": 900})
    small = []
    for path in notebook_pages(smoke_site):
        # The pages beside the parts lead with a view.
        if path.stem == "checks" or path.parent == smoke_site:
            continue
        visit(page, path)
        ((source, shown, over),) = page.locator("figure.leading img").evaluate_all(LEADS)
        picture = Path(unquote(urlsplit(source).path))
        name = picture.stem
        assert page.locator(f"article img[src$='/{name}.svg']").count() == 1, path.name
        assert over < 1, path.name
        letters = shown * least_letters(picture)
        if letters < 9:
            small.append(f"{path.name}: {letters:.1f}")
    assert not small


def lights(figure: Locator) -> np.ndarray:
    """How bright the pixels of a picture are, from 0 to 255."""
    picture = Image.open(io.BytesIO(figure.screenshot()))
    return np.asarray(picture.convert("L"))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_figure_has_the_ink_of_its_theme(smoke_site, page, theme):
    """Also a frame of a slider; the ground is that of the page."""
    page.emulate_media(color_scheme=theme)
    page.add_init_script("localStorage.setItem('mode', 'auto')")
    visit(page, smoke_site / "training" / "queries-and-keys.html")
    shown = "(all) => all.filter((image) => image.checkVisibility()).map((image) => image.src)"
    pictures = page.locator("article img.figure").evaluate_all(shown)
    assert len(pictures) > 3
    assert {picture.endswith(".svg#dark") for picture in pictures} == {theme == "dark"}
    filters = "(all) => [...new Set(all.map((image) => getComputedStyle(image).filter))]"
    assert page.locator("article img.figure").evaluate_all(filters) == ["none"]
    loaded = """(where) => [...document.querySelectorAll(`${where} img.figure`)]
        .some((image) => image.checkVisibility() && image.naturalWidth)"""
    for where in ("figure.leading", "figure.slider", ".cell_output figure:not(.slider, .view)"):
        # Pictures are loaded once they are near.
        page.locator(where).first.scroll_into_view_if_needed()
        page.wait_for_function(loaded, arg=where)
        found = lights(page.locator(f"{where} img.figure").locator("visible=true").first)
        if theme == "dark":
            assert np.median(found) < 40
            assert found.max() > 200
        else:
            assert np.median(found) > 240
            assert found.min() < 60


def test_what_was_found_stands_at_the_top_of_every_notebook(smoke_site):
    for path in notebook_pages(smoke_site):
        text = path.read_text(encoding="utf-8")
        first = re.search(r'admonition-title">([^<]*)<', text)
        assert path.stem == "checks" or first[1] == "Finding", path


def test_no_page_shows_a_python_object(smoke_site, desk):
    for path in notebook_pages(smoke_site):
        shown = re.findall(r"<[\w.]+ (?:object|at 0x).*", desk[path].main)
        assert not shown, f"{path.relative_to(smoke_site)}: {shown}"


def test_no_page_shows_an_empty_box(smoke_site):
    """What a cell displays without showing it, such as a warning, has none."""
    box = re.compile(r'<div class="cell_output[^>]*>\s*</div>')
    for path in notebook_pages(smoke_site):
        assert not box.search(path.read_text(encoding="utf-8")), path


def test_no_page_is_wider_than_a_phone(phone):
    for path, seen in phone.items():
        assert seen.width <= 400, path.name


def test_axe_has_nothing_to_say(smoke_site, desk, phone):
    """No violation of any impact, on any page, in both themes:
    https://github.com/dequelabs/axe-core.
    """
    for path, seen in (*desk.items(), *phone.items()):
        assert not seen.axe, f"{path.relative_to(smoke_site)}: {seen.axe}"


def test_no_page_weighs_more_than_four_megabytes(desk):
    """All that a browser asks for to show a page."""
    for path, seen in desk.items():
        assert path in seen.weights
        assert sum(seen.weights.values()) < 4e6, (
            path.name,
            sorted(seen.weights.items(), key=lambda item: -item[1])[:6],
        )


def move(page: Page, figure: Locator, key: str) -> str:
    """What a slider says after a key."""
    figure.locator("input").press(key)
    return figure.locator("output").inner_text()


def test_every_slider_follows_keys_and_the_mouse(smoke_site, page):
    sliders = 0
    for path in notebook_pages(smoke_site):
        if '"slider ' not in path.read_text(encoding="utf-8"):
            continue
        visit(page, path)
        for figure in page.locator("figure.slider").all():
            sliders += 1
            field, frames = figure.locator("input"), figure.locator(".frame")
            labels = [frame.get_attribute("data-label") for frame in frames.all()]
            assert figure.locator("output").inner_text() == labels[-1]
            assert move(page, figure, "Home") == labels[0]
            assert move(page, figure, "ArrowRight") == labels[1]
            box = field.bounding_box()
            field.click(position={"x": box["width"] - 4, "y": box["height"] / 2})
            assert figure.locator("output").inner_text() == labels[-1]
            assert [frame.is_visible() for frame in frames.all()] == [
                label == labels[-1] for label in labels
            ]
    assert sliders


def test_mathematics_is_set(smoke_site, page):
    visit(page, smoke_site / "notation.html")
    formulas = page.locator("math").all()
    assert len(formulas) > 20
    assert all(formula.bounding_box()["height"] > 5 for formula in formulas)
    # A fraction stands above its denominator, which a browser without MathML would not see to.
    above, below = (
        page.locator(f"mfrac > :nth-child({place})").first.bounding_box() for place in (1, 2)
    )
    assert above["y"] + above["height"] <= below["y"] + 1


def test_search_finds_anisotropy(smoke_site, page):
    page.goto((smoke_site / "search.html").as_uri() + "?q=anisotropy")
    page.locator("#search-results li a").first.wait_for()
    page.goto((smoke_site / "search.html").as_uri() + "?q=xylophone")
    page.locator("#search-results p.search-summary, #search-results > p").first.wait_for()
    assert page.locator("#search-results li a").count() == 0


@pytest.fixture
def clipboard(page) -> Page:
    """A page without a network, whose clipboard can be read."""
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.context.set_offline(True)
    return page


def copied(page: Page, button: Locator) -> str:
    """What the button copies when it is reached by keyboard."""
    page.evaluate("navigator.clipboard.writeText('')")
    button.focus()
    page.keyboard.press("Enter")
    return page.evaluate("navigator.clipboard.readText()")


def open_cells(page: Page, path: Path) -> list[Locator]:
    """The code cells of a page, all unfolded."""
    visit(page, path)
    page.locator("button.copybtn").first.wait_for(state="attached")
    page.evaluate("document.querySelectorAll('details').forEach((fold) => (fold.open = true))")
    return page.locator("div.cell_input").all()


def source_of(site: Path, path: Path) -> Path:
    """The executed notebook of a page."""
    return ROOT / "_build" / "executed" / "smoke" / path.relative_to(site).with_suffix(".ipynb")


def executed(site: Path, path: Path) -> list[nbformat.NotebookNode]:
    """The executed code cells of a page."""
    notebook = nbformat.read(source_of(site, path), 4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [cell for cell in cells if "injected-parameters" not in cell.metadata.get("tags", ())]


def draws(cell: nbformat.NotebookNode) -> bool:
    return any("image/png" in output.get("data", {}) for output in cell.outputs)


def captions(cell: nbformat.NotebookNode) -> list[str]:
    """The captions of the tables that the cell shows."""
    shown = "\n".join(output.get("data", {}).get("text/markdown", "") for output in cell.outputs)
    return re.findall(r"^:+\{table\} (.*)$", shown, re.MULTILINE)


def run_script(text: str, folder: Path) -> tuple[int, str]:
    """How many figures a script leaves in an empty folder, and what it prints; what the site
    measured is at hand.
    """
    folder.mkdir()
    script, data = folder.with_suffix(".py"), folder / "tests"
    script.write_text(text)
    # The smoke profile reads a table of ours, by its path from here.
    data.symlink_to(ROOT / "tests")
    environment = os.environ | {"ANALYSIS_LIB_MEASUREMENTS": str(MEASURED)}
    command = [sys.executable, "-P", script]
    run = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, timeout=PATIENCE
    )
    assert run.returncode == 0, text + run.stdout[-2000:] + run.stderr[-2000:]
    assert not re.search(r"<[\w.]+ object", run.stdout), run.stdout
    data.unlink()
    figures = list(folder.iterdir())
    assert all(figure.suffix == ".png" and figure.stat().st_size > 2000 for figure in figures), (
        figures
    )
    return len(figures), run.stdout


def test_each_cell_has_two_buttons_with_a_name_that_keys_and_fingers_reach(
    smoke_site, page, browser
):
    path = notebook_pages(smoke_site)[0]
    with browser.new_context(
        has_touch=True, is_mobile=True, viewport={"width": 400, "height": 800}
    ) as phone:
        for view in (page, phone.new_page()):
            for cell in open_cells(view, path):
                plain, everything = (
                    cell.locator("button.copybtn"),
                    cell.locator("button.copy-everything"),
                )
                label = LABEL_OF_TABLE if everything.get_attribute("data-table") else LABEL
                assert everything.get_attribute("aria-label") == label
                boxes = [button.bounding_box() for button in (everything, plain, cell)]
                assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
                assert boxes[2]["x"] < boxes[0]["x"]
                for button in (plain, everything):
                    if view is page:
                        view.keyboard.press("Tab")  # The focus is visible only after a key.
                        button.focus()
                    view.evaluate(SETTLE)
                    assert button.evaluate("(button) => getComputedStyle(button).opacity") == "1"


def test_a_sample_of_cells_copied_with_everything_runs_by_itself(smoke_site, clipboard, tmp_path):
    shown, reading = [], []
    for path in notebook_pages(smoke_site):
        notebook = nbformat.read(source_of(smoke_site, path), 4)
        scripts = scripts_of(notebook)
        for index, cell in enumerate(executed(smoke_site, path)):
            if draws(cell) or captions(cell):
                reads = '= pd.read_csv("fig-' in scripts[index]
                (reading if reads else shown).append((path, index))
    some = random.Random(12)
    for path, index in some.sample(shown, 2) + some.sample(reading, 2):
        wanted = executed(smoke_site, path)[index]
        cell = open_cells(clipboard, path)[index]
        plain = copied(clipboard, cell.locator("button.copybtn"))
        assert plain.strip() == wanted.source.strip()
        button = cell.locator("button.copy-everything")
        script = copied(clipboard, button)
        if (path, index) in reading:
            # The address of its table is whole: the script runs in any folder.
            folder = smoke_site.resolve().as_uri()
            assert f'pd.read_csv("{folder}/_static/figures/fig-' in script
            plain = parts_of(plain)[1]
        assert script.endswith(plain.strip())
        figures, printed = run_script(script, tmp_path / f"{path.stem}-{index}")
        assert figures >= draws(wanted), script
        for caption in captions(wanted):
            assert caption in printed, script


def test_a_page_copied_whole_writes_its_figures_and_prints_its_tables(
    smoke_site, clipboard, tmp_path
):
    path = random.Random(12).choice(notebook_pages(smoke_site))
    cells = executed(smoke_site, path)
    copies = [
        copied(clipboard, cell.locator("button.copybtn")) for cell in open_cells(clipboard, path)
    ]
    # Of the parameters, the page shows the values that ran.
    assert [
        copy.strip() == cell.source.strip()
        for copy, cell in zip(copies, cells, strict=True)
        if "parameters" not in cell.metadata.get("tags", ())
    ] == [True] * (len(cells) - 1)
    figures, printed = run_script("\n\n".join(copies), tmp_path / path.stem)
    assert figures == sum(map(draws, cells))
    for cell in cells:
        for caption in captions(cell):
            assert caption in printed
        if "claims.show" in cell.source:
            assert "verdict" in printed


def test_notebooks_download(smoke_site, desk):
    for path in notebook_pages(smoke_site):
        name, text = desk[path].download
        assert name == path.with_suffix(".ipynb").name
        notebook = nbformat.reads(text, 4)
        nbformat.validate(notebook)
        assert not any(cell.get("outputs") for cell in notebook.cells)


def test_every_figure_and_slider_has_a_number_a_caption_and_alt_text(smoke_site, desk):
    for path in notebook_pages(smoke_site):
        assert desk[path].figures
        for alt, number, caption in desk[path].figures:
            # Sphinx puts the address of an image where it has no words.
            assert alt, path.name
            assert not alt.endswith(".png"), path.name
            assert number.startswith("Figure "), path.name
            assert caption, path.name


def test_every_named_table_has_a_number_and_a_caption(desk):
    for path, seen in desk.items():
        for number, caption in seen.tables:
            assert number.startswith("Table "), path.name
            assert caption, path.name


def test_no_reference_is_left_unresolved(desk):
    for path, seen in desk.items():
        for mark in ("{numref}", "{ref}", "{cite", "{glue", "Figure ??", "Table ??"):
            assert mark not in seen.body, f"{path.name}: {mark}"


def words_on(sheet: PdfPage) -> tuple[str, float]:
    """The text of a printed sheet without blanks, and how far to the right it goes."""
    text = sheet.get_textpage()
    farthest = max((text.get_rect(i)[2] for i in range(text.count_rects())), default=0.0)
    # PDFium has a sign of its own for a hyphen at the end of a line; ligatures are two letters.
    words = "".join(text.get_text_range().replace("\ufffe", "-").split())
    return unicodedata.normalize("NFKC", words), farthest


def test_paper_loses_nothing(desk):
    """No blank sheet, no text beyond an edge, no word of a table or caption missing, no picture
    split.
    """
    for path, seen in desk.items():
        assert {*seen.breaks} <= {"avoid"}, path.name
        printed = ""
        for number, sheet in enumerate(PdfDocument(seen.paper), 1):
            text, farthest = words_on(sheet)
            pictures = sheet.get_objects(filter=[FPDF_PAGEOBJ_IMAGE, FPDF_PAGEOBJ_FORM])
            assert text or any(pictures), f"{path.name}: sheet {number} is blank"
            assert farthest < sheet.get_width(), f"{path.name}: sheet {number} is too narrow"
            printed += text
        words = {
            word for text in seen.printed for word in unicodedata.normalize("NFKC", text).split()
        }
        lost = {word for word in words if word not in printed}
        assert not lost, f"{path.name}: {lost}"


def test_the_ledger_says_what_the_notebooks_found(smoke_site, page):
    """Verdict and number of every row, against the metadata of the executed notebooks; a line per
    claim.
    """
    said = set()
    for path in notebook_pages(smoke_site):
        outputs = [output for cell in executed(smoke_site, path) for output in cell.outputs]
        for row in (
            row for output in outputs for row in output.get("metadata", {}).get("verdicts", ())
        ):
            said.add(
                (
                    row["id"],
                    row["verdict"],
                    "none" if row["value"] is None else f"{row['value']:z.3f}",
                )
            )
    visit(page, smoke_site / "ledger.html")
    rows = page.locator(".ledger details.claim").evaluate_all(
        "(all) => all.flatMap((line) => [...line.querySelectorAll('tbody tr')].map((row) => "
        "[line.id, row.cells[1].textContent, row.cells[2].textContent]))"
    )
    assert {
        (name, verdict.split(" (")[0], number.split(" [")[0]) for name, verdict, number in rows
    } == said
    names = page.locator(".ledger details.claim").evaluate_all(
        "(all) => all.map((line) => line.id)"
    )
    assert sorted(names) == sorted(name for paper in claims.PAPERS for name in claims.load(paper))
    assert page.evaluate("document.querySelector('main').scrollHeight") < 15 * 800


def test_a_row_of_the_ledger_leads_to_its_page_and_a_verdict_to_its_formula(smoke_site, desk):
    assert len(desk[smoke_site / "ledger.html"].verdicts) > 100
    for address in sorted({link for seen in desk.values() for link in seen.verdicts}):
        place, _, name = address.removeprefix("file://").partition("#")
        assert f'id="{name}"' in Path(unquote(place)).read_text(encoding="utf-8"), address


def test_the_ledger_can_be_had_for_one_model(smoke_site, page):
    visit(page, smoke_site / "ledger.html")
    every = page.locator(".ledger details.claim:visible").count()
    page.get_by_label("judged on").select_option("MiniLM")
    shown = page.locator(".ledger details.claim:visible").all()
    assert 0 < len(shown) < every
    assert all(
        any("MiniLM" in chip for chip in line.locator(".chip").all_inner_texts()) for line in shown
    )
    assert (
        page.locator("form.ledger-filter output").inner_text()
        == f"{len(shown)} of {every} claims shown"
    )


def test_a_link_to_a_claim_opens_it_and_the_address_keeps_the_fields(smoke_site, page):
    ledger = (smoke_site / "ledger.html").as_uri()
    page.goto(f"{ledger}#maruta-middle-gap", wait_until="load")
    claim = page.locator("#maruta-middle-gap")
    assert claim.get_attribute("open") is not None
    assert 0 <= claim.bounding_box()["y"] < 800
    # Another link on the same page, of a claim that the fields hide.
    page.get_by_label("with the verdict").select_option("not applicable")
    assert "verdict=not+applicable" in page.url
    page.evaluate("location.hash = 'godey-block-narrows-cone'")
    page.locator("#godey-block-narrows-cone[open]").wait_for()
    page.goto("about:blank")
    page.goto(f"{ledger}#words=cosine&model=MiniLM&scope=.elsewhere&order=book", wait_until="load")
    assert page.get_by_label("Claims that mention").input_value() == "cosine"
    assert page.get_by_label("judged on").input_value() == "MiniLM"
    shown = page.locator(".ledger details.claim:visible")
    chips = [line.locator(".scope.elsewhere .chip").all_inner_texts() for line in shown.all()]
    assert chips
    assert all(any("MiniLM" in chip for chip in line) for line in chips)
    places = page.locator(".ledger").evaluate_all(
        "(all) => all.map((block) => [...block.querySelectorAll('details.claim')].map((claim) => "
        "+claim.dataset.page))"
    )
    assert all(block == sorted(block) for block in places)
    page.get_by_label("in the order of the").select_option("papers")
    of_paper = page.locator(".ledger details.claim").evaluate_all("(all) => all.map((c) => c.id)")
    every = [claim for paper in claims.PAPERS for claim in claims.load(paper).values()]
    assert of_paper == [c.id for ours in (False, True) for c in every if c.ours == ours]


def test_the_first_screen_of_the_index_has_a_cone_and_four_findings(smoke_site, browser):
    with browser.new_context(viewport={"width": 1280, "height": 800}) as context:
        page = context.new_page()
        visit(page, smoke_site / "index.html")
        cards = page.locator("main .sd-card.finding").all()
        assert len(cards) == 4
        for part in (
            page.locator("main svg.cone"),
            page.get_by_role("button", name="Show its attention"),
            *cards,
        ):
            box = part.bounding_box()
            assert box["y"] + box["height"] <= 800
        assert all(len(card.locator("p").inner_text().split()) <= 35 for card in cards)


# Of a view: by what it is known, and its table as JSON.
TABLE = re.compile(r'<script class="table" type="application/json" data-key="(\w+)">(.*?)</script>')


def test_a_page_with_a_view_brings_its_tables_once_and_vega_and_no_other_page_does(smoke_site):
    with_views = set()
    for path in pages(smoke_site):
        text = path.read_text(encoding="utf-8")
        tables = TABLE.findall(text)
        assert len({key for key, _ in tables}) == len(tables), path.name
        assert sum(len(table.encode()) for _, table in tables) <= 300_000, path.name
        scripts = re.findall(
            r'<script defer="defer" src="\S*_static/(vega.min|views)\.js\S*"></script>', text
        )
        assert scripts == ["vega.min", "views"] * bool(tables), path.name
        assert "vega.min" in text or not tables
        with_views |= {path.stem} if tables else set()
    assert with_views == {"try-it", "explorer"}
    assert (smoke_site / "_static" / "vega.min.js").stat().st_size < 600_000


def test_links_in_the_prose_lead_to_states_of_a_view(smoke_site, page):
    visit(page, smoke_site / "explorer.html")
    links = page.locator("main a[href*='#fig-']:not(.headerlink)[href*='&']").all()
    assert len(links) > 3
    for link in links:
        name, *state = link.get_attribute("href").removeprefix("#").split("&")
        state = dict(part.split("=") for part in map(unquote, state))
        link.click()
        figure = page.locator(f"figure#{name}")
        for control, value in state.items():
            expect(figure.locator(f"[name={control}]")).to_have_value(value.replace("+", " "))
        assert figure.evaluate("(figure) => figure.getBoundingClientRect().top < innerHeight")
        figure.locator("output", has_text=f"layer {state['layer']}, ").wait_for()


def test_findings_lead_to_a_sentence_that_shows_them(smoke_site, page):
    """The model is read from the file, once it is asked for."""
    page.context.set_offline(True)
    links = set()
    for path in pages(smoke_site):
        found = re.findall(
            r'href="[^"]*(#fig-sentence&amp;[^"]+)"', path.read_text(encoding="utf-8")
        )
        links |= {html.unescape(link) for link in found}
    assert {parse_qs(link)["change"][0] for link in links if "change" in link} >= {
        "dimension",
        "query",
        "cls",
        "mean",
    }
    for link in sorted(links):
        page.goto("about:blank")
        page.goto((smoke_site / "try-it.html").as_uri() + link)
        figure = page.locator("figure#fig-sentence")
        for control, (value,) in parse_qs(link.removeprefix("#fig-sentence&")).items():
            expect(figure.locator(f"[name={control}]")).to_have_value(value)
        # What is said of a change is computed.
        change = figure.locator("[name=change]")
        words = change.evaluate("(field) => field.selectedOptions[0].textContent")
        figure.locator("output", has_text=f"This sentence, {words}: ").wait_for()


def test_a_sentence_that_is_typed_on_the_first_page_is_read(smoke_site, page):
    visit(page, smoke_site / "index.html")
    page.get_by_label("A sentence of yours").fill("Who & what?")
    page.keyboard.press("Enter")
    page.locator(
        "figure#fig-sentence output", has_text="2 who; 3 &; 4 what; 5 ?; 6 [SEP]"
    ).wait_for()


def test_the_site_fits_on_a_stick(smoke_site):
    assert sum(file.stat().st_size for file in smoke_site.rglob("*") if file.is_file()) < 60e6


@pytest.mark.parametrize("name", ["try-it", "explorer"])
def test_without_scripts_and_on_paper_a_picture_stands_for_a_view(smoke_site, browser, name):
    for more, media in (({"java_script_enabled": False}, "screen"), ({}, "print")):
        with browser.new_context(**more) as context:
            page = context.new_page()
            page.emulate_media(media=media)
            visit(page, smoke_site / f"{name}.html")
            for figure in page.locator("figure.view").all():
                assert figure.locator(".still :is(img, svg)").first.bounding_box()["height"] > 50
                assert not figure.locator(".live").is_visible()


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_the_ink_of_views_is_that_of_the_text(smoke_site, browser, mode):
    """Whose contrast axe looks after: marks that cannot be told from the ground would be it,
    too.
    """
    with browser.new_context() as context:
        context.add_init_script(
            f"localStorage.setItem('mode', '{mode}'); localStorage.setItem('theme', '{mode}')"
        )
        page = context.new_page()
        visit(page, smoke_site / "explorer.html")
        for figure in page.locator("figure.view").all():
            figure.locator("svg text").first.wait_for()
            colours = "(all) => [...new Set(all.map((part) => getComputedStyle(part).fill))]"
            text = page.locator("main p").first.evaluate("(p) => getComputedStyle(p).color")
            assert figure.locator("svg text").evaluate_all(colours) == [text]
            assert (
                figure.evaluate("(figure) => getComputedStyle(figure).backgroundColor")
                == "rgba(0, 0, 0, 0)"
            )
