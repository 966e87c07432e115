"""Phases, their shortening and the learning rate over a phase."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from reflux.components.algorithms.schedules import PHASES, Phase, capped, has_settled, phase_at, rate, teacher_weight


def phases(*steps: int) -> list[Phase]:
    return [
        Phase(name=name, steps=n, student_lr=1e-4, policy_lr=1e-2, policy_every=1, last_layers=-1)
        for name, n in zip(PHASES, steps, strict=True)
    ]


def test_a_cap_keeps_the_total_and_the_proportions():
    for cap in range(1, 200):
        short = capped(phases(20, 60, 120), cap)
        assert sum(p.steps for p in short) == cap
        assert [p.name for p in short] == list(PHASES)
        if cap >= 3:
            assert all(abs(p.steps - share * cap) <= 1 for p, share in zip(short, (0.1, 0.3, 0.6), strict=True))


def test_a_capped_run_passes_through_every_phase_that_has_steps():
    for cap in range(3, 30):
        assert all(p.steps >= 1 for p in capped(phases(1, 10, 2000), cap))
    assert [p.steps for p in capped(phases(0, 10, 2000), 2)] == [0, 1, 1]
    assert sum(p.steps for p in capped(phases(1, 10, 2000), 2)) == 2  # too short for all three


@pytest.mark.parametrize("cap", [0, 200, 10**6])
def test_no_cap_or_a_wide_one_changes_nothing(cap: int):
    assert capped(phases(20, 60, 120), cap) == phases(20, 60, 120)


def test_phase_of_every_step():
    found = [phase_at(phases(2, 0, 3), step) for step in range(5)]
    assert [(phase.name, step) for phase, step in found] == [
        ("warmup", 0), ("warmup", 1), ("finetune", 0), ("finetune", 1), ("finetune", 2)
    ]  # fmt: skip
    with pytest.raises(ValueError, match="step 5 lies beyond"):
        phase_at(phases(2, 0, 3), 5)


def test_the_rate_rises_to_one_and_falls_to_its_share():
    rates = [rate(step, 50, 5, 0.1) for step in range(50)]
    assert rates[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1])
    assert rates[-1] == pytest.approx(0.1)
    falls = [a - b for a, b in pairwise(rates[5:])]
    assert falls == pytest.approx([0.9 / 44] * 44)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 5), (2, 1), (3, 3), (5, 100)])
def test_the_rate_of_a_short_phase_is_a_usable_factor(steps: int, warmup: int):
    assert all(0 < rate(step, steps, warmup, 0.1) <= 1 for step in range(steps))


def test_the_teachers_weight_is_linear_between_the_ends_of_a_phase():
    joint = replace(phases(0, 5, 0)[1], teacher_weight=(0.5, 0.7))
    assert [teacher_weight(joint, step) for step in range(5)] == pytest.approx([0.5, 0.55, 0.6, 0.65, 0.7])
    assert teacher_weight(replace(joint, steps=1), 0) == 0.5
    assert {teacher_weight(phase, 0) for phase in phases(1, 1, 1)} == {1.0}


@pytest.mark.parametrize(
    ("values", "patience", "settled"),
    [
        ([5, 4, 3, 2], 2, False),
        ([5, 4, 4, 5], 2, True),
        ([5, 4, 5, 3], 2, False),
        ([1, 9, 5, 5], 2, True),  # no lower is enough
        ([9, 9, 9, 5, 4, 3], 2, False),  # only the last ones count
        ([9, 1, 1], 1, True),
        ([9, 9, 9], 2, False),  # too few to tell
        ([9, 9], 0, False),
        ([], 1, False),
    ],
)
def test_what_should_fall_has_settled_once_its_mean_no_longer_falls(values: list, patience: int, settled: bool):
    assert has_settled(values, patience) == settled


@pytest.mark.parametrize("warmup", [0, 1, 2, 5])
def test_the_only_step_after_the_rise_has_the_whole_rate(warmup: int):
    assert rate(warmup, warmup + 1, warmup, 0.0) == 1.0
    assert rate(warmup, warmup + 2, warmup, 0.25) == 1.0
    assert rate(warmup + 1, warmup + 2, warmup, 0.25) == 0.25
