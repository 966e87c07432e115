"""The pages of a run in a browser: they need no script and no network, and their tables and plots can be seen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import finished_run
import pytest
import tiny_chain
from click.testing import CliRunner
from servers import browser
from servers.browser import Window
from stage_writers import writer_for

from reflux.components.calibrate import stage as calibrate
from reflux.components.calibrate.config import CalibrateConfig
from reflux.components.evaluate import stage as evaluate
from reflux.components.evaluate.config import EvaluateConfig
from reflux.pipelines.__main__ import cli


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """report.html and profile.html of a small run, beside each other as in the folder of a run."""
    chain = tiny_chain.make(tmp_path_factory.mktemp("chain"), tiny_model)
    model = str(tiny_model)
    student = chain.distilled()
    export, seen = (
        CalibrateConfig(student_uri=model),
        {"student": student, "profile": chain.profile, "traces": chain.traces},
    )
    writer = writer_for(chain.folder, "calibrate", export, **seen)
    bundle = writer.commit(calibrate.run(export, **seen, bundle=writer))
    judging = EvaluateConfig(
        teacher=model, student_uri=model, windows=2, window_tokens=64, latency_tokens=20, generations=2,
        generation_tokens=8, min_gap_closed_text=0.0,
    )  # fmt: skip
    writer = writer_for(chain.folder, "evaluate", judging, bundle=bundle, **seen)
    scores = writer.commit(evaluate.run(judging, bundle=bundle, **seen, scores=writer))
    pages = tmp_path_factory.mktemp("run")
    scores.download("report.html", pages / "report.html")
    chain.profile.download("profile.html", pages / "profile.html")
    return pages


@pytest.fixture
def window(folder: Path) -> Iterator[Window]:
    with browser.window(folder.as_uri()) as opened:
        yield opened


def test_the_report(folder: Path, window: Window) -> None:
    page = window.page
    page.goto((folder / "report.html").as_uri())
    table = page.locator("table", has=page.locator("th", has_text="perplexity"))
    assert table.is_visible()
    rows = [row.inner_text().split()[0] for row in table.locator("tbody tr").all()]
    assert rows[0] == "fp32"
    assert rows[-1] == "w4a4_distilled"
    plots = page.locator("figure svg").all()
    assert len(plots) == 5
    assert all((plot.bounding_box() or {"width": 0})["width"] > 200 for plot in plots)
    assert window.is_clean()


def test_the_report_on_a_telephone(folder: Path, window: Window) -> None:
    """Wide tables scroll in their boxes, the page itself does not."""
    window.page.set_viewport_size({"width": 375, "height": 700})
    window.page.goto((folder / "report.html").as_uri())
    assert window.page.evaluate("document.documentElement.scrollWidth") <= 375
    assert window.is_clean()


def test_the_profile_is_one_click_from_the_report(folder: Path, window: Window) -> None:
    page = window.page
    page.goto((folder / "report.html").as_uri())
    page.get_by_role("link", name="profile.html").click()
    page.wait_for_url("**/profile.html")
    assert page.locator("figure svg").count() == 5
    assert all(figure.is_visible() for figure in page.locator("figure svg").all())
    assert window.is_clean()


def test_the_lineage(tmp_path: Path) -> None:
    """From the root to the prompts by clicking on what each artifact was made from."""
    run = finished_run.make(tmp_path / "data")
    path = tmp_path / "lineage.html"
    assert CliRunner().invoke(cli, ["lineage", str(run), "--html", str(path)]).exit_code == 0
    with browser.window(tmp_path.as_uri()) as opened:
        page = opened.page
        page.goto(path.as_uri())
        assert page.get_by_text("verified: 6 artifacts").is_visible()
        assert page.locator("table").first.is_visible()
        page.get_by_role("link", name="evaluate").click()
        for stage in ("calibrate", "distill", "collect_traces"):
            here = page.locator("h2:target + div")
            here.get_by_role("link", name=stage).click()
            assert page.locator("h2:target").inner_text() == stage
        assert page.locator("h2:target + div").get_by_text("prompts.jsonl").is_visible()
        assert opened.is_clean()


def test_a_page_that_asks_the_network_is_found(tmp_path: Path) -> None:
    """What the tests above lean on."""
    (tmp_path / "page.html").write_text('<img src="https://example.org/a.png"><script>no.such.thing()</script>')
    with browser.window(tmp_path.as_uri()) as opened:
        opened.page.goto((tmp_path / "page.html").as_uri())
        assert opened.outside == ["https://example.org/a.png"]
        assert any("no is not defined" in line for line in opened.failed)
