"""A program for several processes: one accumulated gradient and two steps of the trainer, with ddp and with fsdp2.

RANK=0 WORLD_SIZE=2 … python step_in_processes.py CHAIN_FOLDER OUT     the first process writes OUT/<mode>.pt
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import tiny_chain
import torch

from reflux.components import models, processes
from reflux.components.bundles import policy_table
from reflux.components.distill import parallel, stage
from reflux.components.distill.examples import Sequence, training_examples
from reflux.components.distill.objective import DistillationLoss
from reflux.components.distill.start import find_start
from reflux.components.distill.student import make_student, scheme_of
from reflux.components.distill.trainer import Trainer
from reflux.components.equalized import equalized

MODES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2": {"parallelism": "fsdp2"},
    "everything": {
        "parallelism": "fsdp2", "lora_rank": 2, "activation_checkpointing": "full", "packing": True,
    },
    "codes": {"parallelism": "fsdp2", "start_uri": "codes", "weight_zero_points": True},
}  # fmt: skip
"""How the work is shared -> the options that ask for it. A start lies in the chain's folder."""


def trainer_of(chain: tiny_chain.Chain, **options: Any) -> Trainer:
    """What stage.run builds before its first step."""
    config = chain.training(**options)
    tokenizer = models.load_tokenizer(chain.model)
    start = find_start(chain.folder / config.start_uri, scheme_of(config)) if config.start_uri else None
    policy = start.policy() if start else None
    if policy is None:
        policy = policy_table.decode(chain.profile.file("policy_table.bin"))
    student = make_student(config, equalized(models.load_model(chain.model), chain.profile), policy, start)
    loss = DistillationLoss(student, models.load_model(chain.model), tokenizer, config)
    if config.parallelism == "fsdp2" and processes.count() > 1:
        parallel.shard(student)
    examples = training_examples(chain.traces, config.max_sequence_tokens)
    phases = stage.schedule(config, has_policy=True)
    return stage.make_trainer(config, phases, student, tokenizer, loss, examples, set(), chain.model)


def gradient(trainer: Trainer) -> dict[str, Any]:
    """Loss and gradient of four traces and four texts that the live teacher scores, by the trainer's own reduction."""
    traces = [*trainer.traces.values()][:4]
    sequences = [*traces, *(Sequence(token_ids=s.token_ids, first_scored=1) for s in traces)]
    tokens = sum(s.scored for s in sequences)
    for p in trainer.trained().values():
        p.requires_grad_(True)
    loss_sum, _ = trainer._accumulate(processes.share(sequences), tokens)
    norm = parallel.clip_gradients(trainer.trained().values(), 1e9)
    grads = {name: whole(p.grad) for name, p in trainer.trained().items() if p.grad is not None}
    trainer.optimizer.zero_grad(set_to_none=True)
    return {"loss": loss_sum / tokens, "norm": norm, "grads": grads}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().clone() if hasattr(tensor, "full_tensor") else tensor.detach().clone()


def measured(chain: tiny_chain.Chain, **options: Any) -> dict[str, Any]:
    """Everything that must not depend on how many processes there are."""
    short = {"warmup_steps": 0, "joint_steps": 0, "finetune_steps": 4, "micro_batch_sequences": 2}
    trainer = trainer_of(chain, **short | options)
    found = gradient(trainer)
    for _ in range(2):
        trainer.advance()
    return found | {
        "history": [point.values for point in trainer.history],
        "weights": {name: whole(p) for name, p in trainer.trained().items()},
    }


if __name__ == "__main__":
    held, out = tiny_chain.load(Path(sys.argv[1])), Path(sys.argv[2])
    with processes.joined():
        for mode, options in MODES.items():
            result = measured(held, **options)
            if processes.is_first():
                torch.save(result, out / f"{mode}.pt")
