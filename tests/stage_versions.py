"""Pins each stage's version to the sources that decide its result.

A committed artifact is reused by its key, and the key holds STAGE_VERSION, not the code. So code that changes the
result under an old version would leave old artifacts in use. After a change of a stage:

1. if the result can differ, raise STAGE_VERSION in the stage's config.py (not for comments, speed or logging);
2. python tests/stage_versions.py --write
3. commit tests/stage_versions.json with the change.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PINS = Path(__file__).with_suffix(".json")
PACKAGES = ("components", "kernels", "pipelines")

# rooms that carry artifacts about but compute nothing that is in them
CARRIERS = {
    f"reflux.components.{name}"
    for name in (
        "artifact_reader",
        "artifact_writer",
        "artifacts",
        "checkpoints",
        "column_reads",
        "declare",
        "environment",
        "stores.local_store",
        "progress",
        "provenance",
        "stores.s3_errors",
        "stores.s3_file",
        "stores.s3_settings",
        "stores.s3_store",
        "stores.s3_upload",
        "sources",
        "storage",
    )
}


def stages() -> list[str]:
    """The folders of components/ that declare a component."""
    return sorted(path.parent.name for path in (ROOT / "components").glob("*/component.py"))


def module_name(path: Path) -> str:
    """components/distill/stage.py -> reflux.components.distill.stage"""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("reflux", *(parts[:-1] if parts[-1] == "__init__" else parts)))


def imported_modules(path: Path) -> set[str]:
    """Names of all modules that a file imports, at any depth: `from a import b` gives a and, if it is a module, a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*_package(path, node.level), *filter(None, [node.module])])
            found.add(base)
            found |= {f"{base}.{alias.name}" for alias in node.names if source_of(f"{base}.{alias.name}")}
    return found


def _package(path: Path, level: int) -> list[str]:
    """The package that `level` dots of a relative import mean in this file; none for an absolute import."""
    if not level:
        return []
    package = path.relative_to(ROOT).parent.parts
    return ["reflux", *package[: len(package) - level + 1]]


def source_of(module: str) -> Path | None:
    """The file of one of our modules."""
    parts = module.split(".")
    if parts[0] != "reflux" or len(parts) < 2 or parts[1] not in PACKAGES:
        return None
    path = ROOT.joinpath(*parts[1:])
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def sources(stage: str) -> list[Path]:
    """Files that decide what a stage makes: its folder but for README and declaration, and what of ours it imports."""
    folder = ROOT / "components" / stage
    own = {p for p in folder.rglob("*") if p.is_file() and p.name not in ("README.md", "component.py")}
    own = {p for p in own if "__pycache__" not in p.parts}
    waiting, seen = {p for p in own if p.suffix == ".py"}, set(own)
    while waiting:
        for module in imported_modules(waiting.pop()):
            path = source_of(module)
            if path is not None and path not in seen and module not in CARRIERS:
                seen.add(path)
                waiting.add(path)
    return sorted(seen)


def pin(stage: str) -> dict[str, str]:
    """The stage's version and the digest of its sources."""
    digest = hashlib.sha256()
    for path in sources(stage):
        digest.update(
            f"{path.relative_to(ROOT).as_posix()}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode()
        )
    return {"version": version(stage), "sha256": digest.hexdigest()}


def version(stage: str) -> str:
    config = ast.parse((ROOT / "components" / stage / "config.py").read_text(encoding="utf-8"))
    for node in config.body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["STAGE_VERSION"]:
            return str(ast.literal_eval(node.value))
    raise ValueError(f"components/{stage}/config.py: no STAGE_VERSION")


def pinned() -> dict[str, dict[str, str]]:
    return json.loads(PINS.read_text(encoding="utf-8"))


def write() -> None:
    before = pinned()
    after = {stage: pin(stage) for stage in stages() if (ROOT / "components" / stage / "stage.py").is_file()}
    for stage, now in after.items():
        old = before.get(stage)
        if old and old["sha256"] != now["sha256"] and old["version"] == now["version"]:
            print(f"{stage}: changed, still version {now['version']}: is its result the same for every input?")
    PINS.write_text(json.dumps(after, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    write()
