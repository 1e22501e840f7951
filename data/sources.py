"""Owns where documents come from: the default corpus or anything HF `datasets` reads, as one ordered stream."""

import glob
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mezzotint.data.corpus import corpus_documents, corpus_files
from mezzotint.data.errors import InputError
from mezzotint.data.hub import first_line, reachable_commit
from mezzotint.data.local_files import (
    PACKED,
    files_of_one_kind,
    is_address,
    kind_of_addresses,
    looks_like_path,
    stamps,
)

UNITS = ("document", "paragraph", "line")
READ_AT_ONCE = 64  # documents asked of `datasets` in one step
HUB_TRIES, HUB_WAIT = 3, 2  # rounds, and seconds between them, of tries that huggingface_hub makes at each request


class Position(NamedTuple):
    """A place in a source: files that were read whole, and documents read of the next one."""

    file: int = 0
    documents: int = 0


START = Position()


class Document(NamedTuple):
    """One text, the key whose hash decides whether it is held out, and the place behind it."""

    text: str
    key: str
    position: Position


@dataclass(frozen=True)
class SourceConfig:
    """What to read: `corpus` (the default) or `input`, a file, folder, saved dataset, hub name or web addresses."""

    corpus: str = "stdlib"
    input: str = ""  # when given, read instead of the corpus
    text_column: str = "text"
    split: str = "train"  # of a hub name or a saved dataset with several splits
    subset: str = ""  # configuration of a hub dataset
    pattern: str = "*"  # names of files taken from a folder
    unit: str = "document"  # of plain text files: whole file, paragraph or line


@dataclass(frozen=True)
class Source:
    """An opened source; `read(start)` yields its documents from place `start` on, always in the same order."""

    name: str
    read: Callable[[Position], Iterator[Document]]
    total_bytes: int | None  # of text, for the progress bar; None when unknown or packed
    signature: list[str]  # changes when the text behind the name has changed


def open_source(config: SourceConfig) -> Source:
    """Open what `config` names; InputError in one sentence when it is missing, empty or has no such column."""
    if not config.input:
        return _open_corpus(config.corpus)
    if config.unit not in UNITS:
        raise InputError(f"no text unit {config.unit!r}: choose one of {', '.join(UNITS)}")
    if is_address(config.input):
        return _open_addresses(config)
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

    def read(start: Position) -> Iterator[Document]:
        documents = enumerate(corpus_documents(name, start.documents), start.documents + 1)
        return (Document(text, key, Position(0, number)) for number, (key, text) in documents)

    signature = [f"{relative} {size}" for (relative, _), size in zip(files, sizes)]
    return Source(name=name, read=read, total_bytes=sum(sizes), signature=signature)


def _open_hub(config: SourceConfig) -> Source:
    commit = reachable_commit(config.input)  # read to the end, even when a newer one comes meanwhile

    def load() -> Any:
        subset, split = config.subset or None, config.split
        return _datasets().load_dataset(config.input, subset, split=split, revision=commit, streaming=True)

    return _checked_source(config, load, total_bytes=None, signature=[config.input, commit], remote=True)


def _open_addresses(config: SourceConfig) -> Source:
    """Files on web servers, streamed."""
    from mezzotint.data.remote import SCHEME, describe, register

    addresses = config.input.split()
    kind = kind_of_addresses(addresses)
    options = {"sample_by": config.unit} if kind == "text" else {}
    found = [describe(address) for address in addresses]
    register(found)

    def load() -> Any:
        names = [SCHEME + address for address in addresses]
        return _datasets().load_dataset(kind, data_files=names, split="train", streaming=True, **options)

    signature = [f"{file.url} {file.size} {file.version}" for file in found]
    return _checked_source(config, load, total_bytes=None, signature=signature, remote=True)


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
    remote: bool = False,
) -> Source:
    """A source over the iterable dataset `load()` gives, whose first document has been looked at.

    A remote one is read file by file, so that files that were read whole are not fetched again when work is resumed.
    """
    column = config.text_column

    def sentence(error: Exception) -> InputError:
        if isinstance(error, InputError):
            return error
        if remote and _is_connection(error):
            return InputError(
                f"{config.input} could not be read to its end, its server stays away ({first_line(error)}): "
                "run the same command again later to go on"
            )
        name = blame() if blame else config.input
        return InputError(f"{name} could not be read ({first_line(error)}): repair it and run the same command again")

    try:
        first = next(iter(load()), None)
    except Exception as error:  # datasets, pyarrow, zstandard and the network raise unrelated classes
        raise sentence(error) from error
    if first is None:
        raise InputError(f"there is no text in {config.input}: give a file, folder or dataset that holds some")
    if column not in first:
        columns = ", ".join(first)
        raise InputError(f"{config.input} has no column {column!r}: its columns are {columns}; use --text-column")

    def batches(start: Position) -> Iterator[tuple[int, list]]:
        """(file, texts) from `start` on."""
        whole = load().select_columns([column])
        files = range(start.file, whole.num_shards) if remote else [0]
        for file in files:
            dataset = whole.shard(whole.num_shards, file, contiguous=True) if remote else whole
            skip = start.documents if file == start.file else 0
            yield from ((file, batch[column]) for batch in dataset.skip(skip).iter(batch_size=READ_AT_ONCE))

    def read(start: Position) -> Iterator[Document]:
        parts = batches(start)
        place = start
        while True:
            try:
                part = next(parts, None)
            except Exception as error:
                raise sentence(error) from error
            if part is None:
                return
            file, texts = part
            for text in texts:
                place = Position(file, place.documents + 1 if file == place.file else 1)
                yield _document(text, place, config)

    return Source(name=config.input, read=read, total_bytes=total_bytes, signature=signature)


def _document(text: object, place: Position, config: SourceConfig) -> Document:
    """A document from one entry of the text column; a missing entry is an empty document."""
    if text is None:
        text = ""
    if not isinstance(text, str):
        raise InputError(
            f"column {config.text_column!r} of {config.input} holds {type(text).__name__}, not text: use --text-column"
        )
    return Document(text, text, place)


def _datasets() -> Any:
    """The `datasets` module, silent: what goes wrong is said once, by us. The hub is asked again for some minutes."""
    import datasets
    import huggingface_hub

    datasets.config.STREAMING_OPEN_MAX_RETRIES = datasets.config.STREAMING_READ_MAX_RETRIES = HUB_TRIES
    datasets.config.STREAMING_OPEN_RETRY_INTERVAL = datasets.config.STREAMING_READ_RETRY_INTERVAL = HUB_WAIT
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    huggingface_hub.utils.logging.set_verbosity_error()
    return datasets


def _is_connection(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is one of connections and not of content."""
    from huggingface_hub.errors import HfHubHTTPError

    while error is not None:
        if isinstance(error, (ConnectionError, TimeoutError)) or type(error).__module__.startswith(
            ("httpx", "aiohttp")
        ):
            return True
        if isinstance(error, HfHubHTTPError):
            return error.response is None or error.response.status_code in (408, 429) or error.response.is_server_error
        error = error.__cause__ or error.__context__
    return False


def _fails(load: Callable[[], Any]) -> bool:
    """Whether reading the whole dataset raises."""
    try:
        for _ in load().iter(batch_size=READ_AT_ONCE):
            pass
    except Exception:
        return True
    return False
