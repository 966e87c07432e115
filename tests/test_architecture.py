"""The law: what may import what, what a stage's folder holds, and that the wheel has everything the source tree has."""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import stage_versions
from stage_versions import PACKAGES, ROOT, imported_modules, module_name, stages

from reflux.components.declare import Component

MAX_LINES = 400
STAGES = stages()
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
SHARED_ROOMS = [
    path
    for path in FILES
    if path.is_relative_to(ROOT / "components") and path.relative_to(ROOT / "components").parts[0] not in STAGES
]
DECLARATION = "reflux.components.declare"
# what a person who submits runs does not have; only the code of containers may import it
CONTAINER_ONLY = {"torch", "triton", "pyarrow", "mlflow", "transformers", "boto3", "safetensors"}
SUBMIT_ONLY = sorted(
    [
        *(
            ROOT / "pipelines" / name
            for name in ("compile.py", "distillation.py", "form.py", "ir_lint.py", "ir_tasks.py", "recipes.py")
        ),
        *(ROOT / "pipelines" / "kubeflow").glob("*.py"),
        *(
            ROOT / "pipelines" / "machine" / name
            for name in ("local_session.py", "process_runner.py", "stage_output.py")
        ),
    ]
)
# what such a person does have of the shared rooms
LIGHT = {
    f"reflux.components.{name}"
    for name in (
        "environment",
        "kubeflow",
        "kubeflow.close_run",
        "kubeflow.kfp_task",
        "kubeflow.pods",
        "kubeflow.prerequisites",
        "overrides",
        "progress",
        "run_tree",
    )
}
# checks a run's inputs before any stage starts, with the very code that would stop the stage
READS_STAGES = {"preflight.py"}


def ours(path: Path) -> set[str]:
    """Our modules that a file imports; the three packages themselves are empty and say nothing."""
    return {module for module in imported_modules(path) if module.startswith("reflux.") and module.count(".") > 1}


def outside(path: Path) -> set[str]:
    return {module.partition(".")[0] for module in imported_modules(path)} - {"reflux"}


def within(modules: set[str], *allowed: str) -> set[str]:
    """The modules that are neither one of `allowed` nor below it."""
    return {m for m in modules if not any(m == a or m.startswith(f"{a}.") for a in (*allowed,))}


def ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", [p for p in FILES if ids(p).startswith("kernels/")], ids=ids)
def test_kernels_import_only_kernels(path: Path) -> None:
    assert within(ours(path), "reflux.kernels") == set()


@pytest.mark.parametrize("path", [p for p in FILES if ids(p).startswith("components/algorithms/")], ids=ids)
def test_algorithms_import_only_algorithms_and_kernels(path: Path) -> None:
    assert within(ours(path), "reflux.kernels", "reflux.components.algorithms") == set()
    assert outside(path) & {"pyarrow", "boto3", "mlflow", "kfp", "click"} == set()  # pure tensor code, no I/O


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_has_its_four_files(stage: str) -> None:
    folder = ROOT / "components" / stage
    assert {"README.md", "config.py", "component.py", "stage.py"} <= {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_no_other_stage_and_no_platform(stage: str) -> None:
    for path in (ROOT / "components" / stage).rglob("*.py"):
        if path.parent.name == "bundle_files":  # programs of their own, which only travel with what the stage writes
            continue
        others = [f"reflux.components.{other}" for other in STAGES if other != stage]
        forbidden = [
            *others,
            "reflux.pipelines",
            "reflux.components.tracking",
            "reflux.components.kubeflow.kfp_executor",
        ]
        assert ours(path) - within(ours(path), *forbidden) == set(), ids(path)
        assert outside(path) & {"mlflow", "kfp", "argparse", "click"} == set(), ids(path)


@pytest.mark.parametrize("stage", STAGES)
def test_config_and_declaration_need_only_the_standard_library(stage: str) -> None:
    """Their own and that of the files of the stage's own folder that they read values with."""
    own = f"reflux.components.{stage}"
    waiting, seen = {f"{own}.config", f"{own}.component"}, set[str]()
    while waiting:
        seen.add(module := waiting.pop())
        path = stage_versions.source_of(module)
        assert path is not None
        assert within(ours(path), DECLARATION, own) == set(), module
        assert outside(path) <= set(sys.stdlib_module_names), module
        waiting |= {m for m in ours(path) if m.startswith(f"{own}.")} - seen


@pytest.mark.parametrize("path", SHARED_ROOMS, ids=ids)
def test_shared_rooms_import_neither_stages_nor_pipelines(path: Path) -> None:
    forbidden = ["reflux.pipelines", *(f"reflux.components.{s}" for s in STAGES if path.name not in READS_STAGES)]
    assert ours(path) - within(ours(path), *forbidden) == set()


@pytest.mark.parametrize("path", SUBMIT_ONLY, ids=ids)
def test_submitting_needs_no_library_of_the_containers(path: Path) -> None:
    assert outside(path) & CONTAINER_ONLY == set()
    declarations = {f"reflux.components.{stage}.{part}" for stage in STAGES for part in ("config", "component")}
    light = {DECLARATION, *LIGHT, *declarations}
    assert {m for m in ours(path) if m.startswith("reflux.components")} <= light


@pytest.mark.parametrize("stage", STAGES)
def test_run_takes_what_is_declared(stage: str) -> None:
    component = getattr(importlib.import_module(f"reflux.components.{stage}.component"), stage)
    assert isinstance(component, Component)
    assert component.name == stage
    tree = ast.parse((ROOT / "components" / stage / "stage.py").read_text(encoding="utf-8"))
    (run,) = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run"]
    arguments = {a.arg: ast.unparse(a.annotation) for a in run.args.kwonlyargs if a.annotation}
    declared = dict.fromkeys(component.inputs, "Artifact") | dict.fromkeys(component.outputs, "Writer")
    declared |= dict.fromkeys(component.several, "list[Artifact]")
    assert arguments == declared
    assert [a.arg for a in run.args.args] == ["config"]
    assert run.returns is not None
    assert ast.unparse(run.returns) == "dict[str, float]"


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_changed_has_a_new_version(stage: str) -> None:
    assert stage_versions.pinned().get(stage) == stage_versions.pin(stage), stage_versions.__doc__


def test_no_file_is_too_long() -> None:
    files = [*FILES, *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    lengths = {ids(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the source tree (a build writes beside its sources), installed into a folder."""
    copy = tmp_path_factory.mktemp("copy")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, copy / name)
    (copy / "README.md").write_text("reflux", encoding="utf-8")
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    wheel = ["wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", "dist", "."]
    subprocess.run([*pip, *wheel], cwd=copy, check=True)
    (built,) = (copy / "dist").glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(built)], check=True)
    return target


def test_the_wheel_has_every_file(installed: Path) -> None:
    def files(root: Path) -> set[str]:
        found = (p for package in PACKAGES for p in (root / package).rglob("*") if p.is_file())
        return {p.relative_to(root).as_posix() for p in found if "__pycache__" not in p.parts}

    assert files(ROOT) - files(installed / "reflux") == set()


def test_the_wheel_works_on_its_own(installed: Path) -> None:
    """Its own files are imported, not the source tree's, and what ships with it is found."""
    code = (
        "import reflux.components.sources as s, reflux.components.calls as m\n"
        "print(s.__file__)\n"
        f"assert m.stages() == {STAGES!r}, m.stages()\n"
        "assert any(s.BUILTIN.iterdir())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=installed,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()).is_relative_to(installed)


def test_module_names_are_paths() -> None:
    """The dotted path below the import root is the path of the file, so that names can be found without an index."""
    for path in FILES:
        assert stage_versions.source_of(module_name(path)) == path
