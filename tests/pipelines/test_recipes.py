"""Recipes: full, typed, and changed only by names and values that exist."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from reflux.pipelines import recipes


@pytest.fixture
def recipe() -> recipes.Recipe:
    return recipes.demo()


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_recipe_survives_json_and_agrees_on_its_sources(name: str) -> None:
    recipe = recipes.named(name)
    for source in recipes.SOURCES:
        assert isinstance(getattr(recipe, source), str)
    configs, pods = (
        json.loads(json.dumps({name: asdict(each) for name, each in part.items()}))
        for part in (recipe.stages(), recipe.kubernetes)
    )
    assert recipes.from_json(configs, pods) == recipe


def test_every_source_field_of_every_stage_is_filled_by_a_source_of_the_run(recipe: recipes.Recipe) -> None:
    uris = {source: f"here/{source}" for source in recipes.SOURCES}
    changed = recipes.overridden(recipe, uris)
    for stage, config_class in recipes.STAGES.items():
        for field in fields(config_class):
            if field.metadata.get("role") == "source":
                assert getattr(getattr(changed, stage), field.name).startswith("here/")
    assert {source: getattr(changed, source) for source in recipes.SOURCES} == uris


def test_values_keep_their_types(recipe: recipes.Recipe) -> None:
    changes = recipes.parse_settings(
        ["distill.max_steps=2", "distill.beta=1", "distill.score_prompts=false", "distill.objective = reverse_kl"]
    )
    changed = recipes.overridden(recipe, changes).distill
    assert (changed.max_steps, changed.beta, changed.score_prompts) == (2, 1.0, False)
    assert changed.objective == "reverse_kl"
    assert type(changed.beta) is float
    assert recipe.distill == recipes.demo().distill


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("distil.max_steps=2", "did you mean distill"),
        ("distill.max_step=2", "did you mean max_steps"),
        ("distill.max_steps=two", r"distill.max_steps: 'two' is not a whole number"),
        ("distill.max_steps=2.5", r"distill.max_steps: '2.5' is not a whole number"),
        ("distill.score_prompts=1", "distill.score_prompts: '1' is not true or false"),
        ("distill.max_steps", "write STAGE.FIELD=VALUE"),
        ("max_steps=2", r"write STAGE.FIELD=VALUE, did you mean distill.max_steps\?"),
        ("seed=2", r"did you mean collect_traces.seed or .*distill.seed or evaluate.seed\?"),
        ("nonsense=2", r"write STAGE.FIELD=VALUE, e.g. --set distill.max_steps=2"),
        ("distill.lr=1e-4", r"did you mean .*warmup_policy_lr, joint_policy_lr, .*finetune_student_lr or \w+_lr\?"),
        ("distill.student_lr=1e-4", r"did you mean joint_student_lr or finetune_student_lr\?"),
        ("distill=2", "write STAGE.FIELD=VALUE"),
        ("evaluate.teacher=other", "the whole run has one teacher; set it with --teacher"),
        ("distill.student_uri=other", "the whole run has one student; set it with --student"),
        ("distill.on_policy_fraction=1.5", r"distill.on_policy_fraction 1.5: must be in \[0, 1\]"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(recipe: recipes.Recipe, setting: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipes.overridden(recipe, recipes.parse_settings([setting]))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.json", '{"teacher": "mine", "distill": {"max_steps": 2.0}}'),
        ("c.toml", 'teacher = "mine"\n[distill]\nmax_steps = 2\n'),
    ],
)
def test_a_file_of_changes(recipe: recipes.Recipe, tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    changed = recipes.overridden(recipe, recipes.read_changes(tmp_path / name))
    assert changed.distill.max_steps == 2
    assert changed.teacher == changed.evaluate.teacher == changed.distill.teacher == "mine"
    assert changed.student == recipe.student


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.json", "{", r"c.json: not valid JSON \(.*line 1"),
        ("c.toml", "\nx = = 1", r"c.toml: not valid TOML \(.*line 2"),
        ("c.json", "[1]", "one table per stage"),
        ("c.json", '{"kubernetes": {"distill": {"memory": "24 GB"}}}', "kubernetes.distill.memory '24 GB': an amount"),
        ("c.json", '{"distill": 3}', "distill: a table of fields is expected, not 3"),
        ("c.json", '{"distill": {"max_steps": "2"}}', "distill.max_steps: '2' is not a whole number"),
        ("c.json", '{"techer": "x"}', "did you mean teacher"),
        ("c.json", '{"teacher": 3}', "teacher: 3 is not text"),
        ("missing.json", None, "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused(
    recipe: recipes.Recipe, tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        recipes.overridden(recipe, recipes.read_changes(tmp_path / name))


def test_an_unknown_recipe_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean demo"):
        recipes.named("dmo")
