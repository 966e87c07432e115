"""What every image must keep, read from its Containerfile, since most of them are not built in CI."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ("cpu", "gpu", "serve", "mlflow")


def instructions(name: str) -> list[tuple[str, str]]:
    """(INSTRUCTION, rest) in order, without comments, continuation lines joined."""
    text = (ROOT / "images" / name / "Containerfile").read_text()
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line]


def every(name: str, instruction: str) -> Iterator[str]:
    return (rest for word, rest in instructions(name) if word == instruction)


def test_every_folder_is_looked_at() -> None:
    assert sorted(path.parent.name for path in ROOT.glob("images/*/Containerfile")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_base_is_an_argument_with_a_version(name: str) -> None:
    assert all(rest.split()[0] == "${BASE_IMAGE}" for rest in every(name, "FROM"))
    (default,) = (rest.partition("=")[2] for rest in every(name, "ARG") if rest.startswith("BASE_IMAGE="))
    assert re.fullmatch(r"[\w./-]+:3\.11[\w.-]*", default), "the locks are for Python 3.11"


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_as_a_numeric_user_who_is_not_root(name: str) -> None:
    """A cluster that demands runAsNonRoot cannot look a name up; the user comes last, after all that needs root."""
    assert list(every(name, "USER")) == ["10001:10001"]
    after = [word for word, _ in instructions(name)]
    assert not {"RUN", "COPY", "FROM"} & set(after[after.index("USER") :])


@pytest.mark.parametrize("name", NAMES)
def test_kfp_can_give_the_command(name: str) -> None:
    """kfp's local runner appends its command to an entry point, a cluster replaces it: only without one both agree."""
    words = {word for word, _ in instructions(name)}
    assert not {"ENTRYPOINT", "VOLUME", "ADD", "ONBUILD", "SHELL"} & words


@pytest.mark.parametrize("name", NAMES)
def test_home_is_the_only_place_that_is_written(name: str) -> None:
    (env,) = (rest for rest in every(name, "ENV") if "HOME=" in rest)
    assert "HOME=/tmp " in env
    assert list(every(name, "WORKDIR"))[-1] == "/tmp"


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_installed_without_a_hash(name: str) -> None:
    """pip runs in three ways only: with hashes, without an index, or in install.py, which demands hashes."""
    for command in every(name, "RUN"):
        for pip in re.findall(r"pip install[^&;]*", command):
            assert "--require-hashes" in pip or {"--no-deps", "--no-build-isolation", "./source"} <= set(pip.split())
    assert "--require-hashes" in (ROOT / "images/install.py").read_text()
    assert any(f"images/{name}/requirements.txt" in rest for rest in every(name, "COPY"))


@pytest.mark.parametrize("name", NAMES)
def test_it_holds_no_setting_of_a_machine(name: str) -> None:
    text = (ROOT / "images" / name / "Containerfile").read_text()
    assert not re.search(r"https?://|/etc/ssl|_proxy|trusted-host|localhost|127\.0\.0\.1|:latest", text, re.IGNORECASE)
    arguments = [rest for rest in every(name, "ARG") if rest.startswith("PIP_")]
    assert arguments
    assert not any("=" in rest for rest in arguments)


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_is(name: str) -> None:
    (labels,) = every(name, "LABEL")
    assert f'org.opencontainers.image.title="reflux-python-{name}"' in labels
    for key in ("version", "revision", "created", "licenses", "description", "base.name"):
        assert f"org.opencontainers.image.{key}=" in labels
    holds_reflux = name != "mlflow"
    assert any("REFLUX_CODE_VERSION=${REVISION}" in rest for rest in every(name, "ENV")) == holds_reflux


@pytest.mark.parametrize("name", NAMES)
def test_what_is_copied_exists_and_is_in_the_context(name: str) -> None:
    let_in = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / path).exists() for path in let_in)
    for copied in every(name, "COPY"):
        if not copied.startswith("--from="):
            for path in copied.split()[:-1]:
                assert path == "." or ((ROOT / path).is_file() and path.split("/")[0] in let_in)
