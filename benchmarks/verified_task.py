"""How often does a model solve the tasks of distill/verified_tasks.py? A verifier's advantage needs 20 to 80 %.

Asks a model problems drawn with another seed than a training's, a group of answers to each, at several temperatures.
The last line is one JSON object: for each task and temperature the share solved, the share of groups whose answers are
all alike (no advantage), loop rate and budget exhaustion. About five minutes on two quiet cores with the real model.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from parts.demo import MODEL

from reflux.components import models, sources
from reflux.components.algorithms.draws import Sampling, derive_seed
from reflux.components.algorithms.packed_linears import packed_linears
from reflux.components.algorithms.rollouts import Request, Rollout, rollout
from reflux.components.algorithms.written_losses import group_advantages
from reflux.components.distill.own_answers import rollout_health
from reflux.components.distill.verified_tasks import TASKS, Problem, problems

SEED = 1


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--model", default=MODEL)
    options.add_argument("--problems", type=int, default=60, help="of each task")
    options.add_argument("--group", type=int, default=4, help="answers to each")
    options.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.7, 0.0])
    options.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    options.add_argument("--answer-tokens", type=int, default=48, help="longest answer")
    given = options.parse_args()
    path = sources.fetch(given.model)
    model, tokenizer = models.load_model(path), models.load_tokenizer(path)
    print(json.dumps({task: measured(model, tokenizer, task, given) for task in given.tasks}))


def measured(model: Any, tokenizer: Any, task: str, given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By temperature; 0 is the most likely answer, of which there is one."""
    posed, found = problems(task, SEED, given.problems), {}
    for temperature in given.temperatures:
        group = given.group if temperature else 1
        answers = answered(model, tokenizer, posed, group, temperature, given.answer_tokens)
        reward_GM = torch.tensor(judged(tokenizer, posed, answers, group), dtype=torch.float64).view(-1, group)
        found[f"{temperature:g}"] = {
            "solved": reward_GM.mean().item(),
            "zero_groups": (group_advantages(reward_GM) == 0).all(-1).double().mean().item(),
            **rollout_health(answers),
        }
        said = tokenizer.decode(answers[0].response_token_ids)
        print(f"{task} at {temperature:g}: {found[f'{temperature:g}']}, e.g. {posed[0].prompt} -> {said!r}", flush=True)
    return found


def answered(
    model: Any, tokenizer: Any, posed: list[Problem], group: int, temperature: float, longest: int
) -> list[Rollout]:
    requests = [
        Request(
            prompt_token_ids=[*models.chat_token_ids(tokenizer, problem.prompt)],
            seed=derive_seed(SEED, problem.name, number),
        )
        for problem in posed
        for number in range(group)
    ]
    sampling = Sampling(temperature=temperature, top_p=1.0, max_new_tokens=longest)
    with packed_linears(model):
        return rollout(
            model, requests, sampling, eos_token_id=tokenizer.eos_token_id, vocab_size=len(tokenizer), slots=32
        )


def judged(tokenizer: Any, posed: list[Problem], answers: list[Rollout], group: int) -> list[bool]:
    return [
        posed[number // group].right(tokenizer.decode(answer.response_token_ids, skip_special_tokens=True))
        for number, answer in enumerate(answers)
    ]


if __name__ == "__main__":
    main()
