"""Plain values (from YAML) to typed dataclasses and back; every mistake is one sentence with the path of the key."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import cattrs
import yaml

from mezzotint.models.errors import InputError

T = TypeVar("T")
Plain = dict[str, Any]


class _Loader(yaml.SafeLoader):
    """Safe YAML in which 1e-3 is a number, as in YAML 1.2, and a key given twice is an error."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            raise InputError(f"line {node.start_mark.line + 1}: the key {twice[0]!r} is given twice")
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def parse_yaml(text: str, *, source: str) -> Any:
    """Values of a YAML text; InputError names `source` and the line of a mistake."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise InputError(f"{source} is no valid YAML: {' '.join(str(error).split())}") from None
    except InputError as error:
        raise InputError(f"{source}, {error}") from None


def dump_yaml(values: Plain) -> str:
    return yaml.safe_dump(values, sort_keys=False, width=120)


def check_keys(values: Any, cls: type, *, flat: dict[type, list[str]], path: str = "") -> None:
    """InputError for the first key that `cls`, or a dataclass inside it, does not have; it names the nearest one.

    flat: keys of the classes that are written otherwise than field by field.
    """
    if not isinstance(values, dict):
        raise InputError(f"{path or 'the recipe'} must be a mapping of keys to values, not {values!r}")
    hints = typing.get_type_hints(cls)
    known = flat[cls] if cls in flat else [f.name for f in dataclasses.fields(cls)]
    for key, value in values.items():
        place = f"{path}.{key}" if path else str(key)
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            raise InputError(f"unknown key {place!r}; the nearest is {f'{path}.{near}' if path else near!r}")
        hint = hints.get(key)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            check_keys(value, hint, flat=flat, path=place)
        if typing.get_origin(hint) is tuple and not isinstance(value, list):
            raise InputError(f"{place} must be a list, not {value!r}")
        inner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
        if typing.get_origin(inner) is tuple:
            _check_lists(value, typing.get_args(inner), path=place)
        if isinstance(inner, type) and dataclasses.is_dataclass(inner) and isinstance(value, list):
            for index, item in enumerate(value):
                check_keys(item, inner, flat=flat, path=f"{place}.{index}")


def _check_lists(values: list, kinds: tuple[type, ...], *, path: str) -> None:
    """InputError for the first of `values` that is no list of one value for each of `kinds`."""
    for index, item in enumerate(values):
        if not isinstance(item, list) or len(item) != len(kinds):
            wanted = ", ".join(_NAMES[kind] for kind in kinds)
            raise InputError(f"{path}.{index} must be a list of {len(kinds)} values ({wanted}), not {item!r}")


def _of(kind: type, accepted: tuple[type, ...]):
    def structure(value: Any, _: Any) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise InputError(f"{value!r} is not {'an' if kind is int else 'a'} {_NAMES[kind]}")
        result = kind(value)
        if kind is float and not math.isfinite(result):
            raise InputError(f"{value!r} is not a finite number")
        return result

    return structure


_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false"}


def _scalar_union(value: Any, hint: Any) -> Any:
    kinds = typing.get_args(hint)
    if float in kinds and type(value) in (int, float):
        return converter.structure(value, float)
    if type(value) in kinds:
        return value
    raise InputError(f"{value!r} is none of {', '.join(_NAMES.get(kind, 'null') for kind in kinds)}")


def _is_scalar_union(hint: Any) -> bool:
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return False
    return all(kind in (*_NAMES, types.NoneType) for kind in typing.get_args(hint))


converter = cattrs.Converter(forbid_extra_keys=True)
for _kind, _accepted in ((int, (int,)), (float, (int, float)), (str, (str,)), (bool, (bool,))):
    converter.register_structure_hook(_kind, _of(_kind, _accepted))
converter.register_structure_hook_func(_is_scalar_union, _scalar_union)
converter.register_structure_hook(Path, lambda value, _: Path(_of(str, (str,))(value, str)))
converter.register_unstructure_hook(Path, str)


def structure(values: Plain, cls: type[T]) -> T:
    """A `cls` from plain values; InputError says which key has a value that does not fit."""
    try:
        return converter.structure(values, cls)
    except cattrs.BaseValidationError as group:
        raise InputError(_first_sentence(group)) from None


def _first_sentence(group: cattrs.BaseValidationError) -> str:
    """The first leaf of cattrs' tree of errors, with the path that leads to it."""
    path: list[str] = []
    error: BaseException = group
    while isinstance(error, cattrs.BaseValidationError):
        error = error.exceptions[0]
        for note in error.__notes__ if hasattr(error, "__notes__") else ():
            if isinstance(note, cattrs.AttributeValidationNote):
                path.append(note.name)
            elif isinstance(note, cattrs.IterableValidationNote):
                path.append(str(note.index))
    place = ".".join(path)
    if isinstance(error, KeyError):
        return (
            f"the key {'.'.join([*path, error.args[0]])!r} is missing" if not path else f"the key {place!r} is missing"
        )
    named = str(error).startswith((f"{place}.", f"{place}:", f"{place} "))  # the sentence names its key itself
    return f"{place}: {error}" if place and not named else str(error)


def unstructure(value: Any) -> Any:
    """Plain values of a dataclass, tuples as lists; `structure` is the inverse."""
    return _lists(converter.unstructure(value))


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, (tuple, list)) else value
