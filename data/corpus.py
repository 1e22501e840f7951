"""Owns the default corpus: the standard library of the running Python, one document a file, no download."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from mezzotint.data.errors import InputError

CORPORA = ("stdlib", "stdlib+tests")
FOREIGN = {"site-packages", "dist-packages", "__pycache__"}  # installed packages and caches are no part of the library
TESTS = {"test", "tests", "idle_test"}


def corpus_files(name: str) -> list[tuple[str, Path]]:
    """(relative name, path) of every source file of the corpus, sorted by name: the same order everywhere.

    `stdlib` leaves test folders out; `stdlib+tests` takes them in.
    """
    if name not in CORPORA:
        raise InputError(f"no corpus {name!r}: choose one of {', '.join(CORPORA)}, or give a text with --input")
    root = Path(sysconfig.get_path("stdlib"))
    left_out = FOREIGN if name == "stdlib+tests" else FOREIGN | TESTS
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    files = [(name, root / name) for name in names if not left_out & set(name.split("/")[:-1])]
    if not files:
        raise InputError(f"{root} holds no Python sources: give a text with --input instead of --corpus {name}")
    return files


def corpus_documents(name: str, skip: int = 0) -> Iterator[tuple[str, str]]:
    """(relative name, text) of each document of the corpus from document `skip` on.

    A file that is no UTF-8 (a few tests of encodings) is an empty document, so that the count does not depend on it.
    """
    for relative, path in corpus_files(name)[skip:]:
        try:
            yield relative, path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            yield relative, ""
