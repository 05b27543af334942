"""The page of the atlas in a browser, from the file system."""

import json

import pytest
from playwright.sync_api import expect

from analysis_book.atlas import cards

pytestmark = pytest.mark.browser


@pytest.fixture
def address(smoke_site):
    return (smoke_site / "atlas.html").as_uri()


def test_a_name_that_is_typed_gives_the_card_of_its_type(page, address):
    page.goto(address)
    page.get_by_label("Model or type").fill("openai/gpt-oss-20b")
    card = page.locator(".atlas-card")
    expect(card.locator("h2")).to_contain_text("gpt_oss: GptOssModel")
    expect(card).to_contain_text("weights beside a sink")
    expect(card.locator("pre").first).to_contain_text('from_pretrained("openai/gpt-oss-20b")')
    assert page.url.endswith("#gpt_oss")


def test_the_address_names_a_type_or_a_convention(page, address):
    page.goto(f"{address}#mamba")
    expect(page.locator(".atlas-card h2")).to_contain_text("mamba: MambaModel")
    page.goto(f"{address}#first_state=output+of+block+1")
    rows = page.locator(".atlas-types tbody tr:visible")
    built = cards.load().query("result == 'built'")
    wanted = [
        name
        for name, cell in zip(built["type"], built["first_state"], strict=True)
        if "output of block 1" in cards.values_of(cell)
    ]
    assert rows.evaluate_all("(all) => all.map((row) => row.id)") == wanted
    assert "mamba" in wanted
    page.get_by_role("link", name="Show all").click()
    expect(rows).to_have_count(len(built))


def test_a_configuration_says_its_type(page, address, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "vit"}), encoding="utf-8")
    page.goto(address)
    page.get_by_label("or its config.json").set_input_files(path)
    expect(page.locator(".atlas-card h2")).to_contain_text("vit: ViTModel")
    path.write_text("[", encoding="utf-8")
    page.get_by_label("or its config.json").set_input_files(path)
    expect(page.locator(".atlas-card")).to_contain_text("config.json is no configuration")
    path.write_text(json.dumps({"model_type": "none of these"}), encoding="utf-8")
    page.get_by_label("or its config.json").set_input_files(path)
    expect(page.locator(".atlas-card")).to_contain_text("does not know")


LINES = """(all) => all.map((each) => {
    const range = document.createRange();
    range.selectNodeContents(each);
    return range.getClientRects().length;
})"""


def test_a_number_of_types_stands_on_one_line(page, address):
    page.goto(address)
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        lines = page.locator(".atlas-figure .count").evaluate_all(LINES)
        assert len(lines) > 50
        assert {*lines} == {1}


def test_a_head_puts_the_table_in_order_by_keyboard(page, address):
    page.goto(address)
    head = page.locator(".atlas-types thead th").nth(3)
    cells = page.locator(".atlas-types tbody td:nth-child(4)")
    head.get_by_role("button").focus()
    for order in ("ascending", "descending"):
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == order
        words = cells.evaluate_all("(all) => all.map((cell) => cell.textContent)")
        ordered = page.evaluate(
            "(words) => [...words].sort((a, b) => a.localeCompare(b, 'en', { numeric: true }))",
            words,
        )
        assert words == (ordered if order == "ascending" else ordered[::-1])


def test_without_a_script_every_type_has_a_row(browser, address):
    with browser.new_context(java_script_enabled=False) as context:
        page = context.new_page()
        page.goto(f"{address}#gpt2")
        built = cards.load().query("result == 'built'")
        expect(page.locator(".atlas-types tbody tr")).to_have_count(len(built))
        expect(page.locator("tr#gpt2")).to_contain_text("after the final norm")


def test_the_names_of_types_are_no_other_addresses_of_the_page(smoke_site):
    text = (smoke_site / "atlas.html").read_text(encoding="utf-8")
    for name in cards.load()["type"]:
        assert text.count(f'id="{name}"') == 1, name


def test_what_an_upgrade_changes_is_on_the_page_and_on_the_card(page, address):
    before, after = cards.versions()[-2:]
    changes = cards.changes(before, after)
    change = changes[changes["fact"] != "result"].iloc[0]
    label = cards.BY_NAME[change["fact"]].label
    page.goto(f"{address}#{change['type']}")
    rows = page.locator(f'.atlas-changes[aria-label="Changes: {label}"] tbody tr')
    assert rows.count() == (changes["fact"] == change["fact"]).sum()
    row = rows.filter(has_text=change["type"]).first
    expect(row.locator("td")).to_have_text([change["before"], change["after"]])
    card = page.locator(".atlas-card")
    expect(card).to_contain_text(f"in transformers {after}")
    expect(card).to_contain_text(f"({before}: {change['before']})")
