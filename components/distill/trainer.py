"""The optimizer step and everything that a resumed run needs to continue as if it had never stopped.

State that moves: weights and table, AdamW, EMA, the decks and their generators, rollouts made but not yet used, the
step and the history. All of it is in `state()`; 2 x 50 steps equal 1 x 100 bit for bit on a CPU (objectives.md, rule
13). Several processes draw the same step and each works on its share of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Several
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from reflux.components import processes
from reflux.components.algorithms.ema import Ema
from reflux.components.algorithms.low_bit import decoder_layers, frozen_weights
from reflux.components.algorithms.schedules import Phase, has_settled, phase_at, rate, teacher_weight
from reflux.components.progress import MetricPoint
from reflux.components.sequences import batched

from . import parallel, warm_policy
from .adapters import MARK
from .config import DistillConfig
from .dealing import Deck, RolloutBuffer, own_rollouts
from .examples import Sequence
from .guard import policy_health
from .objective import DistillationLoss
from .observed import Observed

PROMPTS_KEPT = 16
"""Prompts that are kept when rollouts are not finite: what is wrong with the weights shows in any."""


class NotFiniteError(FloatingPointError):
    """A loss or gradient that no step may be made of; `sequences` are those that gave it, with this share of the
    teacher.
    """

    def __init__(self, message: str, sequences: list[Sequence], teacher_weight: float = 1.0) -> None:
        super().__init__(message)
        self.sequences, self.teacher_weight = sequences, teacher_weight


class Trainer:
    """Moves the student through the schedule, one optimizer step at a time."""

    def __init__(
        self,
        config: DistillConfig,
        phases: list[Phase],
        student: Any,
        loss: DistillationLoss,
        traces: dict[str, Sequence],
        deck: Deck,
        rollouts: RolloutBuffer,
    ) -> None:
        self.config, self.phases, self.student, self.loss = config, phases, student, loss
        self.traces, self.deck, self.rollouts = traces, deck, rollouts
        self.layers, self.network = decoder_layers(student), warm_policy.network_of(student)
        self.policy = {"policy.log_main_SP": student.policy.log_main_SP} if student.policy is not None else {}
        named = {f"model.layers.{name}": p for name, p in self.layers.named_parameters()}
        self.clipping = {name: p for name, p in named.items() if name.endswith(".log_clip_OG")}
        adapted = any(MARK in name for name in named)
        masters = {name: p for name, p in named.items() if name not in self.clipping and (MARK in name) == adapted}
        self.weights = {name: p for name, p in named.items() if name in masters or name in self.clipping}
        if config.weight_clip_lr and not self.clipping:
            raise ValueError(
                f"distill.weight_clip_lr {config.weight_clip_lr}: no weight is rounded, so no grid has an end to learn"
            )
        groups = [
            {"params": list(self.policy.values()), "weight_decay": 0.0},
            {"params": [p for p in masters.values() if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in masters.values() if p.ndim == 1], "weight_decay": 0.0},
            {"params": list(self.clipping.values()), "weight_decay": 0.0},
            {"params": list(self.network.values()), "weight_decay": config.weight_decay},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, fused=not parallel.is_sharded(student))
        self.ema = Ema(self.local(), config.ema_decay)
        self.step = 0
        self.history: list[MetricPoint] = []
        self.seconds: list[float] = []

    @property
    def total(self) -> int:
        """Steps of the schedule, of which a warm-up that ends early takes some away."""
        return sum(phase.steps for phase in self.phases)

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Every parameter that some phase may move, by name."""
        return {**self.policy, **self.network, **self.weights}

    def local(self) -> dict[str, torch.Tensor]:
        """The same, as far as this process holds them."""
        return {name: parallel.local(p) for name, p in self.trained().items()}

    def advance(self) -> None:
        """One optimizer step. NotFiniteError: loss or gradient not finite; ValueError: the table has saturated, or no
        gradient reaches it any more.
        """
        begin = time.monotonic()
        phase, step_in_phase = phase_at(self.phases, self.step)
        settled = {} if phase.name == "warmup" else warm_policy.settle(self)
        self._prepare(phase, step_in_phase)
        sequences = self._sequences()
        tokens, taught = sum(s.scored for s in sequences), teacher_weight(phase, step_in_phase)
        loss_sum, observed = self._accumulate(processes.share(sequences), max(1, tokens), taught)
        if not loss_sum < float("inf"):  # NaN compares false as well
            nats = loss_sum / max(1, tokens)
            raise NotFiniteError(f"distill: the loss of step {self.step + 1} is {nats} nats a token", sequences, taught)
        moved = [p for p in self.trained().values() if p.grad is not None]
        health = {}
        if self.policy and tokens:
            health = policy_health(self.policy.values(), self.student.policy.scales()[..., 0], self.history)
        norm = parallel.clip_gradients(moved, phase.gradient_clip or self.config.gradient_clip)
        if not norm < float("inf"):
            raise NotFiniteError(f"distill: the gradient of step {self.step + 1} has norm {norm}", sequences, taught)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.policy:
            self.student.policy.check()
        self.ema.update(self.local())
        self.step += 1
        values = {
            "loss_nats": loss_sum / max(1, tokens),
            "gradient_norm": norm,
            "scored_tokens": float(tokens),
            "student_lr": self.optimizer.param_groups[1]["lr"],
            "policy_lr": self.optimizer.param_groups[0]["lr"],
            **settled,
            "teacher_weight": taught,
            **health,
            **observed.means(),
            **self.rollouts.health,
        }
        self.history.append(MetricPoint(step=self.step, time_ms=time.time_ns() // 1_000_000, values=values))
        self.seconds.append(time.monotonic() - begin)
        self._end_warmup(phase)

    def _end_warmup(self, phase: Phase) -> None:
        """Now, if scales alone bring the activations no nearer: the phase has then as many steps as were made."""
        if phase.name != "warmup" or self.step == phase.steps:
            return
        kl = [point.values[name] for point in self.history if (name := "activation_kl_nats") in point.values]
        if has_settled(kl, self.config.warmup_patience):
            self.phases = [replace(phase, steps=self.step), *self.phases[1:]]
            if processes.is_first():
                print(f"distill: the warm-up ends after {self.step} of {phase.steps} steps: the activation KL has "
                      f"stopped falling at {kl[-1]:.3g} nats", flush=True)  # fmt: skip

    def _accumulate(self, own: Several[Sequence], tokens: int, taught: float = 1.0) -> tuple[float, Observed]:
        """Gather the step's gradients from this process's sequences and from everybody else's; loss of all, nats."""
        observed, loss_sum = Observed(), 0.0
        with self._rounded():
            for micro_batch in batched(own, self.config.micro_batch_sequences):
                loss = self.loss(micro_batch, observed, teacher_weight=taught)
                (loss / tokens).backward()
                loss_sum += loss.item()
        parallel.sum_gradients(self.trained().values())
        return sum(processes.gathered(loss_sum)), Observed.together(processes.gathered(observed))

    @contextmanager
    def _rounded(self) -> Iterator[None]:
        """Each weight is rounded once for all micro-batches, or in each where a process holds only a share of it."""
        if parallel.is_sharded(self.student):
            yield
            return
        with frozen_weights(self.student, differentiable=True, dtype=self.loss.compute_dtype):
            yield

    def _prepare(self, phase: Phase, step_in_phase: int) -> None:
        factor = rate(step_in_phase, phase.steps, self.config.rise_steps, self.config.final_rate)
        policy_moves = phase.policy_lr > 0 and step_in_phase % phase.policy_every == 0
        for p in self.policy.values():
            p.requires_grad_(policy_moves)
        for p in self.network.values():
            p.requires_grad_(True)
        self.layers.requires_grad_(False)
        first = 0 if phase.last_layers < 0 else len(self.layers) - phase.last_layers
        for name, p in self.weights.items():
            layer = int(name.split(".")[2])
            stands = name in self.clipping and not self.config.weight_clip_lr
            p.requires_grad_(layer >= first and phase.student_lr > 0 and not stands)
        config = self.config
        rates = (phase.policy_lr, phase.student_lr, phase.student_lr, config.weight_clip_lr, config.policy_network_lr)
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = lr * factor

    def _sequences(self) -> list[Sequence]:
        """The step's sequences: rollouts and traces in the asked proportion, over the steps exactly."""
        config = self.config
        own = own_rollouts(self.step, config.batch_sequences, config.on_policy_fraction)
        try:
            taken = self.rollouts.take(
                own,
                batch=config.rollout_batch,
                score_prompts=config.score_prompts,
                max_tokens=config.max_sequence_tokens,
            )
        except FloatingPointError as error:
            prompts = [*self.rollouts.prompt_ids.values()][:PROMPTS_KEPT]
            raise NotFiniteError(
                f"distill: rollouts for step {self.step + 1}: {error}",
                [Sequence(token_ids=ids, first_scored=1) for ids in prompts],
            ) from error
        dealt = [self.traces[name] for name in self.deck.deal(config.batch_sequences - own)]
        return sorted([*taken, *dealt], key=_length)

    def state(self) -> dict[str, Any]:
        """Everything that moves, in types that torch.load reads with weights_only=True; of weights, what this process
        holds.
        """
        return {
            "processes": processes.count(),
            "step": self.step,
            "phase_steps": [phase.steps for phase in self.phases],
            "trained": self.local(),
            "optimizer": tree_map_only(torch.Tensor, parallel.local, self.optimizer.state_dict()),
            "ema": self.ema.average,
            "deck": self.deck.state(),
            "rollouts": self.rollouts.state(),
            "history": [[point.step, point.time_ms, point.values] for point in self.history],
            "seconds": list(self.seconds),
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        if not self.network.keys() <= state["trained"].keys():
            warm_policy.drop(self)
        for name, p in self.local().items():
            p.copy_(state["trained"][name])
        self.optimizer.load_state_dict(parallel.cut_state(state["optimizer"], self.optimizer))
        for name, average in self.ema.average.items():
            average.copy_(state["ema"][name])
        self.deck.restore(state["deck"])
        self.rollouts.restore(state["rollouts"])
        self.step, self.seconds = state["step"], list(state["seconds"])
        self.phases = [replace(p, steps=n) for p, n in zip(self.phases, state["phase_steps"], strict=True)]
        self.history = [MetricPoint(step=step, time_ms=ms, values=values) for step, ms, values in state["history"]]


def _length(sequence: Sequence) -> int:
    return len(sequence.token_ids)
