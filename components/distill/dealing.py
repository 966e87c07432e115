"""Who comes next: shuffled rounds over the training traces, and a buffer of the student's own rollouts that is
refilled when empty.
"""

from __future__ import annotations

from typing import Any

import torch

from reflux.components.algorithms.loops import ends_in_loop
from reflux.components.algorithms.low_bit import frozen_weights
from reflux.components.algorithms.rollouts import Rollout, Sampling, derive_seed, rollout

from .examples import Sequence


class Deck:
    """Deals names in shuffled rounds; a name listed twice is dealt twice a round. Its state is part of a checkpoint."""

    def __init__(self, names: list[str], seed: int) -> None:
        self.names, self.left = names, list[str]()
        self.generator = torch.Generator().manual_seed(seed)

    def deal(self, count: int) -> list[str]:
        dealt: list[str] = []
        while len(dealt) < count:
            if not self.left:
                self.left = [self.names[i] for i in torch.randperm(len(self.names), generator=self.generator).tolist()]
            dealt.append(self.left.pop())
        return dealt

    def state(self) -> dict[str, Any]:
        return {"left": list(self.left), "generator": self.generator.get_state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.left = list(state["left"])
        self.generator.set_state(state["generator"])


def own_rollouts(step: int, batch_sequences: int, share: float) -> int:
    """How many of a step's sequences are rollouts, from step 0; their sum is never off by more than half a one."""
    return round((step + 1) * batch_sequences * share) - round(step * batch_sequences * share)


class RolloutBuffer:
    """The student's answers to training prompts, sampled through its deployed forward; `take` makes more when none
    are left.
    """

    def __init__(
        self,
        student: Any,
        tokenizer: Any,
        prompts: Deck,
        prompt_ids: dict[str, list[int]],
        sampling: Sampling,
        seed: int,
    ) -> None:
        self.student, self.tokenizer, self.prompts, self.prompt_ids = student, tokenizer, prompts, prompt_ids
        self.sampling, self.seed = sampling, seed
        self.waiting: list[tuple[list[int], int]] = []  # token ids, length of the prompt
        self.made = 0
        self.health: dict[str, float] = {}

    def take(self, count: int, *, batch: int, score_prompts: bool, max_tokens: int) -> list[Sequence]:
        """`count` rollouts as sequences, oldest first, made `batch` at a time."""
        while len(self.waiting) < count:
            self._refill(batch)
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return [
            Sequence(token_ids=ids[:max_tokens], first_scored=1 if score_prompts else prompt_tokens)
            for ids, prompt_tokens in taken
        ]

    def _refill(self, batch: int) -> None:
        names = self.prompts.deal(batch)
        seeds = [derive_seed(self.seed, "rollout", self.made + i) for i in range(batch)]
        self.student.eval()
        with frozen_weights(self.student):
            answers = rollout(
                self.student,
                [self.prompt_ids[name] for name in names],
                self.sampling,
                seeds=seeds,
                eos_token_id=self.tokenizer.eos_token_id,
                pad_token_id=self.tokenizer.pad_token_id or 0,
                vocab_size=len(self.tokenizer),
            )
        self.made += batch
        self.waiting += [(a.prompt_token_ids + a.response_token_ids, len(a.prompt_token_ids)) for a in answers]
        self.health = rollout_health(answers)

    def state(self) -> dict[str, Any]:
        waiting = [[ids, prompt_tokens] for ids, prompt_tokens in self.waiting]
        return {"waiting": waiting, "made": self.made, "health": self.health, "prompts": self.prompts.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.waiting = [(ids, prompt_tokens) for ids, prompt_tokens in state["waiting"]]
        self.made, self.health = state["made"], dict(state["health"])
        self.prompts.restore(state["prompts"])


def rollout_health(answers: list[Rollout]) -> dict[str, float]:
    """Mean length, share without EOS (budget exhaustion) and share that ends in a loop (objectives.md, rule 12)."""
    count = len(answers)
    return {
        "rollout_tokens": sum(len(a.response_token_ids) for a in answers) / count,
        "rollout_budget_exhausted": sum(a.stop_reason == "length" for a in answers) / count,
        "rollout_loop_rate": sum(ends_in_loop(a.response_token_ids) for a in answers) / count,
    }
