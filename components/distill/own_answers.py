"""The student's answers to requests, with what an objective has to know of how they were drawn.

Most objectives need the tokens alone. `sampled_reverse_kl` needs the log-probability of each draw, which one more
forward gives, by the same code that trains: an engine's own numbers differ by its rounding. `sharpening` needs
particles: several answers to each prompt, made block by block and weighed by the teacher (algorithms/sharpening.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from reflux.components.algorithms.draws import Sampling, derive_seed
from reflux.components.algorithms.loops import ends_in_loop
from reflux.components.algorithms.low_bit import frozen_weights
from reflux.components.algorithms.rollouts import Engine, Request, Rollout
from reflux.components.algorithms.sharpening import Block, Particles, absorbed_exponent, power_particles

from .config import DistillConfig
from .examples import Sequence
from .scorer import Scorer


@dataclass(frozen=True, kw_only=True)
class Own:
    """One answer after its prompt."""

    token_ids: list[int]
    prompt_tokens: int
    drawn_nats: list[float] | None = None
    """Of each token after the prompt, under the distribution it was drawn from."""
    weight: float = 1.0
    """Importance weight among the answers to its prompt, 1 on average."""
    advantage: float = 0.0
    """Among the answers to its prompt, where a verifier judged them."""


Answer = Callable[[Engine, list[Request]], tuple[list[Own], dict[str, float]]]
"""Answers, one or several to each request, drawn by an engine, and what is worth knowing of them together."""


def answering(config: DistillConfig, student: Scorer, teacher: Scorer) -> Answer:
    """Answers with what the configuration's objectives need, which the two models score."""
    exact_student, exact_teacher = (replace(model, compute_dtype=torch.float32) for model in (student, teacher))
    if config.minimises("sharpening"):
        return _particles(config, exact_student, exact_teacher)
    return drawn(config, exact_student)


def drawn(config: DistillConfig, student: Scorer) -> Answer:
    """One answer to each request, with the log-probabilities of its draws where an objective weighs by them."""
    sampling = Sampling(
        temperature=config.rollout_temperature, top_p=config.rollout_top_p, max_new_tokens=config.rollout_new_tokens
    )

    def answer(engine: Engine, requests: list[Request]) -> tuple[list[Own], dict[str, float]]:
        answers = engine(requests, sampling)
        own = [Own(token_ids=_whole(a), prompt_tokens=len(a.prompt_token_ids)) for a in answers]
        if config.needs_draws:
            with frozen_weights(student.model):
                (nats,) = student.sequence_nats(
                    [_sequence(a) for a in answers],
                    at_once=config.micro_batch_sequences,
                    temperatures=(sampling.temperature,),
                    top_p=sampling.top_p,
                )
            own = [replace(o, drawn_nats=nats_T.tolist()) for o, nats_T in zip(own, nats, strict=True)]
        return own, rollout_health(answers)

    return answer


def _particles(config: DistillConfig, student: Scorer, teacher: Scorer) -> Answer:
    count, temperature = config.sharpen_particles, config.sharpen_temperature or 1 / config.sharpen_alpha

    def answer(engine: Engine, requests: list[Request]) -> tuple[list[Own], dict[str, float]]:
        def extend(answers: list[list[int]], rows: list[int]) -> Block:
            made = len(answers[rows[0]])  # the same in every row that goes on
            asked = [
                Request(
                    prompt_token_ids=requests[row // count].prompt_token_ids + answers[row],
                    seed=derive_seed(requests[row // count].seed, "particle", row % count, made),
                )
                for row in rows
            ]
            length = min(config.sharpen_block_tokens, config.rollout_new_tokens - made)
            new = engine(asked, Sampling(temperature=temperature, top_p=1.0, max_new_tokens=length))
            blocks, at_once = [_sequence(a) for a in new], config.micro_batch_sequences
            with frozen_weights(student.model):
                proposal, own = student.sequence_nats(blocks, at_once=at_once, temperatures=(temperature, 1.0))
            (taught,) = teacher.sequence_nats(blocks, at_once=at_once)
            proposal_R, teacher_R, student_R = (
                torch.stack([nats_T.double().sum() for nats_T in nats]) for nats in (proposal, taught, own)
            )
            return Block(
                token_ids=[a.response_token_ids for a in new],
                ended=[a.stop_reason == "eos" for a in new],
                proposal_nats_R=proposal_R,
                teacher_nats_R=teacher_R,
                student_nats_R=student_R,
            )

        held = power_particles(
            extend,
            [request.seed for request in requests],
            particles=count,
            alpha=config.sharpen_alpha,
            blocks=-(-config.rollout_new_tokens // config.sharpen_block_tokens),
        )
        prompts = [request.prompt_token_ids for request in requests for _ in range(count)]
        weights = (count * held.weights_GN).flatten().tolist()
        own = [
            Own(token_ids=prompt + response, prompt_tokens=len(prompt), weight=weight)
            for prompt, response, weight in zip(prompts, held.answers, weights, strict=True)
        ]
        whole = [
            Rollout(prompt_token_ids=prompt, response_token_ids=response, stop_reason="eos" if ended else "length")
            for prompt, response, ended in zip(prompts, held.answers, held.ended, strict=True)
        ]
        return own, rollout_health(whole) | sharpening_health(held)

    return answer


def rollout_health(answers: list[Rollout]) -> dict[str, float]:
    """Mean length, share without EOS (budget exhaustion) and share that ends in a loop (objectives.md, rule 12)."""
    count = len(answers)
    return {
        "rollout_tokens": sum(len(a.response_token_ids) for a in answers) / count,
        "rollout_budget_exhausted": sum(a.stop_reason == "length" for a in answers) / count,
        "rollout_loop_rate": sum(ends_in_loop(a.response_token_ids) for a in answers) / count,
    }


def sharpening_health(held: Particles) -> dict[str, float]:
    """The absorbed exponent (1 before training, sharpen_alpha at the end of it; left out where it is not defined), the
    effective number of particles, and how often a prompt's particles were drawn again.
    """
    prompts, particles = held.weights_GN.shape
    even_GN = torch.full_like(held.weights_GN, 1 / particles)
    exponent = absorbed_exponent(held.student_nats_GN, held.teacher_nats_GN, even_GN)
    health = {
        "sharpen_effective_particles": held.effective_G.mean().item(),
        "sharpen_resampled": held.resampled / prompts,
        "sharpen_log_normalizer_nats": held.log_normalizer_G.mean().item(),
    }
    return health | ({"sharpen_absorbed_exponent": exponent} if math.isfinite(exponent) else {})


def _whole(answer: Rollout) -> list[int]:
    return answer.prompt_token_ids + answer.response_token_ids


def _sequence(answer: Rollout) -> Sequence:
    return Sequence(token_ids=_whole(answer), first_scored=len(answer.prompt_token_ids))
