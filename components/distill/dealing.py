"""Who comes next: shuffled rounds over the training traces, and a buffer of the student's own rollouts that is
refilled when empty.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from reflux.components.algorithms.draws import derive_seed
from reflux.components.algorithms.rollouts import Engine, Request

from .examples import Sequence
from .own_answers import Answer, Own


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
    """The student's answers to training prompts; `take` asks for more when none are left."""

    def __init__(
        self,
        engine: Engine,
        answer: Answer,
        prompts: Deck,
        prompt_ids: dict[str, list[int]],
        seed: int,
        *,
        per_prompt: int = 1,
    ) -> None:
        """`answer` makes of the engine's draws what the objectives need, `per_prompt` answers of each request."""
        self.engine, self.answer, self.prompts, self.prompt_ids = engine, answer, prompts, prompt_ids
        self.seed, self.per_prompt = seed, per_prompt
        self.waiting: list[Own] = []
        self.made = 0
        self.health: dict[str, float] = {}

    def take(self, count: int, *, batch: int, score_prompts: bool, max_tokens: int) -> list[Sequence]:
        """`count` rollouts as sequences, oldest first, made `batch` at a time."""
        while len(self.waiting) < count:
            self._refill(batch)
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return [
            Sequence(
                token_ids=own.token_ids[:max_tokens],
                first_scored=1 if score_prompts else own.prompt_tokens,
                drawn_nats=None if own.drawn_nats is None else own.drawn_nats[: max(0, max_tokens - own.prompt_tokens)],
                weight=own.weight,
                advantage=own.advantage,
                cut_tokens=max(0, len(own.token_ids) - max_tokens),
            )
            for own in taken
        ]

    def _refill(self, batch: int) -> None:
        requests = [
            Request(prompt_token_ids=self.prompt_ids[name], seed=derive_seed(self.seed, "rollout", self.made + number))
            for number, name in enumerate(self.prompts.deal(batch // self.per_prompt))
        ]
        answers, self.health = self.answer(self.engine, requests)
        self.made += len(requests)
        self.waiting += answers

    def state(self) -> dict[str, Any]:
        waiting = [asdict(own) for own in self.waiting]
        return {"waiting": waiting, "made": self.made, "health": self.health, "prompts": self.prompts.state()}

    def restore(self, state: dict[str, Any]) -> None:
        self.waiting = [Own(**own) for own in state["waiting"]]
        self.made, self.health = state["made"], dict(state["health"])
        self.prompts.restore(state["prompts"])
