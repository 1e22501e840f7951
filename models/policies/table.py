"""Policies by name, as they are written on a command line: `entropy:threshold=0.5:recent=32`."""

from __future__ import annotations

import dataclasses
import difflib
import re

from ..errors import InputError
from .acache import ACache
from .adapters import load_adapters
from .bicache import BiCache
from .dllm_cache import DLLMCache
from .drop_kv import DropKV
from .entropy_cache import EntropyCache
from .fast_dllm import FastDLLM
from .interface import Policy
from .kv_packet import KVPacket
from .none import NoCache
from .polestar import Polestar
from .shared_prefix import SharedPrefix

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        NoCache,
        FastDLLM,
        EntropyCache,
        DLLMCache,
        Polestar,
        ACache,
        BiCache,
        KVPacket,
        SharedPrefix,
        DropKV,
    )
}


LARGEST = 2**31 - 1  # of a whole number among the parameters: steps, layers, tokens


def parse_policy(text: str) -> Policy:
    """The policy that `name:parameter=value:...` means. Raises InputError naming the nearest name or parameter."""
    name, options = options_of(text)
    if not name:
        raise InputError(f"no cache policy is named in {text!r}; one of {', '.join(POLICIES)}")
    if name not in POLICIES:
        near = difflib.get_close_matches(name, POLICIES, n=1, cutoff=0.0)[0]
        raise InputError(f"no cache policy {name!r}; the nearest of {', '.join(POLICIES)} is {near!r}")
    kind = POLICIES[name]
    known = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    values: dict[str, object] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if key not in known or not equals:
            allowed = f"its parameters are {', '.join(known)}" if known else "it has none"
            raise InputError(f"policy {name} has no parameter {option!r}: {allowed}; write parameter=value")
        if key in values:
            raise InputError(f"policy {name}: {key} is given twice")
        values[key] = _parsed(name, key, value, known[key])
    return kind(**values)  # type: ignore[arg-type]


def options_of(text: str) -> tuple[str, list[str]]:
    """The name and the `parameter=value` parts; a colon in a value, as files may have it, does not part."""
    name, colon, rest = text.strip().partition(":")
    return name, re.split(r":(?=\w+=)", rest) if colon else []


def _parsed(name: str, key: str, value: str, kind: str) -> object:
    try:
        if kind == "bool":
            return {"true": True, "false": False}[value]
        if kind == "int" and abs(number := int(value)) <= LARGEST:
            return number
        if kind == "float":
            return float(value)
    except (ValueError, KeyError):
        raise InputError(f"policy {name}: {key} is {value!r}, not of type {kind}") from None
    if kind == "int":
        raise InputError(f"policy {name}: {key} is {value}; it must be at most {LARGEST:,}")
    if kind.startswith("Adapters"):
        return load_adapters(value)
    if kind.startswith("tuple"):
        return _pairs(name, key, value)
    return value


def _pairs(name: str, key: str, value: str) -> tuple[tuple[int, int], ...]:
    """`0-1,20-8` as ((0, 1), (20, 8))."""
    try:
        pairs = [tuple(map(int, pair.split("-"))) for pair in value.split(",")]
    except ValueError:
        pairs = []
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise InputError(f"policy {name}: {key} is {value!r}; write percent-layers pairs, as in 0-1,20-8")
    return tuple((pair[0], pair[1]) for pair in pairs)


def spelled(policy: Policy) -> str:
    """The name, and the parameters that differ from the policy's own."""
    parts = [policy.name]
    for field in dataclasses.fields(policy):
        value = getattr(policy, field.name)
        if field.name == "adapters":
            parts += [] if value is None else [f"adapters={value.fingerprint}"]
        elif value != field.default:
            parts.append(f"{field.name}={_written(value)}")
    return ":".join(parts)


def _written(value: object) -> str:
    """As `parse_policy` reads it."""
    if isinstance(value, tuple):
        return ",".join(f"{percent}-{layers}" for percent, layers in value)
    return str(value).lower() if isinstance(value, bool) else str(value)
