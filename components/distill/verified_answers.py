"""Groups of the student's answers to problems that a rule judges, each with its advantage in its group.

Shapes: G prompts, M answers to each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from reflux.components.algorithms.draws import derive_seed
from reflux.components.algorithms.rollouts import Engine, Request
from reflux.components.algorithms.written_losses import group_advantages
from reflux.components.models import chat_token_ids

from .config import DistillConfig
from .own_answers import Answer, Own
from .verified_tasks import Problem, problems

Posed = Mapping[str, tuple[Problem, list[int]]]
"""Name of a problem -> the problem, and its prompt's token ids after the chat template."""


def posed(config: DistillConfig, tokenizer: Any) -> Posed:
    """The problems that the configuration trains on."""
    made = problems(config.verified_task, config.seed, config.verified_problems)
    return {problem.name: (problem, [*chat_token_ids(tokenizer, problem.prompt)]) for problem in made}


def verified(drawn: Answer, problems_of: Posed, tokenizer: Any, group: int) -> Answer:
    """`group` answers to each request, whose prompts are those of `problems_of`: drawn as `drawn` draws one, judged,
    and compared with each other.
    """
    of_prompt = {tuple(token_ids): problem for problem, token_ids in problems_of.values()}

    def answer(engine: Engine, requests: list[Request]) -> tuple[list[Own], dict[str, float]]:
        members = [
            replace(request, seed=derive_seed(request.seed, "member", number))
            for request in requests
            for number in range(group)
        ]
        own, health = drawn(engine, members)
        right = [
            of_prompt[tuple(o.token_ids[: o.prompt_tokens])].right(
                tokenizer.decode(o.token_ids[o.prompt_tokens :], skip_special_tokens=True)
            )
            for o in own
        ]
        reward_GM = torch.tensor(right, dtype=torch.float64).view(-1, group)
        advantage_GM = group_advantages(reward_GM)
        judged = [replace(o, advantage=a) for o, a in zip(own, advantage_GM.flatten().tolist(), strict=True)]
        return judged, health | {
            "verifier_solved": reward_GM.mean().item(),
            "verifier_zero_groups": (advantage_GM == 0).all(-1).double().mean().item(),
        }

    return answer
