"""The built site in a real browser, from the file system and without a network."""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Locator, Page

ROOT = Path(__file__).resolve().parents[2]
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
    page.wait_for_function("!window.MathJax || (MathJax.startup && MathJax.startup.promise)")
    page.evaluate("window.MathJax && MathJax.startup.promise")


def test_every_page_loads_itself_and_nothing_else_without_an_error(smoke_site, page):
    troubles = []
    page.on("console", lambda m: m.type == "error" and troubles.append(m.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("requestfailed", lambda request: troubles.append(f"failed: {request.url}"))
    page.on(
        "request",
        lambda request: request.url.startswith(OWN) or troubles.append(f"asked: {request.url}"),
    )
    for path in pages(smoke_site):
        visit(page, path)
        assert not troubles, f"{path.relative_to(smoke_site)}: {troubles}"


def test_no_page_is_wider_than_a_phone(smoke_site, page):
    page.set_viewport_size({"width": 400, "height": 800})
    for path in pages(smoke_site):
        visit(page, path)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, path.name


def test_mathematics_is_set(smoke_site, page):
    visit(page, smoke_site / "notation.html")
    assert page.locator("mjx-container").count() > 0
    assert page.locator("mjx-merror").count() == 0
    # Set in MathJax's own fonts, which came with the site.
    assert page.evaluate("document.fonts.ready.then(() => document.fonts.check('16px MJXTEX'))")


def test_search_finds_anisotropy(smoke_site, page):
    page.goto((smoke_site / "search.html").as_uri() + "?q=anisotropy")
    page.locator("#search-results li a").first.wait_for()
    page.goto((smoke_site / "search.html").as_uri() + "?q=xylophone")
    page.locator("#search-results p.search-summary, #search-results > p").first.wait_for()
    assert page.locator("#search-results li a").count() == 0


def copied(page: Page, cell: Locator) -> str:
    cell.hover()
    cell.locator("button.copybtn").click()
    return page.evaluate("navigator.clipboard.readText()")


def test_the_copy_buttons_copy_code_that_runs(smoke_site, page, tmp_path):
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    name = notebook_pages(smoke_site)[0]
    visit(page, name)
    cells = [copied(page, cell) for cell in page.locator(".cell_input .highlight").all()]
    source = smoke_site / "_sources" / name.relative_to(smoke_site).with_suffix(".ipynb")
    wanted = [c.source for c in nbformat.read(source, 4).cells if c.cell_type == "code"]
    assert [cell.strip() for cell in cells] == [cell.strip() for cell in wanted]
    script = tmp_path / "copied.py"
    script.write_text("\n\n".join(cells))
    run = subprocess.run(
        [sys.executable, "-m", "IPython", "--colors=nocolor", str(script)],
        env=os.environ | {"MPLBACKEND": "agg", "IPYTHONDIR": str(tmp_path / "ipython")},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]


def test_executed_notebooks_download(smoke_site, page, tmp_path):
    for path in notebook_pages(smoke_site):
        visit(page, path)
        page.locator(".dropdown-download-buttons > button").click()
        with page.expect_download() as download:
            page.locator("a.btn-download-source-button").click()
        target = tmp_path / download.value.suggested_filename
        download.value.save_as(target)
        assert target.name == path.with_suffix(".ipynb").name
        notebook = nbformat.read(target, 4)
        nbformat.validate(notebook)
        assert any(cell.get("outputs") for cell in notebook.cells)


def test_every_figure_has_a_number_a_caption_and_alt_text_and_a_slider_the_last_two(smoke_site, page):
    for path in notebook_pages(smoke_site):
        visit(page, path)
        images = page.locator("article.bd-article img").all()
        assert images
        for image in images:
            alt = image.get_attribute("alt")
            # Sphinx puts the address of an image where it has no words.
            assert alt, path.name
            assert not alt.endswith(".png"), path.name
            figure = image.locator("xpath=ancestor::figure")
            if "slider" in (figure.get_attribute("class") or ""):
                assert figure.locator("figcaption").inner_text().strip(), path.name
                continue
            number = figure.locator("figcaption .caption-number").inner_text()
            assert number.strip().startswith("Figure "), path.name
            assert figure.locator("figcaption .caption-text").inner_text().strip(), path.name


def test_every_named_table_has_a_number_and_a_caption(smoke_site, page):
    for path in pages(smoke_site):
        visit(page, path)
        for table in page.locator("article.bd-article table[id]").all():
            assert table.locator("caption .caption-number").inner_text().startswith("Table ")
            assert table.locator("caption .caption-text").inner_text().strip()


def test_no_reference_is_left_unresolved(smoke_site, page):
    for path in pages(smoke_site):
        visit(page, path)
        text = page.locator("body").inner_text()
        for mark in ("{numref}", "{ref}", "{cite", "{glue", "Figure ??", "Table ??"):
            assert mark not in text, f"{path.name}: {mark}"
