"""Runs mypy: links the folders under their installed name first, since mypy cannot follow `package_dir`."""

import subprocess
import sys
from pathlib import Path

FOLDERS = ("models", "data", "training", "eval", "launch")


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    package = root / "build" / "typecheck" / "mezzotint"
    package.mkdir(parents=True, exist_ok=True)
    for folder in FOLDERS:
        link = package / folder
        if not link.is_symlink():
            link.symlink_to(root / folder, target_is_directory=True)
    names = [f"mezzotint.{folder}" for folder in FOLDERS]
    packages = [part for name in names for part in ("-p", name)]
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(root / "setup.cfg"),
        "--namespace-packages",
        *packages,
    ]
    return subprocess.run(command, cwd=package.parent).returncode


if __name__ == "__main__":
    raise SystemExit(main())
