"""Views that a reader moves: Vega draws them in the page, without a server or a network.

Where no script runs, a picture stands for them.
"""

import base64
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from urllib.parse import urlencode

import altair as alt
import pandas as pd
import vl_convert

from analysis_book.figures.markup import entities
from analysis_book.figures.page import page, write
from analysis_lib.errors import AnalysisError

SCRIPT, STYLE = (
    Path(__file__).with_name(f"views.{ending}").read_text(encoding="utf-8")
    for ending in ("js", "css")
)
INK = "currentColor"
# Of the tables of a view, in bytes.
LARGEST = 300_000
_INKED = dict.fromkeys(("labelColor", "titleColor", "domainColor", "tickColor", "gridColor"), INK)
CONFIG = {
    "background": "transparent",
    "font": "sans-serif",
    "view": {"stroke": None},
    "axis": {**_INKED, "gridOpacity": 0.15, "labelFontSize": 12, "titleFontSize": 12},
    "legend": {
        "labelColor": INK,
        "titleColor": INK,
        "labelFontSize": 12,
        "orient": "top",
        "symbolOpacity": 1,
    },
    "title": {"color": INK, "fontSize": 13, "anchor": "start"},
    "rule": {"color": INK},
}

# Of the rows of a panel, those over which the mouse is dragged.
SWEEP = [
    {"name": "held", "on": [{"events": "mousedown", "update": "y()"}]},
    {
        "name": "swept",
        "value": "",
        "on": [{"events": "[mousedown, window:mouseup] > window:mousemove"}],
    },
]
SWEEP[1]["on"][0]["update"] = "join(invert('y', [held, y()]) || [], ', ')"


@dataclass
class Control:
    """A native field of a view, which sets the parameter of its name.

    Attributes:
        options: of a list, by value what is shown; without them it is a number.
        value: with which it begins; unless given, the first that the view allows. A text is typed
            as one.
    """

    name: str
    label: str
    options: Mapping[str, str] | None = None
    value: str | float | None = None

    def html(self) -> str:
        """The field in its label."""
        field = self._input() if self.options is None else self._select(self.options)
        return f"<label>{self.label} {field}</label>"

    def _input(self) -> str:
        kind = "text" if isinstance(self.value, str) else "number"
        return f'<input type="{kind}" name="{self.name}" value="{escape(str(self.value))}">'

    def _select(self, options: Mapping[str, str]) -> str:
        lines = []
        for value, words in options.items():
            mark = " selected" if value == self.value else ""
            lines.append(f'<option value="{escape(value)}"{mark}>{escape(words)}</option>')
        return f'<select name="{self.name}">{"".join(lines)}</select>'


@dataclass
class View:
    """Panels that share tables, and the fields that choose what of these they show.

    It shows itself in Jupyter and in the book; :meth:`save` writes it as a page of its own, or its
    picture.

    Attributes:
        name: the id of the figure on its page.
        caption: a sentence below it.
        tables: by name what the page has as CSV, numbers with four digits; together at most 300 kB.
        data: what Vega makes of them: its data sets.
        panels: charts of Altair on ``alt.NamedData`` of these, with a description for readers who
            cannot see them; as wide as the page allows, unless they say how wide.
        controls: the fields.
        said: what is said of what is chosen, a sentence each: the data, which of its rows, the
            words of a row (both as expressions of Vega); then, if any, the words before them, and
            those where there is no row.
        limits: by the value of the first field and by field, its options, or the least, largest and
            first number.
        moves: by the number of a panel, the fields that its arrow keys move, to the right and down.
        start: other values to begin with, by the name of a field.
        sweeps: by the number of a panel with a row for each of some numbers, the field of text that
            is given those over which the mouse is dragged.
        source: the name of a function of ``window.viewSources`` that computes the tables of a state
            in the page, from the values of the fields and from ``about``; without it, the view
            shows its tables alone.
        about: what that function knows besides, as JSON.

    Raises:
        AnalysisError: there is no such field to begin with, or it has no such option; or its tables
            are too large.
    """

    name: str
    caption: str
    tables: dict[str, pd.DataFrame]
    data: list[dict]
    panels: Sequence[alt.TopLevelMixin]
    controls: Sequence[Control]
    said: Sequence[tuple[str, ...]]
    limits: dict = field(default_factory=dict)
    moves: dict = field(default_factory=dict)
    start: Mapping[str, str | float] = field(default_factory=dict)
    sweeps: Mapping[int, str] = field(default_factory=dict)
    source: str = ""
    about: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self):
        known = {control.name: control for control in self.controls}
        limits = {}
        for value, of_value in self.limits.items():
            limits[value] = {name: limit for name, limit in of_value.items() if name in known}
        self.limits = limits
        for name, value in self.start.items():
            if name not in known:
                raise AnalysisError(f"{self.name} has no field {name!r}: it has {', '.join(known)}")
            options = known[name].options
            if options is not None and value not in options:
                raise AnalysisError(
                    f"{name} is {value!r}: give one of {', '.join(map(repr, options))}"
                )
            known[name].value = value
        self._set_first_values()
        size = sum(len(csv.encode()) for csv in self.csv.values())
        if size > LARGEST:
            raise AnalysisError(
                f"{self.name} would bring {size / 1000:,.0f} kB of numbers into its page, which "
                f"holds at most {LARGEST / 1000:.0f}: give fewer models, or effects of fewer "
                "dimensions"
            )

    def _set_first_values(self) -> None:
        """Give each field without a value the first that the view allows."""
        first = self.controls[0]
        chosen = self.start.get(first.name) or next(iter(first.options or [None]))
        limits = self.limits.get(chosen, {})
        for control in self.controls:
            if control.value is not None:
                continue
            allowed = limits.get(control.name) or [*control.options]
            # Of a number, the least, the largest and, if it is not the least, the first.
            is_third = not control.options and len(allowed) > 2
            control.value = allowed[2 if is_third else 0]

    @functools.cached_property
    def csv(self) -> dict[str, str]:
        """The tables as the page has them."""
        return {name: as_csv(table) for name, table in self.tables.items()}

    def _vega(
        self,
        panel: alt.TopLevelMixin,
        width: int | str,
        said: Sequence[tuple[str, ...]] = (),
    ) -> dict:
        """A panel as Vega, with all data but the tables, and the sentences on it."""
        parameters = [
            alt.param(name=control.name, value=control.value) for control in self.controls
        ]
        chart = _wide(panel, width).add_params(*parameters)
        spec = vl_convert.vegalite_to_vega(chart.configure(**CONFIG).to_dict(validate=False))
        data = [*self.data]
        for name, table in self.tables.items():
            kinds = {}
            for column, kind in table.dtypes.items():
                kinds[column] = "number" if pd.api.types.is_numeric_dtype(kind) else "string"
            data.insert(0, {"name": name, "values": "", "format": {"type": "csv", "parse": kinds}})
        for number, (source, chosen, words, *_) in enumerate(said):
            transform = steps(chosen, said=words)
            data.append({"name": f"said{number}", "source": source, "transform": transform})
        known = {made["name"] for made in data}
        data += [made for made in spec["data"] if made["name"] not in known]
        # A group of no marks needs words, too.
        marks = [mark | {"description": spec.get("description", "")} for mark in spec["marks"]]
        return spec | {"marks": marks, "data": data}

    @functools.cached_property
    def svg(self) -> str:
        """The panels as they begin, as one picture in black ink."""
        # Scales of the same channel mean other things in other panels.
        whole = alt.concat(*(_wide(panel, 300) for panel in self.panels), columns=2)
        spec = self._vega(whole.resolve_scale(color="independent", shape="independent"), 300)
        for made in spec["data"]:
            if made["name"] in self.tables:
                made["values"] = self.csv[made["name"]]
        return vl_convert.vega_to_svg(spec)

    def figure(self) -> str:
        """The figure as HTML, which ``SCRIPT`` brings to life."""
        picture = base64.b64encode(self.svg.encode()).decode()
        still = f'<img src="data:image/svg+xml;base64,{picture}" alt="{escape(self.alt)}">'
        keys = {}
        tables = []
        for name, csv in self.csv.items():
            keys[name] = hashlib.sha256(csv.encode()).hexdigest()[:12]
            tables.append(TABLE.format(key=keys[name], csv=_json(csv)))
        # The first of them has the sentences.
        first, *others = self.panels
        panels = [self._vega(first, "container", self.said)]
        panels += [self._vega(panel, "container") for panel in others]
        for number in self.sweeps:
            panels[number]["signals"] += SWEEP
        ways = {"moves": self.moves, "sweeps": self.sweeps}
        given = {"panels": panels, "tables": keys, "limits": self.limits, **ways}
        given |= {"source": self.source, "about": self.about}
        given["said"] = [(*around, "", "")[:2] for _, _, _, *around in self.said]
        return f"""<figure id="{escape(self.name)}" class="view">
<style>{STYLE}</style>
<div class="still">{still}</div>
<div class="live" hidden><form>{"".join(control.html() for control in self.controls)}</form>
<div class="panels"></div><output aria-live="polite"></output></div>
{"".join(tables)}
<script class="given" type="application/json">{_json(given)}</script>
<figcaption style="color: inherit">{escape(self.caption)}</figcaption>
</figure>"""

    def _repr_html_(self) -> str:
        return f"{self.figure()}\n<script>{vega()}</script>\n<script>{SCRIPT}</script>"

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        bundle = {
            "text/html": self._repr_html_(),
            "image/svg+xml": self.svg,
            "text/plain": repr(self),
        }
        return bundle | {"text/csv": next(iter(self.csv.values()))}

    def __repr__(self) -> str:
        return f"<{self.name}: {self.caption} As a page: .save('{self.name}.html')>"

    def link(self, words: str, **state: str | float) -> str:
        """A link to a state of the view on its page, for HTML and markdown.

        Args:
            words: its text.
            state: values of fields, by their names.
        """
        address = f"#{escape(self.name)}&amp;{escape(urlencode(state))}"
        return f'<a href="{address}">{entities(words)}</a>'

    def save(self, path: Path | str) -> None:
        """Write the view as a page that opens alone (``.html``), or its picture (``.svg``).

        Raises:
            AnalysisError: the file has another ending, or cannot be written.
        """
        path = Path(path)
        if path.suffix not in (".html", ".svg"):
            raise AnalysisError(f"a view is saved as .html or .svg, not as {path.name}")
        content = self.svg
        if path.suffix == ".html":
            content = page(self.name.removeprefix("fig-"), self._repr_html_())
        write(path, content)

    @property
    def alt(self) -> str:
        """The descriptions of the panels, for readers who cannot see them."""
        return ". ".join(panel.description for panel in self.panels)


TABLE = '<script class="table" type="application/json" data-key="{key}">{csv}</script>'


def steps(*kept: str, **computed: str) -> list[dict[str, str]]:
    """Transforms of Vega: conditions of rows that are kept, then new fields by their names."""
    transforms = [{"type": "filter", "expr": condition} for condition in kept]
    for name, expression in computed.items():
        transforms.append({"type": "formula", "as": name, "expr": expression})
    return transforms


def as_csv(table: pd.DataFrame) -> str:
    """A table as a page has it."""
    return table.to_csv(index=False, float_format=short)


def short(number: float) -> str:
    """A number with four digits in few letters; nothing for none.

    >>> short(-0.012349), short(12.0), short(float("nan"))
    ('-.01235', '12', '')
    """
    return re.sub(r"^(-?)0(?=\.)", r"\1", f"{number:.4g}").replace("nan", "")


def _json(given: object) -> str:
    """JSON in which no end tag can stand, whatever models are called."""
    return json.dumps(given, ensure_ascii=False).replace("<", r"\u003c")


def _wide(panel: alt.TopLevelMixin, width: int | str) -> alt.TopLevelMixin:
    """As wide, unless it says how wide it is, or is several."""
    if getattr(panel, "width", None) is alt.Undefined:
        return panel.properties(width=width)
    return panel


@functools.cache
def vega() -> str:
    """Vega as a script, the version for which vl-convert compiles, which brings it along."""
    source = f"/npm/vega@{vl_convert.get_vega_version()}/+esm"
    bundle = vl_convert.javascript_bundle(
        f'import {{ View, parse }} from "{source}"; window.vega = {{ View, parse }};'
    )
    return f"(() => {{{bundle}}})();"
