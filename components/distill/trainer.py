"""The optimizer step and everything that a resumed run needs to continue as if it had never stopped.

State that moves: weights and table, AdamW, EMA, the decks and their generators, rollouts made but not yet used, the
step and the history. All of it is in `state()`; 2 x 50 steps equal 1 x 100 bit for bit on a CPU (objectives.md, rule
13).
"""

from __future__ import annotations

import time
from typing import Any

import torch

from reflux.components.algorithms.ema import Ema
from reflux.components.algorithms.low_bit import decoder_layers, frozen_weights
from reflux.components.algorithms.schedules import Phase, phase_at, rate
from reflux.components.progress import MetricPoint
from reflux.components.sequences import batched

from .config import DistillConfig
from .dealing import Deck, RolloutBuffer, own_rollouts
from .examples import Sequence
from .objective import DistillationLoss, Observed


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
        self.layers = decoder_layers(student)
        self.policy = {"policy.log_main_SP": student.policy.log_main_SP} if student.policy is not None else {}
        self.weights = {f"model.layers.{name}": p for name, p in self.layers.named_parameters()}
        self.clipping = {name: p for name, p in self.weights.items() if name.endswith(".log_clip_OG")}
        masters = [p for name, p in self.weights.items() if name not in self.clipping]
        groups = [
            {"params": list(self.policy.values()), "weight_decay": 0.0},
            {"params": [p for p in masters if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in masters if p.ndim == 1], "weight_decay": 0.0},
            {"params": list(self.clipping.values()), "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, fused=True)
        self.ema = Ema(self.trained(), config.ema_decay)
        self.step = 0
        self.history: list[MetricPoint] = []
        self.seconds: list[float] = []

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Every parameter that some phase may move, by name."""
        return {**self.policy, **self.weights}

    def advance(self) -> None:
        """One optimizer step. FloatingPointError: loss or gradient not finite; ValueError: the table has saturated."""
        begin = time.monotonic()
        phase, step_in_phase = phase_at(self.phases, self.step)
        self._prepare(phase, step_in_phase)
        sequences = self._sequences()
        tokens = sum(s.scored for s in sequences)
        observed = Observed()
        loss_sum = 0.0
        with frozen_weights(self.student, differentiable=True, dtype=self.loss.compute_dtype):
            for micro_batch in batched(sequences, self.config.micro_batch_sequences):
                loss = self.loss(micro_batch, observed)
                (loss / tokens).backward()
                loss_sum += loss.item()
        if not loss_sum < float("inf"):  # NaN compares false as well
            raise FloatingPointError(f"distill: the loss of step {self.step + 1} is {loss_sum / tokens} nats a token")
        moved = [p for p in self.trained().values() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(moved, self.config.gradient_clip).item()
        if not norm < float("inf"):
            raise FloatingPointError(f"distill: the gradient of step {self.step + 1} has norm {norm}")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.policy:
            self.student.policy.check()
        self.ema.update(self.trained())
        self.step += 1
        values = {
            "loss_nats": loss_sum / tokens,
            "gradient_norm": norm,
            "scored_tokens": float(tokens),
            "student_lr": self.optimizer.param_groups[1]["lr"],
            "policy_lr": self.optimizer.param_groups[0]["lr"],
            **observed.means(),
            **self.rollouts.health,
        }
        self.history.append(MetricPoint(step=self.step, time_ms=time.time_ns() // 1_000_000, values=values))
        self.seconds.append(time.monotonic() - begin)

    def _prepare(self, phase: Phase, step_in_phase: int) -> None:
        factor = rate(step_in_phase, phase.steps, self.config.rise_steps, self.config.final_rate)
        policy_moves = phase.policy_lr > 0 and step_in_phase % phase.policy_every == 0
        for p in self.policy.values():
            p.requires_grad_(policy_moves)
        first = 0 if phase.last_layers < 0 else len(self.layers) - phase.last_layers
        for i, layer in enumerate(self.layers):
            layer.requires_grad_(i >= first and phase.student_lr > 0)
        if not self.config.weight_clip_lr:
            for p in self.clipping.values():
                p.requires_grad_(False)
        rates = (phase.policy_lr, phase.student_lr, phase.student_lr, self.config.weight_clip_lr)
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = lr * factor

    def _sequences(self) -> list[Sequence]:
        """The step's sequences: rollouts and traces in the asked proportion, over the steps exactly."""
        config = self.config
        own = own_rollouts(self.step, config.batch_sequences, config.on_policy_fraction)
        taken = self.rollouts.take(
            own, batch=config.rollout_batch, score_prompts=config.score_prompts, max_tokens=config.max_sequence_tokens
        )
        dealt = [self.traces[name] for name in self.deck.deal(config.batch_sequences - own)]
        return sorted([*taken, *dealt], key=_length)

    def state(self) -> dict[str, Any]:
        """Everything that moves, in types that torch.load reads with weights_only=True."""
        return {
            "step": self.step,
            "trained": {name: p.detach() for name, p in self.trained().items()},
            "optimizer": self.optimizer.state_dict(),
            "ema": self.ema.average,
            "deck": self.deck.state(),
            "rollouts": self.rollouts.state(),
            "history": [[point.step, point.time_ms, point.values] for point in self.history],
            "seconds": list(self.seconds),
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        for name, p in self.trained().items():
            p.copy_(state["trained"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.ema.average = state["ema"]
        self.deck.restore(state["deck"])
        self.rollouts.restore(state["rollouts"])
        self.step, self.seconds = state["step"], list(state["seconds"])
        self.history = [MetricPoint(step=step, time_ms=ms, values=values) for step, ms, values in state["history"]]


def _length(sequence: Sequence) -> int:
    return len(sequence.token_ids)
