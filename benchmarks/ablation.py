"""Does on-policy help? Off-policy, mixed and on-policy distillation at equal budgets of scored tokens: make ablation.

One teacher answers our own prompts; each arm trains the same low-bit student from the same start, once for each seed,
on its share of rollouts until it has scored so many answer tokens; nothing else differs. Held-out prompts judge it, by
the KL of each next token to the teacher's: forward on the teacher's answers, reverse on the student's own, and by how
often the student's answers loop or find no end.

Differences to the off-policy arm are paired by prompt and seed; their intervals are those of a bootstrap that draws
prompts and seeds anew. The last line is one JSON object. About 25 minutes on two quiet cores with the real model.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from parts.ablation.judging import MEASURES, differences, judged, named
from parts.ablation.setting import Setting, prepared, trainer_at_start
from parts.demo import MODEL

from reflux.components.distill import stage as distill
from reflux.components.distill.config import DistillConfig
from reflux.components.distill.student import make_student
from reflux.components.distill.trainer import Trainer

ARMS = {"off-policy": 0.0, "mixed": 0.5, "on-policy": 1.0}
"""Name -> distill.on_policy_fraction."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--model", default=MODEL, help="teacher, and student before training")
    options.add_argument("--prompts", type=int, default=60, help="prompts that are answered, in turn of dimension")
    options.add_argument("--tokens", type=int, default=5000, help="answer tokens that each run may score")
    options.add_argument("--answer-tokens", type=int, default=48, help="longest answer")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--rate", type=float, default=3e-4, help="learning rate of the weights")
    options.add_argument("--objective", default="beta_jsd", help="distill.objective of all arms")
    given = options.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="reflux-ablation-") as folder:
        setting = prepared(Path(folder), given)
        measured, tokens = {}, {}
        for arm, fraction in ARMS.items():
            runs = [run(setting, fraction, seed, given) for seed in range(given.seeds)]
            measured[arm] = np.stack([values_MU for values_MU, _ in runs], 1)  # [measures, seeds, prompts]
            tokens[arm] = [scored for _, scored in runs]
            means = measured[arm].mean((1, 2))
            print(arm, {name: round(float(v), 4) for name, v in zip(MEASURES, means, strict=True)}, flush=True)
        before_MU = judged(setting, trainer_of(setting, 0.0, 0, given))
    result = {
        "before": named(before_MU.mean(1)),
        "arms": {arm: named(values_MSU.mean((1, 2))) for arm, values_MSU in measured.items()},
        "minus_off_policy": differences(measured, "off-policy"),
        "scored_tokens": tokens,
        "heldout_prompts": len(setting.heldout),
        "seconds": round(time.monotonic() - begin),
    }
    print(json.dumps(result))


def trainer_of(setting: Setting, fraction: float, seed: int, given: argparse.Namespace) -> Trainer:
    """A student at its start. The rate stays what it is, so that a run may end at any step."""
    config = DistillConfig(
        teacher=given.model, student_uri=given.model, objective=given.objective, on_policy_fraction=fraction, seed=seed,
        score_prompts=False, max_sequence_tokens=setting.longest,
        warmup_steps=0, joint_steps=0, finetune_steps=10_000, finetune_student_lr=given.rate, final_rate=1.0,
        finetune_policy_lr=5e-3, rise_steps=1, weight_clip_lr=5e-3, ema_decay=0.0, export="last", validation_traces=0,
        micro_batch_sequences=2, compute_dtype="auto", rollout_batch=16, rollout_new_tokens=given.answer_tokens,
    )  # fmt: skip
    student = make_student(config, setting.student(), setting.table())
    return trainer_at_start(setting, config, distill.schedule(config, has_policy=True), student)


def run(setting: Setting, fraction: float, seed: int, given: argparse.Namespace) -> tuple[np.ndarray, int]:
    """[measures, prompts] of the student after its budget, and the tokens that it took."""
    trainer, scored = trainer_of(setting, fraction, seed, given), 0
    while scored < given.tokens:
        trainer.advance()
        scored += int(trainer.history[-1].values["scored_tokens"])
    return judged(setting, trainer), scored


if __name__ == "__main__":
    main()
