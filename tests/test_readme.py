"""What the documents tell people to type, open and write is there: commands, options, values, targets, links, paths."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from pathlib import Path

import click
import pytest

from reflux.components import calls
from reflux.pipelines import recipes
from reflux.pipelines.__main__ import cli

ROOT = Path(__file__).resolve().parents[1]
PLACES = ("*.md", "docs/*.md", "*/README.md", "components/*/README.md")
DOCUMENTS = sorted(path for place in PLACES for path in ROOT.glob(place))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
TO_HEADING = re.compile(r"\]\(([^)#:]*)#([^)]+)\)")


def blocks(language: str) -> list[str]:
    return [text for path in DOCUMENTS for kind, text in FENCE.findall(path.read_text("utf-8")) if kind == language]


def commands(program: str) -> list[list[str]]:
    """The arguments of every command of that program in a shell block."""
    lines = [line for text in blocks("sh") for line in text.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    head = program.split()
    return [line[len(head) :] for line in words if line[: len(head)] == head]


def parsed(arguments: list[str]) -> click.Context:
    """What click makes of them; UsageError for an option or a command that there is not."""
    command: click.Command = cli
    while isinstance(command, click.Group):
        name, *arguments = arguments
        command = command.commands[name]
    return command.make_context(name, arguments)


@pytest.mark.parametrize("arguments", [*commands(".venv/bin/reflux"), *commands("reflux")], ids=" ".join)
def test_commands_are_understood(arguments: list[str]) -> None:
    given = parsed(arguments).params
    recipe = recipes.named(given["recipe"] or "demo") if "recipe" in given else recipes.demo()
    recipes.overridden(recipe, recipes.parse_settings(given.get("settings", ())))


@pytest.mark.parametrize("arguments", commands(".venv/bin/python -m reflux.components"), ids=" ".join)
def test_stages_are_run_by_hand_as_written(arguments: list[str]) -> None:
    stage, *flags = arguments
    component = calls.load(stage)
    if flags != ["--help"]:
        assert calls.parse(component, flags).run == "by-hand"


def test_targets_exist() -> None:
    named = {words[0] for words in commands("make")}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "mlflow"} <= named <= targets
    script = re.findall(r"^make (\S+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert "test" in script
    assert set(script) <= targets


@pytest.mark.parametrize("text", blocks("toml"))
def test_configuration_files_are_accepted(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    recipes.overridden(recipes.demo(), recipes.read_changes(file))


def test_what_python_is_told_to_import_is_there() -> None:
    found = [
        node for text in blocks("python") for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)
    ]
    ours = [
        (node.module, each.name) for node in found for each in node.names if (node.module or "").startswith("reflux.")
    ]
    assert len(ours) >= 5
    for module, name in ours:
        assert hasattr(importlib.import_module(str(module)), name) or importlib.util.find_spec(f"{module}.{name}"), name


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    assert [link for link in LINK.findall(path.read_text("utf-8")) if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_to_headings_find_them(path: Path) -> None:
    links = [(path.parent / page if page else path, name) for page, name in TO_HEADING.findall(path.read_text("utf-8"))]
    assert [name for page, name in links if page.suffix == ".md" and name not in headings(page)] == []


def headings(path: Path) -> set[str]:
    """The names that links give the headings of a page, as GitHub makes them."""
    texts = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


def test_the_tree_is_the_tree() -> None:
    (tree,) = (text for text in FENCE.findall((ROOT / "README.md").read_text("utf-8")) if "declare.py" in text[1])
    folder, missing = ROOT, []
    for line in tree[1].splitlines():
        name = line.split()[0]
        folder = folder if line.startswith(" ") else ROOT / name
        path = folder / name if line.startswith(" ") else folder
        missing += [] if path.exists() else [name]
    assert missing == []


def test_every_benchmark_is_described() -> None:
    text = (ROOT / "benchmarks" / "README.md").read_text("utf-8")
    programs = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    results = dict(re.findall(r"^\| (\S+\.py) \| .*? \| (.*?) ?\|$", text, re.MULTILINE))
    assert set(re.findall(r"\[(\w+\.py)\]\(\1\)", text)) == programs == results.keys()
    titles = re.findall(r"^## (\S+)  (.*)$", (ROOT / "LOG.md").read_text("utf-8"), re.MULTILINE)
    assert {entry for entry in results.values() if entry} <= {" ".join(title) for title in titles}
