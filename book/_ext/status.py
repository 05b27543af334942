"""The status page: when each notebook was executed, with what, and in which environment.

A Sphinx extension (``_config.yml`` names it). ``{execution-status}`` is the text of ``book/status.md``.
"""

import importlib.metadata
import platform

import pandas as pd
from docutils import nodes
from packaging.requirements import Requirement
from pages import executed
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from analysis_lib.book.parameters import read_notebook
from analysis_lib.figures import Table


class ExecutionStatus(SphinxDirective):
    """Two tables: the executed notebooks, and the versions of the packages."""

    def run(self) -> list[nodes.Node]:
        rows = []
        for page, path in executed(self.env).items():
            record = read_notebook(path).metadata["analysis_lib"]
            values = record["parameters"].items()
            row = {
                "notebook": f"{{doc}}`{page}`",
                "parameters": ", ".join(f"`{name} = {value!r}`" for name, value in values) or "none",
                "seconds": f"{record['seconds']:.0f}",
                "finished (UTC)": record["finished"][:16].replace("T", " "),
                "key": f"`{record['key'][:12]}`",
            }
            rows.append(row)
        wanted = map(Requirement, importlib.metadata.requires("analysis_lib") or [])
        names = [requirement.name for requirement in wanted if not requirement.marker]
        versions = pd.DataFrame({"package": names, "version": map(importlib.metadata.version, names)})
        tables = (
            Table(pd.DataFrame(rows), "tab-status", "Executed notebooks"),
            Table(versions, "tab-versions", "Versions of the packages on which the library depends"),
        )
        where = f"They ran on Python {platform.python_version()}, {platform.system()} on {platform.machine()}."
        return self.parse_text_to_nodes("\n\n".join([where, *(table._repr_markdown_() for table in tables)]))


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls when it loads the extension."""
    app.add_directive("execution-status", ExecutionStatus)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
