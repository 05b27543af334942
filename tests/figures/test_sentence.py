"""The view of a typed sentence, in a real browser from a file: its numbers against the library with
the same weights and the same interventions, its state against the address.
"""

import io
from urllib.parse import parse_qs, urlencode

import numpy as np
import pandas as pd
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect
from test_model_in_page import FIGURES

from analysis_book import figures
from analysis_book.figures.one_sentence import CHANGES, OURS, SCRIPTS
from analysis_book.figures.weights import as_in_page, weights_script
from analysis_book.papers import sentences
from analysis_lib import load_corpus, measure
from analysis_lib.capture.interventions import Replace

TEXT = "The cat, which sat on the mat, was asleep."
OTHER = "Attention gathers on few tokens; why?"
START = {"layer": 2, "head": 5, "query": 3, "key": 1}
LAYERS = (1, 3, 6)


def planted(dimension: int = 99) -> pd.DataFrame:
    """A corpus in which each number says what it is of: 0.1 for the layer, 0.01 for the state."""
    rows = []
    for number, state in enumerate(CHANGES):
        for layer in range(1, 7):
            value = layer / 10 + number / 100
            for quantity in ("cls", "entropy"):
                rows.append((state, layer, quantity, None, value, value - 0.005, value + 0.005))
        for hidden in range(7):
            rows.append((state, 0, "cosine", hidden, hidden / 10, hidden / 10, hidden / 10))
    return pd.DataFrame(rows, columns=sentences.COLUMNS)


@pytest.fixture(scope="module")
def about(minilm) -> dict[str, object]:
    """Means over the two texts, by the weights of the page."""
    means = sentences.means(as_in_page(minilm), load_corpus([TEXT, OTHER]))
    return {"dimension": 99, "other": OTHER, **means}


@pytest.fixture(scope="module")
def view(minilm, about):
    return figures.sentence(minilm, TEXT, planted(), about, caption="A sentence.", **START)


@pytest.fixture(scope="module")
def path(minilm, view, tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    (folder / "bert-weights.js").write_bytes(weights_script(minilm))
    scripts = []
    for name in SCRIPTS:
        (folder / name).write_bytes((FIGURES / name).read_bytes())
        scripts.append(f'<script src="{name}"></script>')
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>A sentence</title>'
    head += "<style>:root { color-scheme: light dark }</style>"
    body = f"<main><h1>A sentence</h1>{view._repr_html_()}</main>"
    (folder / "page.html").write_text(f"{head}{''.join(scripts)}{body}")
    return folder / "page.html"


@pytest.fixture(scope="module")
def window(browser):
    with browser.new_context(viewport={"width": 1000, "height": 900}, offline=True) as context:
        context.set_default_timeout(120_000)
        page, page.troubles = context.new_page(), []
        page.on("pageerror", lambda error: page.troubles.append(str(error)))
        page.on("console", lambda m: m.type == "error" and page.troubles.append(m.text))
        yield page
        assert page.troubles == []


def opened(page, path, **state: object):
    page.goto("about:blank")
    page.goto(f"{path.as_uri()}#{urlencode({'fig-sentence': '', **state} if state else {})}")
    figure = page.locator("figure#fig-sentence")
    expect(figure.locator("output")).to_contain_text("Layer")
    return figure


def address(page) -> dict[str, str]:
    kept = page.evaluate("location.hash.slice(1)")
    return {name: value for name, (value,) in parse_qs(kept).items()}


def computed(page, **state: object) -> dict[str, pd.DataFrame]:
    """The tables that the page computes for a state, also one that no field has."""
    given = {"sentence": TEXT, "change": "nothing", **START, **state}
    rows = page.evaluate(
        """async ([state, more]) => {
          const { about } = JSON.parse(document.querySelector("script.given").textContent);
          const made = await window.viewSources.sentence(state, { ...about, ...more });
          return made.rows;
        }""",
        [given, {"other": given.pop("other", OTHER)}],
    )
    return {name: pd.DataFrame(table) for name, table in rows.items()}


@pytest.mark.browser
def test_it_begins_with_the_numbers_that_the_page_would_compute(window, path, view):
    opened(window, path)
    for name, found in computed(window).items():
        expected = pd.read_csv(io.StringIO(view.csv[name]))
        assert {*found} == {*expected}, name
        found = found[[*expected]]
        words = [column for column in expected if expected[column].dtype.kind not in "fi"]
        assert found[words].equals(expected[words]), name
        numbers = expected.columns.difference(words)
        # A view writes four digits.
        np.testing.assert_allclose(
            found[numbers].astype(float), expected[numbers], rtol=1e-3, atol=1e-3, err_msg=name
        )


def intervention(change: str, layer: int) -> Replace:
    """As the pages of the book have it, with means of the same texts."""
    return {
        "nothing": Replace("key_side", by="nothing"),
        "dimension": Replace("key_side", layers=layer, dimensions=99, by="mean"),
        "query": Replace("query", layers=layer, by="centre"),
        "cls": Replace("key_side", layers=layer, tokens="cls", by="other_of_type"),
        "mean": Replace("residual", layers=layer, by="centre"),
    }[change]


@pytest.mark.browser
@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_the_intervention_of_the_library(window, path, minilm, change):
    """Means over two texts, each of which has the [CLS] of the other."""
    opened(window, path)
    rounded = as_in_page(minilm)
    corpus = load_corpus([TEXT, OTHER])
    tokens = np.array([len(minilm.tokenizer(text)["input_ids"]) for text in corpus.texts])
    moved = []
    for layer in LAYERS:
        change_of_layer = intervention(change, layer)
        tables = measure(
            rounded, corpus, sentences.METRICS, intervention=change_of_layer, progress=False
        )
        expected = sentences.in_layer(tables, layer)
        numbers = {}
        for text, other in ((TEXT, OTHER), (OTHER, TEXT)):
            rows = computed(window, sentence=text, other=other, change=change, layer=layer)
            ours = {}
            for name in ("beside", "cosines"):
                table = rows[name]
                ours[name] = table[(table["of"] == OURS) & (table["state"] == change)]
            values = ours["beside"].set_index("quantity")["value"]
            cosines = ours["cosines"].set_index("hidden")["value"].add_prefix("cosine ")
            numbers[text] = pd.concat([values[["cls", "entropy"]], cosines])
        found = pd.DataFrame(numbers)
        # Of cosines, each text counts once; of attention, each query does.
        means = found.mean(axis=1)
        means[["cls", "entropy"]] = found.loc[["cls", "entropy"]] @ (tokens / tokens.sum())
        if change == "mean":
            # The page takes it from what it shows, and not from what the next layer reads.
            means, expected = means[[f"cosine {layer}"]], expected[[f"cosine {layer}"]]
        np.testing.assert_allclose(means, expected[means.index], atol=1e-3, rtol=0)
        plain = computed(window, change="nothing", layer=layer)["attention"]["weight"]
        moved.append(
            (computed(window, change=change, layer=layer)["attention"]["weight"] - plain)
            .abs()
            .max()
        )
    assert (max(moved) > 0.01) == (change in ("dimension", "query"))


@pytest.mark.browser
def test_numbers_of_the_corpus_stand_beside_those_of_the_sentence(window, path):
    figure = opened(window, path, layer=4, change="query")
    output = figure.locator("output")
    expect(output).to_contain_text("The corpus, as it is: attention to [CLS] 0.40 [0.40, 0.41]")
    expect(output).to_contain_text("The corpus, without the mean query: attention to [CLS] 0.42")
    expect(output).to_contain_text("This sentence, without the mean query: attention to [CLS] 0.")


@pytest.mark.browser
def test_the_model_is_loaded_when_it_is_asked_for_and_the_address_keeps_what_was_chosen(
    window, path
):
    loaded = "() => document.querySelectorAll('script[src*=bert-weights]').length"
    figure = opened(window, path)
    figure.locator(".panels > div").first.hover()
    assert window.evaluate(loaded) == 0
    assert address(window) == {}
    field = figure.locator("[name=sentence]")
    field.fill("A short one.")
    field.press("Enter")
    output = figure.locator("output")
    expect(output).to_contain_text("Tokens: 1 [CLS]; 2 a; 3 short; 4 one; 5 .; 6 [SEP].")
    assert window.evaluate(loaded) == 1
    # By keys alone: another key of the same query.
    figure.locator(".panels > div").first.focus()
    window.keyboard.press("ArrowRight")
    window.keyboard.press("Enter")
    expect(output).to_contain_text("“3 short” gives")
    expect(output).to_contain_text("of its attention to “2 a”")
    kept = address(window)
    assert {"sentence": "A short one.", "query": "3", "key": "2"}.items() <= kept.items()
    text = output.inner_text()
    expect(opened(window, path, **kept).locator("output")).to_have_text(text)


@pytest.mark.browser
def test_a_token_that_a_shorter_sentence_has_not_is_its_last(window, path):
    figure = opened(window, path, sentence="One.", query=9, key=7)
    expect(figure.locator("output")).to_contain_text("“4 [SEP]” gives")
    assert figure.locator("[name=query]").input_value() == "4"


@pytest.mark.browser
@pytest.mark.parametrize(("scheme", "width"), [("light", 1000), ("dark", 390)])
def test_axe_has_nothing_to_say_and_it_fits_a_phone(window, path, scheme, width):
    window.emulate_media(color_scheme=scheme)
    window.set_viewport_size({"width": width, "height": 900})
    opened(window, path, sentence=TEXT, change="dimension")
    found = Axe().run(window)
    assert not found.violations_count, found.generate_report()
    assert window.evaluate("document.documentElement.scrollWidth") <= width
