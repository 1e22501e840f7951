"""Other projects' sources that tests are held against: the installed package, else its sdist in build/references.

`python tests/references.py` fetches the sdists with pip; nothing is installed and nothing is built. Tests skip without.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import subprocess
import sys
import tarfile
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "build" / "references"
SDISTS = {"mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d", "flash_attn": "flash-attn"}


def source_of(package: str) -> Path:
    """The folder that holds the package's folder; skips the test where there is none."""
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))).parent
    found = sorted(FOLDER.glob(f"{package}-*/{package}"))
    if not found:
        pytest.skip(f"{package} is neither installed nor in {FOLDER}: run `python tests/references.py`")
    return found[-1].parent


@contextlib.contextmanager
def pure_python(package: str, **stubs: object) -> Iterator[types.ModuleType]:
    """The package without its __init__, which asks for CUDA modules: its files can then be imported one by one.

    stubs: modules that its files import and never call here, by name with `__` for a dot, as dictionaries of attributes.
    """
    folder = source_of(package) / package
    pytest.importorskip("einops", reason=f"{package} uses einops")
    before = dict(sys.modules)
    module = types.ModuleType(package)
    module.__path__ = [str(folder)]
    sys.modules[package] = module
    for name, attributes in stubs.items():
        stub = types.ModuleType(name.replace("__", "."))
        vars(stub).update(attributes)  # type: ignore[call-overload]
        sys.modules[name.replace("__", ".")] = stub
    try:
        yield module
    finally:
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] == package or name.replace(".", "__") in stubs:
                del sys.modules[name]


def fetch() -> None:
    """Download and unpack the three sdists; their set-up is told to build nothing."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    skip = {f"{name}_SKIP_CUDA_BUILD": "TRUE" for name in ("MAMBA", "CAUSAL_CONV1D", "FLASH_ATTENTION")}
    with tempfile.TemporaryDirectory() as folder:
        for name in SDISTS.values():
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
            command += ["--no-binary", ":all:", "--dest", folder, name]
            subprocess.run(command, check=True, env=os.environ | skip)
        for archive in Path(folder).glob("*.tar.gz"):
            with tarfile.open(archive) as file:
                file.extractall(FOLDER, filter="data")


if __name__ == "__main__":
    fetch()
