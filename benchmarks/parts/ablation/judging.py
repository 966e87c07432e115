"""How an ablation judges a student: on held-out prompts, beside the live teacher.

Shapes: M measures, S seeds, U prompts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from reflux.components.algorithms.draws import derive_seed
from reflux.components.algorithms.loops import ends_in_loop
from reflux.components.algorithms.low_bit import frozen_weights
from reflux.components.algorithms.rollouts import Request
from reflux.components.distill.config import DistillConfig
from reflux.components.distill.examples import Sequence
from reflux.components.distill.objective import DistillationLoss
from reflux.components.distill.own_answers import answering
from reflux.components.distill.trainer import Trainer

from ..paired import paired_difference, rounded
from .setting import Setting

MEASURES = ("forward_kl_nats", "reverse_kl_nats", "loop_rate", "budget_exhausted")
"""The KL of each next token to the teacher's, forward on the teacher's answers, reverse on the student's own; how often
those loop; how often they find no end.
"""


@torch.no_grad()
def judged(setting: Setting, trainer: Trainer) -> np.ndarray:
    """[M, U] on the held-out prompts; the student's answers are drawn at temperature 1 by fixed seeds."""
    config = replace(trainer.config, on_policy_fraction=1.0, objective="forward_kl", trace_objective="forward_kl")
    requests = [
        Request(prompt_token_ids=s.token_ids[: s.first_scored], seed=derive_seed(0, "judged", number))
        for number, s in enumerate(setting.heldout)
    ]
    answers, _ = answering(config, trainer.loss.student, trainer.loss.teacher)(trainer.rollouts.engine, requests)
    own = [Sequence(token_ids=a.token_ids, first_scored=a.prompt_tokens) for a in answers]
    responses = [s.token_ids[s.first_scored :] for s in own]
    eos = setting.tokenizer.eos_token_id
    return np.array([
        nats(setting, trainer, config, setting.heldout),
        nats(setting, trainer, replace(config, objective="reverse_kl"), own),
        [float(ends_in_loop(response)) for response in responses],
        [float(response[-1] != eos) for response in responses],
    ])  # fmt: skip


def nats(setting: Setting, trainer: Trainer, config: DistillConfig, sequences: list[Sequence]) -> list[float]:
    """Of each sequence, per scored token, in float32 passes."""
    loss = DistillationLoss(trainer.student, setting.teacher, setting.tokenizer, config)
    with frozen_weights(trainer.student):
        return [loss([s]).item() / s.scored for s in sequences]


def named(values_M: np.ndarray) -> dict[str, float]:
    return {name: rounded(value) for name, value in zip(MEASURES, values_M, strict=True)}


def differences(measured: dict[str, np.ndarray], base: str) -> dict[str, dict[str, dict[str, float]]]:
    """Of every other arm to `base`, measure by measure, paired by seed and prompt. `measured` is arm -> [M, S, U]."""
    return {
        arm: {name: paired_difference(values_MSU[m], measured[base][m]) for m, name in enumerate(MEASURES)}
        for arm, values_MSU in measured.items()
        if arm != base
    }
