"""Files that survive interruption: checksums, a manifest per folder, and folders that appear whole or not at
all.

A folder made by `build_folder` carries `manifest.json` with the size and sha256 of every file in it;
`folder_is_intact` re-reads them, so a truncated or edited copy is noticed before it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from tinyserve.progress import bar

MANIFEST = "manifest.json"
CACHE_VARIABLE = "TINYSERVE_CACHE"
_READ_SIZE = 4 << 20


def cache_directory() -> Path:
    """The folder for converted models and fetched texts: `TINYSERVE_CACHE`, or `tinyserve` in the platform's
    user cache.
    """
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "tinyserve"


def sha256_of(path: Path, progress: tqdm | None = None) -> str:
    """The file's sha256 in hex; advances `progress` by the bytes read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_SIZE):
            digest.update(block)
            if progress is not None:
                progress.update(len(block))
    return digest.hexdigest()


def byte_bar(description: str, total: int) -> tqdm:
    return bar(description, total=total, unit="B", scale=True)


def write_manifest(folder: Path, facts: dict[str, object]) -> None:
    """Writes `manifest.json`: the given facts (what the folder was made from) and every file's size and
    sha256."""
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    text = json.dumps({**facts, "files": files}, indent=1)
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def folder_is_intact(folder: Path, facts: dict[str, object], what: str = "model") -> bool:
    """True when the manifest states these facts and every file it lists still has its size and sha256.

    Args:
        what: is in the folder, for the progress bar.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files: dict[str, dict[str, object]] = manifest["files"]
        if not files or any(manifest.get(name) != value for name, value in facts.items()):
            return False
        if any((folder / name).stat().st_size != entry["bytes"] for name, entry in files.items()):
            return False
        with byte_bar(
            f"checking the cached {what}", sum(int(str(entry["bytes"])) for entry in files.values())
        ) as progress:
            return all(sha256_of(folder / name, progress) == entry["sha256"] for name, entry in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def build_folder(
    target: Path, facts: dict[str, object], fill: Callable[[Path], None], what: str = "model"
) -> Path:
    """Returns `target`, made by `fill(temporary folder)` unless an intact one is already there.

    The work happens in a temporary sibling that is renamed at the end: a crash leaves no half-made `target`,
    and of two processes that convert at once the later one finds the earlier one's folder and drops its own.
    """
    if folder_is_intact(target, facts, what):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        fill(work)
        write_manifest(work, facts)
        work.chmod(0o755)  # mkdtemp makes the folder private; a shared cache should be readable
        _move_into_place(work, target, facts, what)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _move_into_place(work: Path, target: Path, facts: dict[str, object], what: str) -> None:
    with contextlib.suppress(OSError):
        work.rename(target)
        return
    # Something is there: another process's good copy, or a damaged one that has to go first.
    if folder_is_intact(target, facts, what):
        return
    discarded = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    target.rename(discarded / target.name)
    work.rename(target)
    shutil.rmtree(discarded, ignore_errors=True)
