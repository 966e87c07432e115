"""The trainer on the tiny model as distill's stage builds it, for tests of single steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tiny_chain import Chain

from reflux.components import models
from reflux.components.bundles import policy_table
from reflux.components.distill import stage
from reflux.components.distill.examples import Sequence, training_examples
from reflux.components.distill.objective import DistillationLoss
from reflux.components.distill.student import make_student, scheme_of
from reflux.components.distill.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Training:
    trainer: Trainer
    tokenizer: Any
    traces: list[Sequence]

    @property
    def rollouts(self) -> list[Sequence]:
        """Teacher answers without what was stored of them: to be scored by the live teacher, as rollouts are."""
        return [Sequence(token_ids=s.token_ids, first_scored=1) for s in self.traces]


def training(chain: Chain, **options: Any) -> Training:
    """What stage.run builds before its first step."""
    config = chain.training(**options)
    tokenizer = models.load_tokenizer(chain.model)
    policy = None
    if scheme_of(config).needs_policy:
        policy = policy_table.decode(chain.profile.file("policy_table.bin"))
    student = make_student(config, models.load_model(chain.model), policy)
    teacher, dtype = models.load_model(chain.model), models.compute_dtype(config.compute_dtype)
    loss = DistillationLoss(student, teacher, tokenizer, config, dtype)
    examples = training_examples(chain.traces, config.max_sequence_tokens)
    hard = {row["trace_id"] for row in chain.labels.table("hard_samples").to_pylist() if row["hard"]}
    phases = stage.schedule(config, has_policy=policy is not None)
    trainer = stage.make_trainer(config, phases, student, tokenizer, loss, examples, hard, chain.model)
    return Training(trainer=trainer, tokenizer=tokenizer, traces=list(examples.values()))
