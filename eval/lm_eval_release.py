"""Whether the files of a release belong together, and whether releases can stand in one table of lm-eval's tasks."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from mezzotint.data.tokenizer import Tokenizer, load_tokenizer
from mezzotint.eval.generate import require_same_vocabulary
from mezzotint.eval.results import ResultsFile
from mezzotint.eval.subjects import Subject
from mezzotint.models.config import PRESETS, preset
from mezzotint.models.errors import InputError

PROBE = " a  b\n\n\tdef f(self, *args):\n        return {k: v}  # don't Å 漢字 \U0001f600\r\n"


def open_release(subject: Subject) -> Tokenizer:
    """The release's tokenizer. Raises InputError where its files do not belong together.

    That is: a tokenizer of other ids than the model, a tokenizer.json of other ids than the tokenizer the model was
    trained with, and a block length other than the recipe it was trained by; weights alone would not show any of these.
    """
    assert subject.folder is not None
    folder = subject.folder
    tokenizer = load_tokenizer(folder)
    require_same_vocabulary(tokenizer, subject.config, release=str(folder))
    fast = folder / "tokenizer.json"
    if fast.is_file() and tokenizer.files[0] != fast:
        _require_same_ids(fast, tokenizer)
    recipe = folder / "training.yaml"
    if recipe.is_file():
        trained = _trained_block(recipe)
        if trained is not None and trained != subject.config.block_length:
            raise InputError(
                f"{folder} was trained with blocks of {trained} tokens (training.yaml), but its config.json says "
                f"{subject.config.block_length}: its scores would mean nothing; export the run again"
            )
    return tokenizer


def _require_same_ids(path: Path, tokenizer: Tokenizer) -> None:
    import tokenizers

    try:
        found = tokenizers.Tokenizer.from_file(str(path)).encode(PROBE, add_special_tokens=False).ids
    except Exception as error:  # the binding raises bare Exception for a damaged file
        raise InputError(f"{path} is no tokenizer ({error}); export the run again") from error
    if found != tokenizer.encode(PROBE):
        raise InputError(
            f"{path} is another tokenizer than {tokenizer.files[0].name} beside it: the model was not trained with "
            "both; export the run again"
        )


def _trained_block(recipe: Path) -> int | None:
    """The block length of the recipe, None where it does not say a number."""
    try:
        content = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{recipe} cannot be read ({error}); export the run again") from error
    section = content.get("model") if isinstance(content, dict) else None
    if not isinstance(section, dict):
        return None
    if isinstance(section.get("block"), int):
        return section["block"]
    if section.get("block") is None and section.get("preset") in PRESETS and isinstance(section.get("backbone"), str):
        return preset(section["preset"], section["backbone"]).block_length
    return None


def tokenizer_folder(subject: Subject, folder: Path) -> Path | None:
    """Copies of the files transformers needs for the release's tokenizer, without the code beside it; None without them.

    lm-eval loads tokenizers with remote code allowed, and a release carries code.
    """
    assert subject.folder is not None
    source = subject.folder / "tokenizer.json"
    if not source.is_file():
        return None
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(source.read_bytes())
    about = subject.folder / "tokenizer_config.json"
    content = json.loads(about.read_text(encoding="utf-8")) if about.is_file() else {}
    content.pop("auto_map", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def require_same_kind(subjects: list[Subject], tokenizers: list[Tokenizer]) -> None:
    """InputError unless all releases have one tokenizer and one block length.

    Another tokenizer makes other tokens of a task's texts, and another block length another bound of the same
    likelihood: side by side their scores would say more about these than about the models.
    """
    for subject, tokenizer in zip(subjects[1:], tokenizers[1:]):
        what = _differs(
            (tokenizer.sha256, subject.config.block_length), (tokenizers[0].sha256, subjects[0].config.block_length)
        )
        if what:
            raise InputError(f"{subject.name} has another {what} than {subjects[0].name}: run each with its own --out")


def require_same_kind_as_before(results: ResultsFile, subject: Subject, tokenizer: Tokenizer) -> None:
    """InputError if the file holds tasks of lm-eval run by a release of another tokenizer or block length."""
    for row in results.rows():
        identity = row["identity"]
        if str(identity["task"]).startswith("lm-eval/"):
            held = (identity["tokenizer"], identity["block"])
            what = _differs((tokenizer.sha256[:16], subject.config.block_length), held)
            if what:
                raise InputError(
                    f"{subject.name} has another {what} than {identity['subject']}, whose results {results.path} holds; "
                    "give another --out"
                )


def _differs(one: tuple[str, int], other: tuple[str, int]) -> str:
    tokenizer = "tokenizer" if one[0] != other[0] else ""
    block = f"block length ({one[1]}, not {other[1]})" if one[1] != other[1] else ""
    return tokenizer or block
