"""What pyproject.toml cannot say: a wheel holds data/ as analysis_lib/data, and of book/ the notebooks and the look."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py


class WithConfiguration(build_py):
    """With what Sphinx is told of the book: reports are told the same."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copy("_config.yml", Path(self.build_lib, "analysis_lib", "notebooks"))


setup(
    packages=[*find_packages(include=["analysis_lib*"]), "analysis_lib.data", "analysis_lib.notebooks"],
    package_dir={"analysis_lib.data": "data", "analysis_lib.notebooks": "book"},
    cmdclass={"build_py": WithConfiguration},
)
