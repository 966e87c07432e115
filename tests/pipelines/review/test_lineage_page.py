"""The lineage as a page: all digests, links that lead somewhere, what does not match, and nothing that could run."""

from __future__ import annotations

import html
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from finished_run import PARENTS, make

from reflux.pipelines import runs
from reflux.pipelines.__main__ import cli
from reflux.pipelines.review import lineage, lineage_page
from reflux.pipelines.review.lineage import Chain

HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)> {{ 7 * 7 }}'


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def chain(run: Path) -> Chain:
    return lineage.verify(str(run), data_dir=run.parents[1])


def test_the_command_writes_it_beside_the_tree(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "lineage.html"
    done = CliRunner().invoke(cli, ["lineage", str(run), "--html", str(page)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "verified: " in done.stdout
    assert done.stderr == f"page: {page}\n"
    text = html.unescape(page.read_text())
    assert runs.read(run).root in text
    assert all(artifact["digest"] in text and artifact["key"] in text for artifact in runs.read(run).artifacts.values())


def test_every_parent_is_a_click_away(chain: Chain) -> None:
    text = lineage_page.render(chain, of="demo-1")
    anchors = re.findall(r'<h2 id="([^"]+)">', text)
    assert sorted(anchors) == sorted(chain.artifacts)
    links = re.findall(r'href="#([^"]+)"', text)
    assert set(links) == set(anchors)
    assert len(links) == len(PARENTS) + sum(map(len, PARENTS.values()))


def test_what_does_not_match_comes_first(chain: Chain) -> None:
    text = lineage_page.render(replace(chain, mismatches=["objects/x: was changed"]), of="demo-1")
    assert text.index("objects/x: was changed") < text.index("<table>")
    assert "verified" not in text


def test_a_parent_that_is_not_there_is_no_link(chain: Chain) -> None:
    root = chain.artifacts[chain.root]
    text = lineage_page.render(replace(chain, artifacts={chain.root: root}), of="demo-1")
    assert text.count("not found") == len(root.parents)
    assert set(re.findall(r'href="#([^"]+)"', text)) == {chain.root}


def test_other_peoples_text_is_only_text(chain: Chain) -> None:
    node = replace(
        chain.artifacts[chain.root], config={HOSTILE: HOSTILE}, sources={HOSTILE: {"uri": HOSTILE, "digest": HOSTILE}}
    )
    text = lineage_page.render(Chain(root=chain.root, artifacts={chain.root: node}, mismatches=[HOSTILE]), of=HOSTILE)
    assert not re.search(r"<(script|img)|https?://|<[^>]* on\w+=", text)
    assert html.unescape(text).count(HOSTILE) >= 6
