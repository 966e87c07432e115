"""reflux' own Trainer, without quantisation, as one side of the comparison."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from side import Allocations, Spec, Stopwatch, answer, commands, read_spec
from transformers import AutoTokenizer

from reflux.components import models
from reflux.components.distill import stage
from reflux.components.distill.config import DistillConfig
from reflux.components.distill.examples import Sequence
from reflux.components.distill.objective import DistillationLoss
from reflux.components.distill.student import make_student
from reflux.components.distill.trainer import Trainer


def main() -> None:
    spec = read_spec()
    torch.set_num_threads(spec.threads)
    allocations, watch = Allocations(), Stopwatch()
    trainer = trainer_of(spec)
    make = trainer.rollouts.engine
    trainer.rollouts.engine = lambda requests, sampling: watch.rollouts(
        lambda: make(requests, sampling), lambda made: [len(one.response_token_ids) for one in made]
    )
    for command in commands():
        if command["do"] == "loss":
            answer({"loss_nats": loss_of(trainer, command["sequences"])})
        elif command["do"] == "memory":
            allocations.begin()
            trainer.advance()
            answer(allocations.end(trainer.student))
        else:
            watch.start()
            trainer.advance()
            answer(asdict(watch.stop()))


def trainer_of(spec: Spec) -> Trainer:
    """What stage.run builds before its first step."""
    config = DistillConfig(**{
        "teacher": spec.teacher, "student_uri": spec.student, "objective": "beta_jsd", "beta": spec.beta,
        "on_policy_fraction": 1.0, "weight_bits": 16, "activation_bits": 16, "activation": "plain",
        "warmup_steps": 0, "joint_steps": 0, "finetune_steps": 10_000, "finetune_student_lr": spec.learning_rate,
        "weight_decay": 0.0, "gradient_clip": 1.0, "ema_decay": 0.0, "export": "last",
        "batch_sequences": spec.batch, "rollout_batch": spec.batch, "rollout_new_tokens": spec.new_tokens,
        "max_sequence_tokens": max(map(len, spec.prompts)) + spec.new_tokens, "score_prompts": False,
        "validation_traces": 0, **spec.settings,
    })  # fmt: skip
    path = Path(spec.student)
    tokenizer = AutoTokenizer.from_pretrained(path, eos_token=spec.eos_token)
    student = make_student(config, models.load_model(path), policy=None)
    loss = DistillationLoss(student, models.load_model(Path(spec.teacher)), tokenizer, config)
    examples = {
        f"{number:04}": Sequence(token_ids=[*prompt, tokenizer.eos_token_id], first_scored=len(prompt))
        for number, prompt in enumerate(spec.prompts)
    }
    phases = stage.schedule(config, has_policy=False)
    trainer = stage.make_trainer(config, phases, student, tokenizer, loss, examples, set(), path)
    trainer.rollouts.prompts.left = list(reversed(examples))  # the first round in the order of the other side
    return trainer


@torch.no_grad()
def loss_of(trainer: Trainer, sequences: list[dict[str, Any]]) -> float:
    """Nats per completion token."""
    batch = [Sequence(token_ids=s["prompt"] + s["completion"], first_scored=len(s["prompt"])) for s in sequences]
    return float(trainer.loss(batch)) / sum(s.scored for s in batch)


if __name__ == "__main__":
    main()
