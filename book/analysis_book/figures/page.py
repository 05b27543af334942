"""A figure as a page of its own, which opens in any browser without a network."""

from html import escape
from pathlib import Path

from analysis_lib.errors import AnalysisError

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>:root {{ color-scheme: light dark; font-family: sans-serif }}</style>
<main><h1>{title}</h1>
{figure}</main>
"""  # noqa: E501


def page(title: str, figure: str) -> str:
    """The page that shows the HTML of a figure under a title."""
    return _PAGE.format(title=escape(title), figure=figure)


def write(path: Path, text: str) -> None:
    """Write a page or a picture.

    Raises:
        AnalysisError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise AnalysisError(f"{path} cannot be written: {error.strerror}") from error
