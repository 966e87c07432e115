"""What does each part of low-bit distillation give? The same student trained with all parts, and with each one changed.

One teacher answers our own prompts; every arm trains the same W4A4 student from the same start for as many steps of as
many sequences, once for each seed. ARMS are what differs, as fields of distill's configuration; an arm of several
trainings has its steps shared between them, each going on from the one before. Held-out prompts judge as in
ablation.py, and differences to the first arm are paired by prompt and seed.

The last line is one JSON object. About an hour on two quiet cores with the real model.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from parts.ablation.judging import differences, judged, named
from parts.ablation.setting import Setting, prepared, trainer_at_start
from parts.demo import MODEL

from reflux.components.distill import stage as distill
from reflux.components.distill.config import DistillConfig
from reflux.components.distill.student import make_student, scheme_of
from reflux.components.distill.trainer import Trainer

BASE: dict[str, Any] = {
    "objective": "forward_kl + bridge", "trace_objective": "forward_kl", "on_policy_fraction": 0.5,
    "score_prompts": False, "warmup_steps": 2, "joint_steps": 2, "finetune_steps": 20, "warmup_policy_lr": 1e-2,
    "joint_policy_lr": 5e-3, "joint_student_lr": 1e-4, "finetune_policy_lr": 5e-3, "finetune_policy_every": 2,
    "finetune_student_lr": 3e-4, "rise_steps": 1, "weight_clip_lr": 5e-3, "ema_decay": 0.0, "export": "last",
    "validation_traces": 0, "micro_batch_sequences": 2, "compute_dtype": "auto", "rollout_batch": 16,
}  # fmt: skip
POWER = "equalization_power"
"""The one field of an arm that is profile_kv's."""
ARMS: dict[str, list[dict[str, Any]]] = {
    "all parts": [{}],
    "without the bridge": [{"objective": "forward_kl"}],
    "the bridge at all places": [{"bridge_fraction": 1.0}],
    "with range alignment": [{"objective": "forward_kl + bridge + 1e-6*range_alignment"}],
    "without warm-up": [{"warmup_steps": 0, "finetune_steps": 22}],
    "without three stages": [{"warmup_steps": 0, "joint_steps": 0, "finetune_steps": 24}],
    "with a table that stands still": [
        {"warmup_steps": 0, "finetune_steps": 22, "joint_policy_lr": 0.0, "finetune_policy_lr": 0.0}
    ],
    "without learned clipping": [{"weight_clip_lr": 0.0}],
    "one scale a token": [{"activation": "plain"}],
    "off-policy alone": [{"on_policy_fraction": 0.0, "trace_objective": "forward_kl + bridge"}],
    "on-policy alone": [{"on_policy_fraction": 1.0}],
    "off-policy, then on-policy": [
        {"on_policy_fraction": 0.0}, {"on_policy_fraction": 1.0, "warmup_steps": 0, "joint_steps": 0}
    ],
    "with equalised channels": [{POWER: 0.5}],
    "with a verifier": [
        {"objective": "verifier + reverse_kl", "rollout_temperature": 0.7, "off_distribution": "renormalise"}
    ],
}  # fmt: skip
"""Name -> the trainings that an arm consists of, each as what differs from BASE."""


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--model", default=MODEL, help="teacher, and student before training")
    options.add_argument("--prompts", type=int, default=60, help="prompts that are answered, in turn of dimension")
    options.add_argument("--answer-tokens", type=int, default=48, help="longest answer")
    options.add_argument("--steps", type=int, default=24, help="optimizer steps of each arm")
    options.add_argument("--seeds", type=int, default=1)
    options.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    given = options.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="reflux-ablation-") as folder:
        setting = prepared(Path(folder), given, powers=(0.0, 0.5))
        measured, watched = {}, {}
        for arm in given.arms:
            runs = [run(setting, ARMS[arm], seed, given) for seed in range(given.seeds)]
            measured[arm] = np.stack([values_MU for values_MU, _ in runs], 1)  # [measures, seeds, prompts]
            watched[arm] = [last for _, last in runs]
            print(f"{arm}: {named(measured[arm].mean((1, 2)))}", flush=True)
        untrained, _ = fresh(setting, BASE | {"finetune_steps": 1}, 0, given, student=None)
        before_MU = judged(setting, untrained)
    first = given.arms[0]
    result = {
        "before": named(before_MU.mean(1)),
        "arms": {arm: named(values_MSU.mean((1, 2))) for arm, values_MSU in measured.items()},
        f"minus {first}": differences(measured, first),
        "last_step": watched,
        "steps": given.steps,
        "heldout_prompts": len(setting.heldout),
        "seconds": round(time.monotonic() - begin),
    }
    print(json.dumps(result))


def configured(options: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """The power by which channels are equalised, and the fields of distill's configuration."""
    return options.get(POWER, 0.0), {name: value for name, value in options.items() if name != POWER}


def fresh(
    setting: Setting, options: dict[str, Any], seed: int, given: argparse.Namespace, student: Any
) -> tuple[Trainer, int]:
    """A trainer at its first step, of a student that is there or of a new one, and its steps."""
    power, own = configured(options)
    config = DistillConfig(
        teacher=given.model, student_uri=given.model, seed=seed, max_sequence_tokens=setting.longest,
        rollout_new_tokens=given.answer_tokens, **own,
    )  # fmt: skip
    needs_policy = scheme_of(config).needs_policy
    if student is None:
        table = setting.table(power) if needs_policy else None
        student = make_student(config, setting.student(power), table)
    trainer = trainer_at_start(setting, config, distill.steps_of(config, has_policy=needs_policy), student)
    return trainer, trainer.total


def run(
    setting: Setting, trainings: list[dict[str, Any]], seed: int, given: argparse.Namespace
) -> tuple[np.ndarray, dict[str, float]]:
    """[measures, prompts] of the student after the arm's steps, and what was seen at the last one."""
    trainer = None
    for number, options in enumerate(trainings):
        steps = given.steps * (number + 1) // len(trainings) - given.steps * number // len(trainings)
        trainer, total = fresh(setting, BASE | options | {"max_steps": steps}, seed, given, trainer and trainer.student)
        for _ in range(total):
            trainer.advance()
    assert trainer is not None
    return judged(setting, trainer), trainer.history[-1].values


if __name__ == "__main__":
    main()
