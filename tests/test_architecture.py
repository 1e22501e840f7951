"""The arrows between the folders, the import rule, and the list of packages in setup.cfg."""

import ast
import configparser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_USE = {
    "models": {"models"},
    "data": {"data"},
    "training": {"training", "models", "data"},
    "eval": {"eval", "models", "data"},
    "launch": {"launch", "training", "eval", "models", "data"},
}
SOURCES = [path for folder in MAY_USE for path in sorted((ROOT / folder).rglob("*.py"))]
OPTIONAL = {"flash_attn", "mamba_ssm", "causal_conv1d", "lm_eval", "wandb", "deepspeed", "grain", "triton", "torchao"}


def imports(path: Path) -> list[tuple[str, int]]:
    """(dotted name, level) of every import statement of a file, wherever it stands."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.module or "", node.level))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_and_no_bare_names(path):
    folder = path.relative_to(ROOT).parts[0]
    for name, level in imports(path):
        parts = name.split(".")
        assert level or parts[0] not in MAY_USE, f"bare import of {name}"
        if parts[0] == "mezzotint":
            assert parts[1] in MAY_USE[folder], f"{folder} must not use {name}"
        if level:
            assert folder == "models", "relative imports are for models/, which is exported as flat files"


def test_models_need_only_torch_and_safetensors():
    import sys

    for path in (ROOT / "models").rglob("*.py"):
        for name, level in imports(path):
            top = name.split(".")[0]
            known = top in sys.stdlib_module_names or top in {"torch", "safetensors"}
            optional = top in OPTIONAL or (top in {"transformers"} and path.stem.startswith("hf"))
            assert level or known or optional, f"{path.name} imports {name}"


def test_optional_packages_are_imported_in_one_file_each():
    users: dict[str, set[str]] = {}
    for path in SOURCES:
        for name, level in imports(path):
            top = name.split(".")[0]
            if not level and top in OPTIONAL:
                users.setdefault(top, set()).add(str(path.relative_to(ROOT)))
    assert {name: files for name, files in users.items() if len(files) > 1} == {}


def test_setup_cfg_lists_every_package():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    there = {
        "mezzotint." + ".".join(path.parent.relative_to(ROOT).parts)
        for folder in MAY_USE
        for path in (ROOT / folder).rglob("__init__.py")
    }
    assert listed == there


def test_gitignore_hides_no_source_folder():
    lines = (ROOT / ".gitignore").read_text().split()
    assert not {"data/", "models/", "data", "models"} & set(lines)


def test_every_file_says_what_it_owns():
    for path in SOURCES:
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring, f"{path.relative_to(ROOT)} has no opening sentence"
