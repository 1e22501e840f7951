"""Owns where documents come from: the default corpus or anything HF `datasets` reads, as one ordered stream."""

import glob
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mezzotint.data.corpus import corpus_documents, corpus_files
from mezzotint.data.errors import InputError
from mezzotint.data.hub import first_line, require_reachable
from mezzotint.data.local_files import PACKED, files_of_one_kind, looks_like_path, stamps

UNITS = ("document", "paragraph", "line")
READ_AT_ONCE = 64  # documents asked of `datasets` in one step


class Document(NamedTuple):
    """One text, and the key whose hash decides whether it is held out."""

    text: str
    key: str


@dataclass(frozen=True)
class SourceConfig:
    """What to read: `corpus` (the default) or `input`, a file, folder, saved dataset or hub name."""

    corpus: str = "stdlib"
    input: str = ""  # when given, read instead of the corpus
    text_column: str = "text"
    split: str = "train"  # of a hub name or a saved dataset with several splits
    subset: str = ""  # configuration of a hub dataset
    pattern: str = "*"  # names of files taken from a folder
    unit: str = "document"  # of plain text files: whole file, paragraph or line


@dataclass(frozen=True)
class Source:
    """An opened source; `read(skip)` yields its documents from number `skip` on, always in the same order."""

    name: str
    read: Callable[[int], Iterator[Document]]
    total_bytes: int | None  # of text, for the progress bar; None when unknown or packed
    signature: list[str]  # changes when the text behind the name has changed


def open_source(config: SourceConfig) -> Source:
    """Open what `config` names; InputError in one sentence when it is missing, empty or has no such column."""
    if not config.input:
        return _open_corpus(config.corpus)
    if config.unit not in UNITS:
        raise InputError(f"no text unit {config.unit!r}: choose one of {', '.join(UNITS)}")
    path = Path(config.input).expanduser()
    if not path.exists():
        if looks_like_path(config.input):
            raise InputError(f"there is no file or folder {config.input}: check the path")
        return _open_hub(config)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return _open_saved(config, path)
    return _open_files(config, path)


def _open_corpus(name: str) -> Source:
    files = corpus_files(name)
    sizes = [path.stat().st_size for _, path in files]

    def read(skip: int) -> Iterator[Document]:
        return (Document(text, key) for key, text in corpus_documents(name, skip))

    signature = [f"{relative} {size}" for (relative, _), size in zip(files, sizes)]
    return Source(name=name, read=read, total_bytes=sum(sizes), signature=signature)


def _open_hub(config: SourceConfig) -> Source:
    require_reachable(config.input)

    def load() -> Any:
        return _datasets().load_dataset(config.input, config.subset or None, split=config.split, streaming=True)

    return _checked_source(config, load, total_bytes=None, signature=[config.input])


def _open_saved(config: SourceConfig, path: Path) -> Source:
    def load() -> Any:
        dataset = _datasets().load_from_disk(str(path))
        if isinstance(dataset, dict):
            if config.split not in dataset:
                raise InputError(f"{path} has no split {config.split!r}: its splits are {', '.join(dataset)}")
            dataset = dataset[config.split]
        return dataset.to_iterable_dataset()

    files = sorted(path.rglob("*.arrow"))
    return _checked_source(config, load, total_bytes=None, signature=stamps(files))


def _open_files(config: SourceConfig, path: Path) -> Source:
    files, kind = files_of_one_kind(path, config.pattern)
    options = {"sample_by": config.unit} if kind == "text" else {}

    def load(names: list[Path] = files) -> Any:
        data_files = [glob.escape(str(name)) for name in names]  # `datasets` takes names for patterns
        return _datasets().load_dataset(kind, data_files=data_files, split="train", streaming=True, **options)

    def blame() -> str:
        """The first file that cannot be read; looked for only after a failure, since `datasets` does not say."""
        return next((str(file) for file in files if _fails(lambda: load([file]))), config.input)  # noqa: B023

    plain = kind == "text" and not any(file.suffix in PACKED for file in files)
    total = sum(file.stat().st_size for file in files) if plain else None
    return _checked_source(config, load, total_bytes=total, signature=stamps(files), blame=blame)


def _checked_source(
    config: SourceConfig,
    load: Callable[[], Any],
    *,
    total_bytes: int | None,
    signature: list[str],
    blame: Callable[[], str] | None = None,
) -> Source:
    """A source over the iterable dataset `load()` gives, whose first document has been looked at."""
    column = config.text_column

    def sentence(error: Exception) -> InputError:
        name = blame() if blame else config.input
        return InputError(f"{name} could not be read ({first_line(error)}): repair it and run the same command again")

    try:
        first = next(iter(load()), None)
    except InputError:
        raise
    except Exception as error:  # datasets, pyarrow, zstandard and the network raise unrelated classes
        raise sentence(error) from error
    if first is None:
        raise InputError(f"there is no text in {config.input}: give a file, folder or dataset that holds some")
    if column not in first:
        columns = ", ".join(first)
        raise InputError(f"{config.input} has no column {column!r}: its columns are {columns}; use --text-column")

    def read(skip: int) -> Iterator[Document]:
        dataset = load().select_columns([column]).skip(skip)
        batches = iter(dataset.iter(batch_size=READ_AT_ONCE))
        while True:
            try:
                batch = next(batches, None)
            except Exception as error:
                raise sentence(error) from error
            if batch is None:
                return
            for text in batch[column]:
                yield _document(text, config)

    return Source(name=config.input, read=read, total_bytes=total_bytes, signature=signature)


def _document(text: object, config: SourceConfig) -> Document:
    """A document from one entry of the text column; a missing entry is an empty document."""
    if text is None:
        text = ""
    if not isinstance(text, str):
        raise InputError(
            f"column {config.text_column!r} of {config.input} holds {type(text).__name__}, not text: use --text-column"
        )
    return Document(text, text)


def _datasets() -> Any:
    """The `datasets` module, silent: what goes wrong is said once, by us."""
    import datasets

    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    return datasets


def _fails(load: Callable[[], Any]) -> bool:
    """Whether reading the whole dataset raises."""
    try:
        for _ in load().iter(batch_size=READ_AT_ONCE):
            pass
    except Exception:
        return True
    return False
