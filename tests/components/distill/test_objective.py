"""The loss of a micro-batch against one written out in numpy from the models' own logits, for every objective and every
kind of sequence, and the rules that hold whatever the objective is.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteConfig, LlamaConfig

from reflux.components import models
from reflux.components.algorithms.chunked_loss import chunked_loss
from reflux.components.algorithms.losses import beta_jsd
from reflux.components.distill.config import DistillConfig
from reflux.components.distill.examples import Sequence
from reflux.components.distill.objective import DistillationLoss
from reflux.components.distill.observed import OBSERVED_TOKENS, Observed, against_whole, observed_rows
from reflux.components.distill.stored import StoredBuckets, StoredDraws

ROLLOUTS = ("beta_jsd", "forward_kl", "reverse_kl", "skew_forward_kl", "skew_reverse_kl", "cross_entropy")
FAMILIES = {"plain": (LlamaConfig, {}), "soft cap": (Gemma2Config, {"head_dim": 8, "final_logit_softcapping": 3.0}),
            "divided": (GraniteConfig, {"logits_scaling": 4.0})}  # fmt: skip


UNROUNDED = {"weight_bits": 16, "activation_bits": 16, "activation": "plain"}


@dataclass(frozen=True, kw_only=True)
class Pair:
    student: Any
    teacher: Any
    tokenizer: Any

    def loss(self, **options: Any) -> DistillationLoss:
        config = DistillConfig(**(UNROUNDED | {"score_prompts": False} | options))
        return DistillationLoss(self.student, self.teacher, self.tokenizer, config)


def pair(folder: Path, family: str = "plain") -> Pair:
    """One layer each, over one tokenizer, with different numbers of padded rows in the embedding."""
    tokenizer = models.load_tokenizer(folder)
    torch.manual_seed(0)
    made = []
    for padding in (3, 11):
        of_family, options = FAMILIES[family]
        config = of_family(
            vocab_size=len(tokenizer) + padding, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            initializer_range=0.7, **options,
        )  # fmt: skip
        made.append(AutoModelForCausalLM.from_config(config).eval().requires_grad_(False))
    return Pair(student=made[0], teacher=made[1], tokenizer=tokenizer)


@pytest.fixture(scope="module")
def both(tiny_model: Path) -> Pair:
    return pair(tiny_model)


def sequences(lengths: tuple[tuple[int, int], ...] = ((9, 4), (5, 2), (12, 3))) -> list[Sequence]:
    """Of so many tokens, of which those from the second number on are scored."""
    generator = torch.Generator().manual_seed(1)
    return [
        Sequence(token_ids=torch.randint(3, 200, (length,), generator=generator).tolist(), first_scored=first)
        for length, first in lengths
    ]


@torch.no_grad()
def logprobs(model: Any, sequence: Sequence, vocab_size: int) -> np.ndarray:
    """[scored, V] in float64, from the model's own forward over one sequence."""
    ids = torch.tensor([sequence.token_ids])
    position_BT = torch.arange(ids.shape[1])[None]
    logits = model(input_ids=ids, position_ids=position_BT).logits[0].double().numpy()
    logits = logits[sequence.first_scored - 1 : -1, :vocab_size]
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def golden(name: str, student: np.ndarray, teacher: np.ndarray, parameter: float) -> np.ndarray:
    """Nats of each row, from probabilities in float64."""
    s, t = np.exp(student), np.exp(teacher)

    def kl(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return (left * (np.log(left, where=left > 0, out=np.zeros_like(left)) - np.log(right))).sum(-1)

    mixture = parameter * t + (1 - parameter) * s
    return {
        "beta_jsd": lambda: parameter * kl(t, mixture) + (1 - parameter) * kl(s, mixture),
        "forward_kl": lambda: kl(t, s),
        "reverse_kl": lambda: kl(s, t),
        "skew_forward_kl": lambda: kl(t, mixture),
        "skew_reverse_kl": lambda: kl(s, parameter * s + (1 - parameter) * t),
        "cross_entropy": lambda: -(t * student).sum(-1),
    }[name]()


def value(loss: DistillationLoss, given: list[Sequence]) -> float:
    with torch.no_grad():
        return loss(given).item()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ROLLOUTS)
def test_rollouts_equal_numpy_in_float64_whatever_stands_behind_the_head(
    tiny_model: Path, family: str, name: str
) -> None:
    held, given = pair(tiny_model, family), sequences()
    size = len(held.tokenizer)
    expected = sum(
        golden(name, logprobs(held.student, s, size), logprobs(held.teacher, s, size), 0.3).sum() for s in given
    )
    assert value(held.loss(objective=name, beta=0.3, skew=0.3), given) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("k", [1, 16, 0])
@pytest.mark.parametrize("name", [*ROLLOUTS, "next_token"])
def test_a_stored_top_k_equals_numpy_over_its_buckets(both: Pair, name: str, k: int) -> None:
    """k = 0 stands for all of V, which equals the live teacher."""
    size = len(both.tokenizer)
    given, expected = [], 0.0
    for plain in sequences():
        teacher, student = (logprobs(m, plain, size) for m in (both.teacher, both.student))
        kept = np.argsort(-teacher, axis=-1)[:, : k or size]
        buckets = [np.concatenate([np.take_along_axis(p, kept, -1), _tail(p, kept)], -1) for p in (student, teacher)]
        given.append(
            replace(
                plain,
                teacher=StoredBuckets(
                    token_ids_TK=torch.from_numpy(kept.copy()), logprobs_TB=torch.from_numpy(buckets[1]).float()
                ),
            )
        )
        if name == "next_token":
            written = np.array(plain.token_ids[plain.first_scored :])[:, None]
            expected -= np.take_along_axis(student, written, -1).sum()
        else:
            used = buckets if k else (student, teacher)
            expected += golden(name, *used, 0.3).sum()
    loss = both.loss(objective=name, beta=0.3, skew=0.3, on_policy_fraction=0.0)
    assert value(loss, given) == pytest.approx(expected, rel=1e-4)


def _tail(logprobs_TV: np.ndarray, kept_TK: np.ndarray) -> np.ndarray:
    """[T, 1] log of the mass outside the kept tokens, -inf where there is none."""
    rest = np.exp(logprobs_TV)
    np.put_along_axis(rest, kept_TK, 0.0, -1)
    mass = rest.sum(-1, keepdims=True)
    return np.log(mass, where=mass > 0, out=np.full_like(mass, -np.inf))


@pytest.mark.parametrize("name", ["forward_kl", "cross_entropy", "beta_jsd", "skew_forward_kl"])
def test_counted_draws_of_the_whole_vocabulary_equal_the_teacher(both: Pair, name: str) -> None:
    size = len(both.tokenizer)
    given, expected = [], 0.0
    for plain in sequences():
        teacher, student = (logprobs(m, plain, size) for m in (both.teacher, both.student))
        stored = StoredDraws(
            token_ids_TU=torch.arange(size).expand(len(teacher), -1),
            weights_TU=torch.from_numpy(np.exp(teacher)).float(),
            entropy_nats_T=torch.from_numpy(-(np.exp(teacher) * teacher).sum(-1)).float(),
        )
        given.append(replace(plain, teacher=stored))
        expected += golden("cross_entropy" if name == "cross_entropy" else "forward_kl", student, teacher, 0.0).sum()
    assert value(both.loss(objective=name, beta=0.0, skew=0.0), given) == pytest.approx(expected, rel=1e-4)


def test_a_weighted_sum_is_the_sum_of_its_terms_and_each_kind_has_its_own(both: Pair) -> None:
    rollouts = sequences()
    single = {name: value(both.loss(objective=name), rollouts) for name in ("reverse_kl", "cross_entropy")}
    mixed = both.loss(objective=" 0.25*reverse_kl + 2e-1 * cross_entropy ", trace_objective="next_token")
    assert value(mixed, rollouts) == pytest.approx(
        0.25 * single["reverse_kl"] + 0.2 * single["cross_entropy"], rel=1e-5
    )
    ids_TK = torch.arange(5).expand(rollouts[0].scored, -1)
    stored = StoredBuckets(token_ids_TK=ids_TK, logprobs_TB=torch.full((rollouts[0].scored, 6), 1 / 6).log())
    trace = replace(rollouts[0], teacher=stored)
    written = value(both.loss(objective="next_token", on_policy_fraction=0.0), [trace])
    assert value(mixed, [trace, *rollouts[1:]]) == pytest.approx(written + value(mixed, rollouts[1:]), rel=1e-5)


@pytest.mark.parametrize("discount", [0.0, 0.6])
def test_sampled_reverse_kl_has_the_gradient_of_the_advantage_form(both: Pair, discount: float) -> None:
    """−A_t ∇log pi_S(y_t), summed: its derivative along the norm before the head, by finite differences in float64."""
    size, given = len(both.tokenizer), []
    loss = both.loss(objective="sampled_reverse_kl", trace_objective="forward_kl", discount=discount)
    coefficients = []
    for plain in sequences():
        written = np.array(plain.token_ids[plain.first_scored :])[:, None]
        student, teacher = (
            np.take_along_axis(logprobs(m, plain, size), written, -1)[:, 0] for m in (both.student, both.teacher)
        )
        given.append(replace(plain, drawn_nats=student.tolist()))
        advantage = teacher - student
        steps = range(len(advantage))
        coefficients.append([-sum(discount ** (s - t) * advantage[s] for s in steps if s >= t) for t in steps])
    norm = both.student.model.norm.weight.requires_grad_()
    try:
        (gradient_D,) = torch.autograd.grad(loss(given), norm)
        if not discount:
            assert value(loss, given) == pytest.approx(sum(map(sum, coefficients)), rel=1e-4)
    finally:
        norm.requires_grad_(False)
    direction_D = torch.randn(len(norm), generator=torch.Generator().manual_seed(2))
    before, values = norm.clone(), []
    for sign in (1, -1):
        norm.copy_(before + sign * 1e-3 * direction_D)
        total = 0.0
        for plain, weights in zip(given, coefficients, strict=True):
            written = np.array(plain.token_ids[plain.first_scored :])[:, None]
            total += (np.take_along_axis(logprobs(both.student, plain, size), written, -1)[:, 0] * weights).sum()
        values.append(total)
    norm.copy_(before)
    assert torch.dot(gradient_D, direction_D).item() == pytest.approx((values[0] - values[1]) / 2e-3, rel=2e-3)


def test_nothing_to_score_is_a_loss_of_zero_that_is_counted(both: Pair) -> None:
    too_long = Sequence(token_ids=[5, 6, 7], first_scored=7, cut_tokens=9)
    observed = Observed()
    hidden = both.student.model.norm.weight.requires_grad_()
    loss = both.loss()([too_long, replace(too_long, first_scored=3)], observed)
    (gradient_D,) = torch.autograd.grad(loss, hidden)
    hidden.requires_grad_(False)
    assert loss.item() == 0
    assert not gradient_D.any()
    assert observed.means() == {"truncation_rate": 1.0, "unscored_rate": 1.0}
    with_others = value(both.loss(), [too_long, *sequences()])
    assert with_others == pytest.approx(value(both.loss(), sequences()), rel=1e-5)


def test_one_token_at_a_time_is_the_same_as_together(both: Pair) -> None:
    given = [sequences(((9, 4),))[0]]
    ones = [replace(given[0], token_ids=given[0].token_ids[: t + 1], first_scored=t) for t in range(4, 9)]
    loss = both.loss(objective="0.5*beta_jsd + reverse_kl", beta=0.4)
    assert value(loss, ones) == pytest.approx(value(loss, given), rel=1e-5)
    assert value(loss, [*ones[:2]]) + value(loss, ones[2:]) == pytest.approx(value(loss, given), rel=1e-5)


def test_metrics_are_those_of_the_whole_distributions(both: Pair) -> None:
    given, size, observed = sequences(), len(both.tokenizer), Observed()
    with torch.no_grad():
        both.loss()(given, observed)
    student, teacher = (np.concatenate([logprobs(m, s, size) for s in given]) for m in (both.student, both.teacher))
    top = [{*np.argsort(-row)[:16].tolist()} for row in student], [{*np.argsort(-row)[:16].tolist()} for row in teacher]
    rows = range(len(student))
    expected = {
        "kl_forward_nats": golden("forward_kl", student, teacher, 0).mean(),
        "kl_reverse_nats": golden("reverse_kl", student, teacher, 0).mean(),
        "student_entropy_nats": -(np.exp(student) * student).sum(-1).mean(),
        "teacher_entropy_nats": -(np.exp(teacher) * teacher).sum(-1).mean(),
        "top_overlap": np.mean([len(top[0][n] & top[1][n]) / 16 for n in rows]),
        "student_mass_on_teacher_top": np.mean([np.exp(student[n, list(top[1][n])]).sum() for n in rows]),
        "teacher_mass_on_student_top": np.mean([np.exp(teacher[n, list(top[0][n])]).sum() for n in rows]),
        "truncation_rate": 0.0,
        "unscored_rate": 0.0,
    }
    assert of_distributions(observed) == pytest.approx(expected, rel=1e-4)


def of_distributions(observed: Observed) -> dict[str, float]:
    """Without what is seen of layers, which only a live teacher has."""
    return {n: v for n, v in observed.means().items() if not n.startswith(("error_", "activation_"))}


def test_metrics_of_a_stored_top_k_are_bounds_that_meet_at_the_whole_vocabulary(both: Pair) -> None:
    plain, size = sequences()[0], len(both.tokenizer)
    teacher, live = logprobs(both.teacher, plain, size), Observed()
    with torch.no_grad():
        both.loss()([plain], live)
    seen = {}
    for k in (20, size):
        kept = np.argsort(-teacher, axis=-1)[:, :k].copy()
        buckets = np.concatenate([np.take_along_axis(teacher, kept, -1), _tail(teacher, kept)], -1)
        stored = StoredBuckets(token_ids_TK=torch.from_numpy(kept), logprobs_TB=torch.from_numpy(buckets).float())
        observed = Observed()
        with torch.no_grad():
            both.loss()([replace(plain, teacher=stored)], observed)
        seen[k] = {n.removeprefix("trace_"): v for n, v in observed.means().items()}
    assert seen[size] == pytest.approx(of_distributions(live), rel=1e-4)
    bounded = ("kl_forward_nats", "kl_reverse_nats", "teacher_entropy_nats", "teacher_mass_on_student_top")
    assert all(seen[20][name] < seen[size][name] for name in bounded)
    exact = seen[20].keys() - set(bounded)
    assert {n: seen[20][n] for n in exact} == pytest.approx({n: seen[size][n] for n in exact}, rel=1e-4)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 300, 1000])
def test_observed_tokens_are_spread_over_all_chunks(tokens: int) -> None:
    seen = []
    for start in range(0, tokens, 64):
        chunk = list(range(start, min(start + 64, tokens)))
        seen += chunk[observed_rows(slice(start, start + len(chunk)), tokens)]
    assert seen == list(range(0, tokens, math.ceil(tokens / OBSERVED_TOKENS)))
    assert len(seen) <= OBSERVED_TOKENS


def test_a_micro_batch_weighs_by_its_tokens_however_few_are_looked_at() -> None:
    observed = Observed()
    for tokens, value in ((30, 1.0), (640, 2.0)):
        for start in range(0, tokens, 64):
            rows = slice(start, min(start + 64, tokens))
            seen = observed_rows(rows, tokens)
            observed.add({"value": torch.full((rows.stop - rows.start,), value)[seen]}, seen.step)
    assert observed.means() == {"value": pytest.approx((30 * 1.0 + 640 * 2.0) / 670)}


def test_the_loss_tells_how_many_tokens_each_observed_one_stands_for(both: Pair) -> None:
    """Live and stored teachers, in a short micro-batch and in one that is too long to be looked at whole."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, len(both.tokenizer), (400,), generator=generator).tolist()
    for kind in ("rollout", "topk", "sampled"):
        made = []
        for tokens in (20, 400):
            scored, teacher = tokens - 1, None
            if kind == "topk":
                kept_TK = torch.arange(2).repeat(scored, 1)
                teacher = StoredBuckets(token_ids_TK=kept_TK, logprobs_TB=torch.full((scored, 3), 1 / 3).log())
            if kind == "sampled":
                drawn = {"token_ids_TU": torch.zeros(scored, 1, dtype=torch.long), "weights_TU": torch.ones(scored, 1)}
                teacher = StoredDraws(**drawn, entropy_nats_T=torch.zeros(scored))
            made.append(Sequence(token_ids=ids[:tokens], first_scored=1, teacher=teacher))
        loss = both.loss(objective="forward_kl", max_sequence_tokens=400)
        apart, together = [Observed(), Observed()], Observed()
        with torch.no_grad():
            for sequence, alone in zip(made, apart, strict=True):
                loss([sequence], alone)
                loss([sequence], together)
        (name,) = {"kl_forward_nats", "trace_kl_forward_nats"} & together.means().keys()
        short, long = (each.means()[name] for each in apart)
        assert short != pytest.approx(long, rel=0.01)
        assert together.counts[name] == pytest.approx(19 + 399, rel=0.02)
        assert together.means()[name] == pytest.approx((19 * short + 399 * long) / (19 + 399), rel=0.02)


@pytest.mark.heavy
def test_watching_adds_little_to_head_and_loss(capsys: pytest.CaptureFixture[str]) -> None:
    """At SmolLM2's width and vocabulary, in CPU seconds; medians of rounds in turn."""
    size, width, tokens = 49_152, 576, 416
    generator = torch.Generator().manual_seed(0)
    weight_VD = 0.1 * torch.randn(size, width, generator=generator)
    student_ND, teacher_ND = (torch.randn(tokens, width, generator=generator) for _ in range(2))
    student_ND.requires_grad_()

    def seconds(observed: Observed | None) -> float:
        def token_loss(logits_CV: torch.Tensor, rows: slice) -> torch.Tensor:
            student_CV = logits_CV.log_softmax(-1)
            with torch.no_grad():
                teacher_CV = (teacher_ND[rows] @ weight_VD.T).log_softmax(-1)
                if observed is not None:
                    seen = observed_rows(rows, tokens)
                    observed.add(against_whole(student_CV[seen], teacher_CV[seen]))
            return beta_jsd(student_CV, teacher_CV, 0.0)

        begin = time.process_time()
        chunked_loss(student_ND, lambda hidden_CD: hidden_CD @ weight_VD.T, token_loss).backward()
        return time.process_time() - begin

    rounds = [(seconds(None), seconds(Observed())) for _ in range(10)][1:]
    alone, watched = (statistics.median(times) for times in zip(*rounds, strict=True))
    with capsys.disabled():
        print(f"{tokens} tokens: {alone:.3f} s, watched {watched:.3f} s, {100 * (watched / alone - 1):.1f} % more")
    assert watched < 1.15 * alone
