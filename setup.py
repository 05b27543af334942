"""What pyproject.toml cannot say: where the two packages lie, and what a wheel holds besides.

It has data/ as analysis_lib/data, and of book/ the notebooks and the look as
analysis_book/notebooks.
"""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py


class WithConfiguration(build_py):
    """With what Sphinx is told of the book: reports are told the same."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copy("_config.yml", Path(self.build_lib, "analysis_book", "notebooks"))


LIBRARY, BOOK = (
    find_packages(include=["analysis_lib*"]),
    find_packages("book", include=["analysis_book*"]),
)
setup(
    packages=[*LIBRARY, *BOOK, "analysis_lib.data", "analysis_book.notebooks"],
    package_dir={
        "analysis_book": "book/analysis_book",
        "analysis_lib.data": "data",
        "analysis_book.notebooks": "book",
    },
    cmdclass={"build_py": WithConfiguration},
)
