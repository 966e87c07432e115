"""Writes the locks of the images: every package with its version and the sha256 of the one file that is installed.

    python images/lock.py [cpu] [gpu] [serve] [mlflow]      all without a name; rewrites images/NAME/requirements.txt

pip resolves and its report is written down, so a lock can be made again with nothing but pip, and a diff shows what
moved. Versions are those of requirements/constraints.txt, with which the tests run; only the server's image has others.
A lock is for CPython 3.11 on Linux x86_64: run this there. A CPU build of torch is not on PyPI: name the index or the
folder that has one in PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS. The other images take torch from PyPI.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

IMAGES = Path(__file__).resolve().parent
ROOT = IMAGES.parent
TESTED = (ROOT / "requirements/constraints.txt").read_text()
PYPI_ALONE = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What pip is asked to resolve: requirements, within constraints, with variables added to its environment."""

    requirements: tuple[str, ...]
    constraints: str
    environment: dict[str, str] = field(default_factory=dict)


IMAGE = {
    "cpu": Wanted(requirements=(".[stages]",), constraints=f"{TESTED}\ntorch==2.13.0+cpu\n"),
    "gpu": Wanted(requirements=(".[stages,gpu]",), constraints=TESTED, environment=PYPI_ALONE),
    # vLLM asks for one version of torch, which is not the one that reflux is tested with
    "serve": Wanted(requirements=(".", "vllm==0.33.0"), constraints="", environment=PYPI_ALONE),
    "mlflow": Wanted(requirements=("mlflow", "psycopg2-binary", "boto3"), constraints=TESTED, environment=PYPI_ALONE),
}


def main(names: list[str]) -> None:
    if unknown := set(names) - set(IMAGE):
        raise ValueError(f"image: {', '.join(sorted(unknown))} is none of {', '.join(IMAGE)}")
    here = (platform.python_implementation(), *platform.python_version_tuple()[:2], platform.machine())
    if here != ("CPython", "3", "11", "x86_64"):
        raise ValueError(f"platform: {' '.join(here)}; a lock is made by CPython 3.11 on x86_64")
    for name in names or IMAGE:
        lines = resolve(IMAGE[name])
        head = "# Made by images/lock.py for CPython 3.11 on Linux x86_64; do not edit."
        (IMAGES / name / "requirements.txt").write_text("\n".join([head, *lines, ""]))
        print(f"{name}: {len(lines)} packages")


def resolve(wanted: Wanted) -> list[str]:
    """The lines of a lock, sorted by name. CalledProcessError if pip finds no set of versions."""
    with tempfile.TemporaryDirectory() as folder:
        report, constraints = Path(folder, "report.json"), Path(folder, "constraints.txt")
        constraints.write_text(wanted.constraints)
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        options = ["--disable-pip-version-check", "--report", str(report), "--constraint", str(constraints)]
        environment = os.environ | wanted.environment
        subprocess.run([*command, *options, *wanted.requirements], cwd=ROOT, check=True, env=environment)
        packages = json.loads(report.read_text())["install"]
    return sorted(_line(package) for package in packages if package["metadata"]["name"] != "reflux")


def _line(package: dict[str, Any]) -> str:
    name, version = package["metadata"]["name"], package["metadata"]["version"]
    sha256 = package["download_info"]["archive_info"]["hashes"]["sha256"]
    return f"{name.lower().replace('_', '-')}=={version} --hash=sha256:{sha256}"


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(f"lock: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)  # pip has said why
