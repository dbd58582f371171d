"""Make ``impl/data/corpus.txt``, the embedded training text, from the standard library of the running Python.

It was run once, with CPython 3.11.7; the file is committed because the library's text differs between Python versions.
Usage: ``python scripts/make_corpus.py OUTPUT``; prints size, files and SHA-256.

Taken: every ``.py`` file of ``Lib``, in path order, that is pure ASCII and carries no licence notice of its own (so
that all of it is under PSF-2.0), except generated files and the folders in ``SKIPPED_FOLDERS`` (tests, tables, IDLE).
The bytes are joined, cut into blocks of 16 KiB that are shuffled with a fixed seed (so that the held-out tenth at the
end resembles the rest), and the first 64 blocks are kept: 1 MiB.
"""

from __future__ import annotations

import hashlib
import random
import re
import sys
import sysconfig
from pathlib import Path

BLOCK = 16 * 1024
BLOCKS = 64
SEED = 2026
SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idlelib",
    "idle_test",
    "lib2to3",
    "encodings",
    "pydoc_data",
    "turtledemo",
    "ensurepip",
    "site-packages",
    "__pycache__",
    "__phello__",
}
OWN_NOTICE = re.compile(
    rb"permission to use|permission is hereby|redistribution and use|all rights reserved|copyright \(c\)|copyright \d"
    rb"|licensed under|public domain",
    re.IGNORECASE,
)


def sources(library: Path) -> list[Path]:
    """Return the files to take, sorted by their path below ``library``."""
    found = []
    for path in library.rglob("*.py"):
        relative = path.relative_to(library)
        generated = path.name.startswith(("_sysconfigdata", "sitecustomize", "usercustomize"))
        if generated or SKIPPED_FOLDERS & set(relative.parts[:-1]):
            continue
        text = path.read_bytes()
        if text.isascii() and not OWN_NOTICE.search(text):
            found.append(path)
    return sorted(found, key=lambda p: p.relative_to(library).as_posix())


def corpus(files: list[Path]) -> bytes:
    """Return the shuffled and cut text."""
    text = b"".join(path.read_bytes() for path in files)
    blocks = [text[i : i + BLOCK] for i in range(0, len(text) - BLOCK + 1, BLOCK)]
    random.Random(SEED).shuffle(blocks)
    return b"".join(blocks[:BLOCKS])


def main() -> None:
    """Write the file named on the command line."""
    files = sources(Path(sysconfig.get_path("stdlib")))
    text = corpus(files)
    Path(sys.argv[1]).write_bytes(text)
    digest = hashlib.sha256(text).hexdigest()
    print(f"Python {sys.version.split()[0]}: {len(files)} files, {len(text)} bytes, sha256 {digest}")


if __name__ == "__main__":
    main()
