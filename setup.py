"""What pyproject.toml cannot say: a wheel holds the folder data/ as analysis_lib/data, and the notebooks of book/."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["analysis_lib*"]), "analysis_lib.data", "analysis_lib.notebooks"],
    package_dir={"analysis_lib.data": "data", "analysis_lib.notebooks": "book"},
)
