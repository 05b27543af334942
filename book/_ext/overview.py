"""Pages on all pages: findings, figures, and how each notebook was executed.

A Sphinx extension (``_config.yml`` names it). ``{finding} PAGE`` is what a page found, as a card;
``{findings} PART`` what each page of a part found; ``{gallery}`` has all figures; ``{models}`` the
models that were measured, and ``{architectures}`` those that can be; ``{execution-status}`` when
and with what each notebook was executed.
"""

import importlib.metadata
import platform
import re
from pathlib import Path

import pandas as pd
from docutils import nodes
from notebooks import executed, figures, finding, shown
from packaging.requirements import Requirement
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from analysis_book.build.parameters import read_notebook
from analysis_book.figures import Table, code, plain
from analysis_book.training.recipes import RECIPES
from analysis_book.training.settings import RUNS
from analysis_lib.files import data_directory
from analysis_lib.models import known_models, title

CARD = """\
::::{{card}} {title}
:class-card: finding
:link: /{page}
:link-type: doc

{text}
::::
"""
# What pip is asked for beside the library, to have the book.
EXTRAS = ("adapters", "book", "cluster", "packages")
PRETRAINED = (
    "a {} of {num_hidden_layers} layers, {num_attention_heads} heads, width "
    "{hidden_size}, pretrained here"
)
# Proper names of what is pretrained here.
FAMILIES = {"bert": "BERT", "modernbert": "ModernBERT"}
THUMBNAIL = """\
:::{{grid-item-card}}
:link: {name}
:link-type: ref
:class-card: thumbnail

```{{raw}} html
{picture}
```
{{numref}}`{name}`. {caption}
:::
"""


class Finding(SphinxDirective):
    """A card: the question of a page, and its finding."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        notebook = read_notebook(Path(self.env.srcdir, f"{self.arguments[0]}.ipynb"))
        heading = notebook.cells[0].source.splitlines()[0].removeprefix("# ")
        return self.parse_text_to_nodes(
            CARD.format(title=heading, page=self.arguments[0], text=finding(notebook))
        )


class Findings(SphinxDirective):
    """``{findings} outliers``: what each page of a part found."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        part = [name for name in executed(self.env) if name.startswith(f"{self.arguments[0]}/")]
        lines = []
        for name in part:
            text = finding(read_notebook(Path(self.env.srcdir, f"{name}.ipynb")))
            lines.append(f"- **{{doc}}`/{name}`** {text}")
        return self.parse_text_to_nodes("\n".join(lines))


class Gallery(SphinxDirective):
    """A section for each notebook, with a card for each of its figures."""

    def run(self) -> list[nodes.Node]:
        sections = []
        for page, path in executed(self.env).items():
            cards = []
            for name, drawn in figures(read_notebook(path)).items():
                picture = shown(self.env, name, drawn, alt="")
                cards.append(THUMBNAIL.format(name=name, picture=picture, caption=drawn.caption))
            if cards:
                sections += [
                    f"**{{doc}}`{page}`**\n",
                    "::::{grid} 1 2 3 3\n:gutter: 2\n",
                    *cards,
                    "::::\n",
                ]
        return self.parse_text_to_nodes("\n".join(sections))


class Models(SphinxDirective):
    """The models that the numbers come from, as a table."""

    def run(self) -> list[nodes.Node]:
        names = {}
        for path in executed(self.env).values():
            parameters = read_notebook(path).metadata["analysis_lib"]["parameters"]
            for parameter, value in parameters.items():
                if re.fullmatch(r"(\w+_)?models?|beside|runs", parameter):
                    models = [value] if isinstance(value, str) else value
                    names |= dict.fromkeys(models)
        known = known_models()
        lines = ["| model | what it is |", "|:---|:---|"]
        kept = data_directory() / "measurements"
        for name in names:
            if run := RUNS.get(name.partition("@")[0]):
                what = PRETRAINED.format(FAMILIES[run.model_type], **run.configuration)
                lines.append(f"| {plain(name)} | {what} |")
            # Not the small models of the book, nor measurements that are no models.
            elif name.partition("@")[0] not in RECIPES and (
                name in known or not (kept / name).exists()
            ):
                what = known.get(name, name).partition(": ")[2] or name
                lines.append(f"| {plain(title(name))} | {plain(what)} |")
        return self.parse_text_to_nodes("\n".join(lines))


class Architectures(SphinxDirective):
    """The architectures that transformers knows by what can be measured: how many, then which."""

    def run(self) -> list[nodes.Node]:
        survey = pd.read_csv(data_directory() / "architectures.csv", keep_default_na=False)
        # What was not measured has no tables.
        survey["label"] = (survey["result"] + ": " + survey["tables"]).str.rstrip(": ")
        of_pairs = survey["reads"].str.endswith("with texts")
        parts = []
        for heading, rows in (
            ("texts, images or sounds alone", survey[~of_pairs]),
            ("images or sounds with texts", survey[of_pairs]),
        ):
            parts.append(f"| {heading} | architectures |\n|:---|---:|")
            results = rows.groupby("label")
            parts[-1] += "".join(f"\n| {label} | {len(same)} |" for label, same in results)
            for label, same in results:
                reasons = same["why"].map(" ({})".format).where(same["why"] != "", "")
                names = "; ".join(f"`{name}`" for name in same["architecture"] + reasons)
                parts.append(f":::{{dropdown}} {label}\n{names}\n:::")
        return self.parse_text_to_nodes("\n\n".join(parts))


class ExecutionStatus(SphinxDirective):
    """Two tables: the executed notebooks, and the versions of the packages."""

    def run(self) -> list[nodes.Node]:
        rows = []
        for page, path in executed(self.env).items():
            record = read_notebook(path).metadata["analysis_lib"]
            values = ", ".join(
                code(f"{name} = {value!r}") for name, value in record["parameters"].items()
            )
            finished = record["finished"][:16].replace("T", " ")
            row = (
                f"{{doc}}`{page}`",
                values or "none",
                f"{record['seconds']:.0f}",
                finished,
                record["key"][:12],
            )
            rows.append(row)
        columns = ["notebook", "parameters", "seconds", "finished (UTC)", "key"]
        wanted = map(Requirement, importlib.metadata.requires("analysis_lib") or [])
        names = sorted(
            {requirement.name for requirement in wanted if _is_used(requirement)}, key=str.lower
        )
        versions = pd.DataFrame(
            {"package": names, "version": map(importlib.metadata.version, names)}
        )
        status = pd.DataFrame(rows, columns=columns)
        status = Table(status, "tab-status", "Executed notebooks", markup=columns[:2])
        caption = "Versions of the packages on which the library and the book depend"
        versions = Table(versions, "tab-versions", caption)
        where = (
            f"They ran on Python {platform.python_version()}, {platform.system()} on "
            f"{platform.machine()}."
        )
        parts = [where, status._repr_markdown_(), versions._repr_markdown_()]
        return self.parse_text_to_nodes("\n\n".join(parts))


def _is_used(requirement: Requirement) -> bool:
    """True if the library or the book needs a package, and not the tests alone."""
    if requirement.name == "analysis_lib":
        return False
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in EXTRAS)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension with Sphinx."""
    directives = {
        "finding": Finding,
        "findings": Findings,
        "gallery": Gallery,
        "models": Models,
    }
    directives |= {"architectures": Architectures, "execution-status": ExecutionStatus}
    for name, directive in directives.items():
        app.add_directive(name, directive)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
