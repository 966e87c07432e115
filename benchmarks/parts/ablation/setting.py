"""What all arms of an ablation share: a teacher, its answers to our own prompts, and where every student begins."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reflux.components import models, sources
from reflux.components.algorithms.policies import PositionTable
from reflux.components.algorithms.schedules import Phase
from reflux.components.artifacts import Artifact
from reflux.components.bundles import policy_table
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.distill import stage as distill
from reflux.components.distill.config import DistillConfig
from reflux.components.distill.examples import Sequence, training_examples
from reflux.components.distill.objective import DistillationLoss
from reflux.components.distill.trainer import Trainer
from reflux.components.equalized import equalized
from reflux.components.profile_kv.config import ProfileKvConfig

from ..demo import in_turn
from ..stage_artifact import made


@dataclass(frozen=True, kw_only=True)
class Setting:
    teacher: Any
    tokenizer: Any
    path: Path
    """The student before training, as it came."""
    profiles: dict[float, Artifact]
    """Power by which its channels are equalised -> its profile."""
    examples: dict[str, Sequence]
    heldout: list[Sequence]
    """The teacher's answers to held-out prompts, scored from the first answer token on by the live teacher."""
    longest: int
    """Tokens of the longest prompt and answer."""

    def table(self, power: float = 0.0) -> PositionTable:
        """The position table that a student begins with."""
        return policy_table.decode(self.profiles[power].file("policy_table.bin"))

    def student(self, power: float = 0.0) -> Any:
        """In full precision, its channels equalised."""
        return equalized(models.load_model(self.path), self.profiles[power])


def prepared(folder: Path, given: argparse.Namespace, *, powers: tuple[float, ...] = (0.0,)) -> Setting:
    """By collect_traces and profile_kv, from `given.prompts` prompts and answers of at most `given.answer_tokens`."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in in_turn(given.prompts)))
    traces = made(folder, "collect_traces", CollectTracesConfig(
        teacher=given.model, prompts_uri=str(prompts), max_new_tokens=given.answer_tokens, temperature=1.0, top_p=1.0,
    ), output="traces")  # fmt: skip
    profiles = {
        power: made(folder, "profile_kv", ProfileKvConfig(
            student_uri=given.model, profiled_traces=16, cost_traces=0, equalization_power=power,
        ), output="profile", traces=traces)
        for power in powers
    }  # fmt: skip
    path = sources.fetch(given.model)
    rows = traces.table("traces", ["split", "prompt_token_ids", "response_token_ids"]).to_pylist()
    longest = max(len(row["prompt_token_ids"]) for row in rows) + given.answer_tokens
    return Setting(
        teacher=models.load_model(path),
        tokenizer=models.load_tokenizer(path),
        path=path,
        profiles=profiles,
        examples=training_examples(traces, longest),
        longest=longest,
        heldout=[
            Sequence(token_ids=row["prompt_token_ids"] + row["response_token_ids"],
                     first_scored=len(row["prompt_token_ids"]))
            for row in rows if row["split"] != "train"
        ],
    )  # fmt: skip


def trainer_at_start(setting: Setting, config: DistillConfig, phases: list[Phase], student: Any) -> Trainer:
    """What distill trains with, at its first step, with the live teacher of the setting."""
    dtype = models.compute_dtype(config.compute_dtype)
    loss = DistillationLoss(student, setting.teacher, setting.tokenizer, config, dtype)
    return distill.make_trainer(config, phases, student, setting.tokenizer, loss, setting.examples, set(), setting.path)
