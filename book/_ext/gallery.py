"""All figures of the book, small, each leading to its place.

A Sphinx extension (``_config.yml`` names it). ``{gallery}`` is the page ``book/gallery.md``.
"""

import json
from pathlib import Path

from docutils import nodes
from pages import executed, figures, on_white
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from analysis_lib.book.parameters import read_notebook

FOLDER, WIDTH = Path("_static", "thumbnails"), 400
CARD = """\
:::{{grid-item-card}}
:link: {name}
:link-type: ref
:class-card: thumbnail

```{{image}} /{thumbnail}
:alt: {alt}
:loading: lazy
```
{{numref}}`{name}`. {caption}
:::
"""


class Gallery(SphinxDirective):
    """A section for each notebook, with a card for each of its figures."""

    def run(self) -> list[nodes.Node]:
        home, sections = Path(self.env.srcdir, FOLDER), []
        home.mkdir(parents=True, exist_ok=True)
        for page, path in executed(self.env).items():
            if cards := self.cards(path, home):
                sections += [f"**{{doc}}`{page}`**\n", "::::{grid} 1 2 3 3\n:gutter: 2\n", *cards, "::::\n"]
        return self.parse_text_to_nodes("\n".join(sections))

    def cards(self, path: Path, home: Path) -> list[str]:
        """A card for each figure of a notebook that is a picture."""
        found = []
        for name, drawn in figures(read_notebook(path)).items():
            if "png" in drawn.files:
                on_white(drawn.files["png"], WIDTH, WIDTH).save(home / f"{name}.jpg", quality=80)
                small = (FOLDER / f"{name}.jpg").as_posix()
                # Quoted: the text may hold what means something in an option.
                alt = json.dumps(drawn.alt, ensure_ascii=False)
                found.append(CARD.format(name=name, thumbnail=small, alt=alt, caption=drawn.caption))
        return found


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls when it loads the extension."""
    app.add_directive("gallery", Gallery)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
