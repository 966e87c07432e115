"""Tasks of our own, their exact rules, and groups of answers that these judge."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_chain
from tiny_chain import Chain
from tiny_training import training

from reflux.components.algorithms.rollouts import Request
from reflux.components.distill.config import DistillConfig
from reflux.components.distill.own_answers import Own
from reflux.components.distill.verified_answers import posed, verified
from reflux.components.distill.verified_tasks import TASKS, problems

VERIFIED = {"objective": "verifier + reverse_kl", "trace_objective": "forward_kl", "score_prompts": False,
            "on_policy_fraction": 1.0, "rollout_batch": 8, "batch_sequences": 8, "warmup_steps": 0,
            "joint_steps": 0}  # fmt: skip


@pytest.fixture(scope="module")
def chain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return tiny_chain.make(tmp_path_factory.mktemp("chain"), tiny_model)


@pytest.mark.parametrize("task", TASKS)
def test_problems_hang_on_the_seed_alone_and_differ(task: str) -> None:
    made = problems(task, 0, 60)
    assert [p.prompt for p in made] == [p.prompt for p in problems(task, 0, 60)]
    assert [p.prompt for p in made[:30]] == [p.prompt for p in problems(task, 0, 30)]
    assert len({p.prompt for p in made}) == len({p.name for p in made}) == 60
    assert {p.prompt for p in made} != {p.prompt for p in problems(task, 1, 60)}


def test_a_sum_is_right_or_wrong() -> None:
    for problem in problems("addition", 3, 40):
        a, b = map(int, re.findall(r"\d+", problem.prompt))
        for answer in (f"{a + b}", f"{a} + {b} = {a + b}", f"The answer is {a + b}.", f"{a + b}\n"):
            assert problem.right(answer), answer
        for answer in (f"{a + b + 1}", f"{a + b}0", "", "seven", f"{a + b} or {a + b + 1}", f"-{a + b}"):
            assert not problem.right(answer), answer


def test_a_number_is_even_or_not_and_the_word_for_it_comes_first() -> None:
    for problem in problems("parity", 3, 40):
        (number,) = map(int, re.findall(r"\d+", problem.prompt))
        word, other = ("Yes", "No") if number % 2 == 0 else ("No", "Yes")
        for answer in (word, f" {word.lower()}.", f"{word}, {number} is", f"**{word}**"):
            assert problem.right(answer), answer
        for answer in (other, "", f"Well, {word}", f"{number}", f"{other}. {word}.", f"{word}thing"):
            assert not problem.right(answer), answer


@pytest.mark.parametrize(
    ("task", "count", "message"),
    [("sums", 1, "verified_task 'sums': allowed are addition, parity"),
     ("addition", 1000, "verified_problems 1000: the task addition has fewer, about 81")],
)  # fmt: skip
def test_what_a_task_does_not_have_is_refused(task: str, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        problems(task, 0, count)


def test_a_group_is_judged_and_compared_within_itself(chain: Chain) -> None:
    held = training(chain)
    of_name = posed(chain.training(verified_problems=3), held.tokenizer)
    sums = [sum(map(int, re.findall(r"\d+", problem.prompt))) for problem, _ in of_name.values()]
    answers = [[f"{sums[0]}", "no", "no", f"It is {sums[0]}"], ["no"] * 4, [f"{sums[2]}"] * 4]
    asked: list[Request] = []

    def drawn(engine: Any, requests: list[Request]) -> tuple[list[Own], dict[str, float]]:
        asked.extend(requests)
        texts = [text for group in answers for text in group]
        return [
            Own(token_ids=r.prompt_token_ids + held.tokenizer.encode(text, add_special_tokens=False),
                prompt_tokens=len(r.prompt_token_ids))
            for r, text in zip(requests, texts, strict=True)
        ], {"rollout_tokens": 2.0}  # fmt: skip

    requests = [Request(prompt_token_ids=ids, seed=n) for n, (_, ids) in enumerate(of_name.values())]
    own, health = verified(drawn, of_name, held.tokenizer, 4)(held.trainer.rollouts.engine, requests)
    reward = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1.0]])
    assert [o.advantage for o in own] == pytest.approx([1, -1, -1, 1, *[0] * 8])
    assert health == {
        "rollout_tokens": 2.0,
        "verifier_solved": pytest.approx(reward.mean()),
        "verifier_zero_groups": pytest.approx(2 / 3),
    }
    assert len({request.seed for request in asked}) == 12


def test_a_run_reports_what_its_verifier_saw(chain: Chain) -> None:
    student = chain.distilled(**VERIFIED, finetune_steps=2, verified_problems=6)
    rows = student.table("training").to_pylist()
    seen = {row["metric"] for row in rows if row["step"] == 1}
    assert {"verifier_solved", "verifier_zero_groups", "rollout_loop_rate", "rollout_budget_exhausted"} <= seen
    solved = [row["value"] for row in rows if row["metric"] == "verifier_zero_groups"]
    assert all(0 <= share <= 1 for share in solved)


def test_rollouts_answer_the_task_and_a_checkpoint_keeps_their_advantages(chain: Chain) -> None:
    trainer = training(chain, **VERIFIED, verified_problems=6).trainer
    prompts = {tuple(ids) for _, ids in posed(trainer.config, training(chain).tokenizer).values()}
    taken = trainer.rollouts.take(4, batch=8, score_prompts=False, max_tokens=256)
    assert {tuple(s.token_ids[: s.first_scored]) for s in taken} <= prompts
    assert len({tuple(s.token_ids[: s.first_scored]) for s in taken}) == 1  # a group
    trainer.rollouts.waiting[0] = Own(token_ids=[5, 6], prompt_tokens=1, drawn_nats=[-1.0], advantage=1.5)
    other = training(chain, **VERIFIED, verified_problems=6).trainer.rollouts
    other.restore(trainer.rollouts.state())
    assert other.take(1, batch=8, score_prompts=False, max_tokens=9)[0].advantage == 1.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score_prompts": True}, "score_prompts True: verifier"),
        ({"rollout_temperature": 0.7}, r"\(0.7, 1.0\): verifier is biased unless both are 1"),
        ({"rollout_temperature": 0.0, "off_distribution": "renormalise"}, "rollout_temperature 0: verifier needs"),
        ({"group_answers": 1}, "group_answers 1: an answer is compared with one other"),
        ({"group_answers": 3}, "rollout_batch 8: must be a multiple of group_answers, 3"),
        ({"objective": "verifier + sharpening"}, "sharpening weighs its answers, which verifier takes as drawn"),
        ({"verified_task": "sums"}, "verified_task 'sums': allowed are addition, parity"),
        ({"trace_objective": "verifier"}, "trace_objective: verifier needs rollouts"),
    ],
)
def test_a_verifier_that_cannot_be_used_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^distill.*{message}"):
        DistillConfig(**VERIFIED | options)
