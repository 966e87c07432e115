"""A report is one line for people or one line for the parent, and metric points reach whoever listens."""

from __future__ import annotations

import pytest

from reflux.components import progress
from reflux.components.progress import MetricPoint


def test_parent_reads_back_what_a_stage_reports(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFLUX_PROGRESS", "json")
    for done in range(41):
        progress.report(done, 40, "batches", note='layer "3"')
    seen = [progress.parse(line) for line in capsys.readouterr().out.splitlines()]
    assert all(seen)
    first, last = seen[0], seen[-1]
    assert (first.done, first.left_s) == (0, None)
    assert (last.done, last.total, last.unit, last.note, last.left_s) == (40, 40, "batches", 'layer "3"', 0.0)
    assert len(seen) < 10  # throttled


def test_plain_lines_for_a_pod_log(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REFLUX_PROGRESS", raising=False)
    clock = iter([100.0, 110.0, 111.0, 160.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    for done in (30, 40, 41, 90):  # a resumed stage starts at 30: the rate counts from there
        progress.report(done, 90, "steps")
    assert capsys.readouterr().out.splitlines() == [
        "progress  33 %  30/90 steps",
        "progress  44 %  40/90 steps, 50 s left",
        "progress 100 %  90/90 steps",
    ]


@pytest.mark.parametrize(
    "line", ["hello", '{"reflux_progress": 3}', '{"reflux_progress": {"done": 1}}', '{"reflux_progress"', ""]
)
def test_other_output_is_not_progress(line: str) -> None:
    assert progress.parse(line) is None


def test_durations() -> None:
    assert [progress.duration(s) for s in (0.4, 75, 3700)] == ["0 s", "1 min 15 s", "1 h 1 min"]


def test_points_reach_listeners_inside_the_block_only() -> None:
    heard: list[list[MetricPoint]] = []
    points = [MetricPoint(step=1, time_ms=5, values={"loss_nats": 2.0})]
    with progress.listening(heard.append):
        progress.publish(points)
    progress.publish(points)
    assert heard == [points]
