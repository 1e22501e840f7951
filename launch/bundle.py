"""The model files as one flat folder of custom code, since transformers' loader follows only flat relative imports."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from mezzotint.models.errors import InputError

MODELS = Path(__file__).resolve().parents[1] / "models"
ENTRY = "hf"  # the file that config.json's auto_map names
# what a released folder may need
PACKAGES = {"torch", "safetensors", "transformers"}


def bundle_files(models: Path = MODELS) -> dict[str, str]:
    """File name -> text of the entry and everything it imports from `models`, `ops/ssd.py` becoming `ops_ssd.py`.

    transformers 4.57 copies only the files that the entry itself imports, so the entry gains an import of all others.
    Raises InputError for an import that a released folder could not serve.
    """
    waiting: list[tuple[str, ...]] = [(ENTRY,)]
    done: dict[tuple[str, ...], str] = {}
    while waiting:
        module = waiting.pop()
        if module in done:
            continue
        text = _path(models, module).read_text(encoding="utf-8")
        _check_packages(module, text)
        done[module], used = _flatten(models, module, text)
        waiting += used
    names = {"_".join(module): module for module in done}
    if len(names) != len(done):
        raise InputError(f"two files of {models} have the same flat name; rename one")
    entry = done[(ENTRY,)]
    others = sorted(name for name in names if name != ENTRY and f"from .{name} import" not in entry)
    notes = [f"from .{name} import __name__ as _{name}  # noqa" for name in others]
    done[(ENTRY,)] = "\n".join(
        [entry.rstrip(), "", "# transformers copies only the files that this one names", *notes, ""]
    )
    return {f"{name}.py": done[module] for name, module in sorted(names.items())}


def _flatten(models: Path, module: tuple[str, ...], text: str) -> tuple[str, list[tuple[str, ...]]]:
    """The text with its relative imports made flat, and the modules they name."""
    lines, used = text.splitlines(), []
    package = module if (models.joinpath(*module)).is_dir() else module[:-1]
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.level]
    for node in sorted(found, key=lambda node: -node.lineno):
        base = package[: len(package) - node.level + 1] + tuple((node.module or "").split(".") if node.module else ())
        plain, new = [], []
        for alias in node.names:
            inner = (*base, alias.name)
            if _is_module(models, inner):
                used.append(inner)
                new.append(f"from . import {'_'.join(inner)} as {alias.asname or alias.name}")
            else:
                plain.append(f"{alias.name} as {alias.asname}" if alias.asname else alias.name)
        if plain:
            used.append(base)
            new.append(f"from .{'_'.join(base)} import {', '.join(plain)}")
        indent = " " * node.col_offset
        lines[node.lineno - 1 : node.end_lineno] = [indent + line for line in new]
    return "\n".join(lines) + "\n", used


def _is_module(models: Path, module: tuple[str, ...]) -> bool:
    path = models.joinpath(*module)
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def _path(models: Path, module: tuple[str, ...]) -> Path:
    path = models.joinpath(*module)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _check_packages(module: tuple[str, ...], text: str) -> None:
    """InputError for an import of another package outside `try`: transformers would not load the folder without it."""
    waiting: list[ast.AST] = [ast.parse(text)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Try):
            continue
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for name in names:
            top = name.split(".")[0]
            if top not in PACKAGES and top not in sys.stdlib_module_names:
                raise InputError(f"models/{'/'.join(module)}.py imports {top} outside try: a release may not need it")
        waiting += ast.iter_child_nodes(node)
