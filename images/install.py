"""Runs inside a build, as root: a virtual environment with exactly what a lock names, less what no stage opens.

    python3 install.py LOCK          make the environment PREFIX
    PREFIX/bin/python install.py --precompile MODULE …

It is one program, and not lines of each Containerfile, so that all images are made alike. pip takes its index from the
environment (PIP_INDEX_URL, PIP_FIND_LINKS, …), which the build's arguments set.
"""

import importlib
import importlib.util
import shutil
import subprocess
import sys
import venv
from pathlib import Path

PREFIX = Path("/opt/reflux")
TESTS = {
    "torch": ("test", "bin/protoc*", "bin/*[tT]est*", "bin/*benchmark*"),
    "pyarrow": ("tests",),
    "numpy": ("**/tests",),
    "scipy": ("**/tests",),
    "pandas": ("tests",),
    "sympy": ("**/tests",),
    "networkx": ("**/tests",),
    "matplotlib": ("tests",),
}
"""Package -> what only testing it needs. Nothing here is imported by the package itself."""
HEADERS = {"torch": ("include", "share/cmake"), "pyarrow": ("include", "src"), "numpy": ("_core/include",)}
"""Package -> what only a compiler reads, and goes where there is none."""


def install(lock: Path) -> None:
    """Make PREFIX from a lock with hashes; pip is there only meanwhile."""
    venv.create(PREFIX, with_pip=True, symlinks=True)
    pip = [str(PREFIX / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
    options = ["install", "--quiet", "--no-deps", "--no-compile", "--require-hashes"]
    subprocess.run([*pip, *options, "--requirement", str(lock.with_name("build.txt"))], check=True)
    # a source distribution is built by the pinned setuptools, not by one that pip would fetch unasked
    subprocess.run([*pip, *options, "--no-build-isolation", "--use-pep517", "--requirement", str(lock)], check=True)
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", "pip"], check=True)
    (site_packages,) = PREFIX.glob("lib/python3*/site-packages")
    prune(site_packages, TESTS)
    if shutil.which("gcc") is None:
        prune(site_packages, HEADERS)


def prune(site_packages: Path, unwanted: dict[str, tuple[str, ...]]) -> None:
    for package, patterns in unwanted.items():
        for pattern in patterns:
            for path in list((site_packages / package).glob(pattern)):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def precompile(modules: list[str], prefix: Path = PREFIX) -> None:
    """Import the modules and leave the byte code of all that came with them.

    A container cannot write byte code, and would compile at each start what is not there; the byte code of everything
    would add half of the size again. It is marked as valid whatever the time of the source, which a layer may change.
    """
    for module in modules:
        importlib.import_module(module)
    for cached in prefix.rglob("*.pyc"):
        source = Path(importlib.util.source_from_cache(str(cached))).read_bytes()
        code = cached.read_bytes()[16:]  # after magic, flags and what the source is compared by: PEP 552
        unchecked = (1).to_bytes(4, "little")
        cached.write_bytes(importlib.util.MAGIC_NUMBER + unchecked + importlib.util.source_hash(source) + code)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--precompile", *modules]:
            precompile(modules)
        case [lock]:
            install(Path(lock))
        case _:
            sys.exit(__doc__)
