"""Texts with a clear licence that ``barnraise data prepare`` can fetch by itself."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import httpx

from barnraise.coordinator.corpus_files import Progress
from barnraise.kernels.token_shards import CorpusError
from barnraise.protocol.errors import StorageError

_MAX_ARCHIVE = 64 * 1024 * 1024
_MAX_TEXT = 256 * 1024 * 1024


@dataclass(frozen=True)
class Source:
    """A text that can be fetched: from a Debian package where apt is at hand, else from its publisher."""

    name: str
    licence: str
    origin: str
    package: str
    inside: str  # folder in the package that holds the text
    url: str  # a .tar.bz2 or .tar.gz


SOURCES = {
    "python-docs": Source(
        name="python-docs",
        licence="PSF-2.0 (Python Software Foundation License), code examples 0BSD",
        origin="The Python 3.11 documentation, reStructuredText sources, python.org",
        package="python3.11-doc",
        inside="usr/share/doc/python3.11/html/_sources",
        url="https://www.python.org/ftp/python/doc/3.11.2/python-3.11.2-docs-text.tar.bz2",
    )
}


@contextmanager
def fetched(source: Source, progress: Progress) -> Iterator[Path]:
    """The folder with the source's text files, for as long as it is needed.

    Raises:
        CorpusError: it could not be had either way; the text names both reasons.
        StorageError: the disk refuses.
    """
    with tempfile.TemporaryDirectory(prefix="barnraise-corpus-") as scratch:
        folder = Path(scratch)
        progress(f"fetching {source.name}", 0.0)
        reason = _from_debian(source, folder)
        if not reason:
            yield folder / source.inside
            return
        other = _from_publisher(source, folder / "archive", progress)
        if other:
            raise CorpusError(
                f"{source.name} could not be fetched: Debian's {source.package}: {reason}; "
                f"{source.url}: {other}. Give a folder of text files instead"
            )
        yield folder / "archive"


def _from_debian(source: Source, folder: Path) -> str:
    """Unpack the package without installing it; why not, if it cannot be."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return "no apt-get here"
    try:
        for command in (
            ["apt-get", "download", "--quiet", source.package],
            ["sh", "-c", "dpkg-deb -x ./*.deb ."],
        ):
            subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
    except subprocess.CalledProcessError as error:
        text = error.stderr.decode(errors="replace").strip().splitlines()
        return text[-1] if text else f"exit code {error.returncode}"
    except subprocess.TimeoutExpired:
        return "no answer within 300 s"
    return "" if (folder / source.inside).is_dir() else f"it holds no {source.inside}"


def _from_publisher(source: Source, folder: Path, progress: Progress) -> str:
    archive = folder.with_suffix(".tar")
    try:
        with httpx.stream("GET", source.url, follow_redirects=True, timeout=30) as reply:
            reply.raise_for_status()
            expected = int(reply.headers.get("content-length", 0))
            done = 0
            with archive.open("wb") as file:
                for piece in reply.iter_bytes(1 << 20):
                    done += len(piece)
                    if done > _MAX_ARCHIVE:
                        return f"more than {_MAX_ARCHIVE} bytes"
                    file.write(piece)
                    progress(f"fetching {source.name}", done / expected if expected else 0.0)
        _unpack_text(archive, folder)
    except (httpx.HTTPError, tarfile.TarError, ValueError) as error:
        return str(error) or type(error).__name__
    except OSError as error:
        raise StorageError(f"cannot store {source.name}: {error}") from error
    return ""


def _unpack_text(archive: Path, folder: Path) -> None:
    """Only plain text files, under names of our own: nothing in an archive chooses a path."""
    folder.mkdir()
    left = _MAX_TEXT
    with tarfile.open(archive) as tar:
        for number, member in enumerate(tar):
            if not member.isfile() or PurePosixPath(member.name).suffix not in {".txt", ".rst"}:
                continue
            left -= member.size
            if left < 0:
                raise ValueError(f"more than {_MAX_TEXT} bytes of text")
            content = tar.extractfile(member)
            if content is not None:
                (folder / f"{number:06d}.txt").write_bytes(content.read(member.size))
