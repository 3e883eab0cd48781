"""Long texts by name (from registry packages) or from files of yours, as a list of documents."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinyserve.errors import SetupError, UsageError
from tinyserve.eval.packages import locate
from tinyserve.eval.sources import get
from tinyserve.texts import plain_text

__all__ = ["CORPORA", "Document", "load", "read_json_lines"]


@dataclass(frozen=True)
class Document:
    """Plain text; paragraphs are separated by blank lines."""

    title: str
    text: str


def load(text: str | Path) -> list[Document]:
    """The documents of a corpus, in an order that never changes.

    Args:
        text: a name in `CORPORA`, or a path: a text file, a file of JSON lines with the key "text", or a
            folder of such files.

    Raises:
        UsageError: neither a name nor a path that exists, or a folder without such files.
        SetupError: the corpus is not on this machine, or a file is damaged.
    """
    if str(text) in CORPORA:
        return CORPORA[str(text)]()
    path = Path(text)
    if not path.exists():
        raise UsageError(
            f"text: expected one of {', '.join(CORPORA)} or a path that exists, got {str(text)!r}"
        )
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in (".txt", ".jsonl"))
    documents = [document for file in files for document in _read_file(file) if document.text.strip()]
    if not documents:
        raise UsageError(f"text: expected .txt or .jsonl files that are not empty, found none in {path}")
    return documents


def read_json_lines(path: Path, keys: dict[str, type | tuple[type, ...]]) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; empty lines do not count.

    Args:
        keys: what every object must have, with the type of its value.

    Raises:
        SetupError: the file cannot be read, or a line is something else; it is named.
    """
    rows = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise SetupError(f"{path}, line {number}: expected a JSON object, got {line[:40]!r}") from error
        for key, kind in keys.items():
            if not isinstance(row, dict) or not isinstance(row.get(key), kind):
                raise SetupError(f"{path}, line {number}: expected an object with {key!r}, got {line[:80]!r}")
        rows.append(row)
    return rows


def read_text(path: Path) -> str:
    """The file's text with plain line ends.

    Raises:
        SetupError: no such file, or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"cannot read {path}: {error}") from error


def _read_file(path: Path) -> list[Document]:
    if path.suffix != ".jsonl":
        return [Document(path.stem, read_text(path))]
    rows = read_json_lines(path, {"text": str})
    return [Document(f"{path.stem} {idx}", row["text"]) for idx, row in enumerate(rows)]


def _plays() -> list[Document]:
    return [Document(path.stem, plain_text(read_text(path))) for path in locate(get("plays"))]


def _kjv() -> list[Document]:
    """The verses, one paragraph a chapter, out of a Python file that is read as text."""
    source = read_text(locate(get("kjv"))[0])
    found = re.search(r'"""\n(.*?)"""', source, re.DOTALL)
    assert found is not None  # the checksum says that this is the file
    return [Document("King James Bible", re.sub(r"[\[\]]", "", found[1]).replace("\n", "\n\n"))]


def _austen() -> list[Document]:
    return [
        Document(_first_line(text), text)
        for text in _r_character_vectors(locate(get("austen"))[0].read_bytes())
    ]


def _first_line(text: str) -> str:
    return next(line.strip() for line in text.splitlines() if line.strip()).title()


def _r_character_vectors(database: bytes) -> Iterator[str]:
    """The character vectors in an R lazy-load database, each as lines.

    The format (R Internals, "Serialization Formats"): per object four bytes of length and a zlib stream; in
    it "X\\n", three integers of versions, from version 3 on the name of the native encoding, then the
    object: flags (the low byte is its type, 16 a character vector), its length, and per string flags, length
    and bytes. Integers are big-endian.
    """
    position = 0
    while position < len(database):
        stream = zlib.decompressobj()
        data = stream.decompress(database[position + 4 :])
        position = len(database) - len(stream.unused_data)
        at = 14
        if struct.unpack(">i", data[2:6])[0] >= 3:
            at += 4 + struct.unpack(">i", data[at : at + 4])[0]
        flags, count = struct.unpack(">ii", data[at : at + 8])
        at += 8
        if flags & 255 != 16:
            continue
        lines = []
        for _ in range(count):
            size = max(0, struct.unpack(">i", data[at + 4 : at + 8])[0])
            lines.append(data[at + 8 : at + 8 + size].decode("utf-8", "replace"))
            at += 8 + size
        yield "\n".join(lines)


def _wikipedia() -> list[Document]:
    articles = json.loads(read_text(locate(get("squad"))[0]))["data"]
    return [
        Document(
            article["title"].replace("_", " "),
            "\n\n".join(paragraph["context"].strip() for paragraph in article["paragraphs"]),
        )
        for article in articles
    ]


def _web(*kinds: str) -> list[Document]:
    rows = read_json_lines(locate(get("web"))[0], {"text": str, "type": str})
    return [
        Document(f"{row['type']} {idx}", row["text"]) for idx, row in enumerate(rows) if row["type"] in kinds
    ]


CORPORA: dict[str, Callable[[], list[Document]]] = {
    "plays": _plays,
    "kjv": _kjv,
    "austen": _austen,
    "wikipedia": _wikipedia,
    "c4": lambda: _web("c4"),
    "web": lambda: _web("c4", "openwebtext", "oscar"),
}
