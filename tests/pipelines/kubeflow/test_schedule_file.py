"""Schedules as files: what is read, and that a wrong file is refused with its name, the schedule and the field."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from reflux.pipelines.kubeflow import schedule_file

ONE = "{name: weekly, recipe: demo, cron: 0 0 3 * * 1, time_zone: UTC}"


def test_the_example_of_the_docstring_is_a_file(tmp_path: Path) -> None:
    example = (schedule_file.__doc__ or "").partition("    schedules:")
    (tmp_path / "a.yaml").write_text(textwrap.dedent("".join(example[1:])).rpartition("\n\n")[0])
    weekly, nightly = schedule_file.read([tmp_path])
    assert (weekly.recipe, weekly.changes, weekly.enabled) == ("demo", {"distill": {"max_steps": 40}}, True)
    assert (nightly.pipeline, nightly.cron) == ("reflux-distillation", "0 30 1 * * *")
    assert (nightly.max_concurrency, nightly.catch_up) == (1, False)


def test_a_folder_stands_for_its_files(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text(f"schedules: [{ONE}]")
    (tmp_path / "a.yaml").write_text(f"schedules: [{ONE.replace('weekly', 'nightly')}]")
    (tmp_path / "readme.md").write_text("no schedule")
    assert [each.name for each in schedule_file.read([tmp_path])] == ["nightly", "weekly"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schedules: [{", "not valid YAML"),
        ("name: weekly", "one list `schedules:` is expected"),
        ("schedules: [weekly]", "schedule 1: a table of fields is expected, not 'weekly'"),
        (f"schedules: [{ONE}, {{name: a, recipe: demo}}]", "a: no value for cron, time_zone"),
        (f"schedules: [{ONE[:-1]}, enabeld: no}}]", "weekly: enabeld: no such field; did you mean enabled?"),
        (f"schedules: [{ONE[:-1]}, enabled: 'no'}}]", "weekly: enabled: 'no' is not true or false"),
        (f"schedules: [{ONE[:-1]}, max_concurrency: true}}]", "max_concurrency: True is not a whole number"),
        (f"schedules: [{ONE[:-1]}, max_concurrency: 11}}]", "weekly: max_concurrency 11 must be from 1 to 10"),
        (
            f"schedules: [{ONE[:-1]}, description: {'long ' * 28}}}]",
            "weekly: description: must be one line of up to 135",
        ),
        (
            f"schedules: [{ONE[:-1].replace('recipe: demo', 'pipeline: ' + 'p' * 60)}, description: {'l' * 80}}}]",
            "weekly: description: must be one line of up to 77 characters",
        ),
        (f"schedules: [{ONE[:-1]}, pipeline: p}}]", "weekly: give a recipe, or a pipeline"),
        ("schedules: [{name: w, pipeline: p, image: i, cron: 0 0 3 * * 1, time_zone: UTC}]", "w: changes and image"),
        (f"schedules: [{ONE.replace('weekly', 'Weekly run')}]", "name 'Weekly run': use up to 63 small letters"),
        (f"schedules: [{ONE.replace('0 0 3 * * 1', '0 3 * * 1')}]", "weekly: cron '0 3 * * 1': has 5 fields"),
        (f"schedules: [{ONE.replace('UTC', 'Berlin')}]", "weekly: time_zone 'Berlin': no such zone"),
        (f"schedules: [{ONE}, {ONE}]", "schedule weekly: is there 2 times"),
    ],
)
def test_wrong_files_are_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "schedules.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"schedule") as caught:
        schedule_file.read([path])
    assert message in str(caught.value)


def test_an_empty_folder_is_no_declaration(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no file \*.yaml"):
        schedule_file.read([tmp_path])
    with pytest.raises(ValueError, match=r"none.yaml: cannot be read"):
        schedule_file.read([tmp_path / "none.yaml"])
