"""Errors by layer and token, and the loss at the worst of them, against numpy in float64."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from reflux.components.algorithms.layer_errors import activation_kl, bridge, squared_errors, watching_layers
from reflux.components.algorithms.low_bit import decoder_layers
from reflux.components.algorithms.recomputation import recompute_layers
from reflux.components.models import load_model

LAYERS, WIDTH = 3, 8


def outputs(tokens: int, seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of the student, and of the teacher: errors grow with the layer and differ from token to token."""
    generator = torch.Generator().manual_seed(seed)
    teacher = [4 * torch.randn(tokens, WIDTH, generator=generator) for _ in range(LAYERS)]
    student = []
    for layer, teacher_ND in enumerate(teacher):
        size_N1 = (layer + 1) * torch.rand(tokens, 1, generator=generator)
        student.append(teacher_ND + size_N1 * torch.randn(tokens, WIDTH, generator=generator))
    return student, teacher


def literal(student: list[torch.Tensor], teacher: list[torch.Tensor]) -> np.ndarray:
    s, t = (np.stack([h.double().numpy() for h in layers]) for layers in (student, teacher))
    return ((s - t) ** 2).sum(-1) / (t**2).sum(-1)


def test_errors_equal_numpy() -> None:
    student, teacher = outputs(7)
    np.testing.assert_allclose(squared_errors(student, teacher).numpy(), literal(student, teacher), rtol=1e-5)
    assert not squared_errors(teacher, teacher).any()
    nothing = [torch.zeros(2, WIDTH)] * LAYERS
    assert not squared_errors(nothing, nothing).any()


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.5, 1.0])
def test_the_worst_places_of_each_sequence_equal_numpy(fraction: float) -> None:
    lengths = (5, 1, 9)
    student, teacher = outputs(sum(lengths))
    error, expected, start = literal(student, teacher), 0.0, 0
    for length in lengths:
        flat = np.sort(error[:, start : start + length].ravel())[::-1]
        expected += length * flat[: max(1, math.ceil(fraction * len(flat)))].mean()
        start += length
    found_N = bridge(squared_errors(student, teacher), lengths, fraction)
    assert found_N.shape == (sum(lengths),)
    assert found_N.sum().item() == pytest.approx(expected, rel=1e-5)
    if fraction == 1:
        np.testing.assert_allclose(found_N.numpy(), error.mean(0), rtol=1e-5)


def test_the_gradient_is_that_of_the_chosen_places_alone() -> None:
    student, teacher = outputs(6)
    student = [h.requires_grad_() for h in student]
    bridge(squared_errors(student, teacher), [6], 0.2).sum().backward()
    error = literal([h.detach() for h in student], teacher)
    places = math.ceil(0.2 * error.size)
    chosen = error >= np.sort(error.ravel())[-places]
    for layer in range(LAYERS):
        s, t = student[layer].detach().double().numpy(), teacher[layer].double().numpy()
        expected = 2 * (s - t) / (t**2).sum(-1, keepdims=True) * chosen[layer][:, None] * 6 / places
        grad = student[layer].grad
        assert grad is not None
        np.testing.assert_allclose(grad.numpy(), expected, rtol=1e-4, atol=1e-7)


def test_it_does_not_depend_on_how_sequences_are_dealt() -> None:
    lengths = (4, 7, 2)
    student, teacher = outputs(sum(lengths))
    error_LN = squared_errors(student, teacher)
    alone = [bridge(part_LT, [part_LT.shape[1]], 0.2) for part_LT in error_LN.split(lengths, dim=1)]
    torch.testing.assert_close(bridge(error_LN, lengths, 0.2), torch.cat(alone))
    assert len(bridge(error_LN[:, :0], [0, 0], 0.2)) == len(bridge(error_LN[:, :0], [], 0.2)) == 0


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1, float("nan")])
def test_no_share_of_the_places_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"bridge_fraction .*: must be in \(0, 1\]"):
        bridge(torch.ones(2, 3), [3], fraction)


def test_the_kl_of_normalised_outputs_equals_numpy() -> None:
    student, teacher = outputs(5)

    def channels(hidden: torch.Tensor) -> np.ndarray:
        h = hidden.double().numpy()
        p = np.exp(h / np.sqrt((h**2).mean(-1, keepdims=True)))
        return p / p.sum(-1, keepdims=True)

    parts = []
    for s, t in zip(student, teacher, strict=True):
        p, q = channels(t), channels(s)
        parts.append((p * np.log(p / q)).sum(-1))
    np.testing.assert_allclose(activation_kl(student, teacher).numpy(), np.mean(parts, 0), rtol=1e-4)
    assert activation_kl(teacher, teacher).abs().max() < 1e-6
    scaled = [3 * h for h in teacher]  # what the norm takes away is no difference
    assert activation_kl(scaled, teacher).abs().max() < 1e-5


@pytest.mark.parametrize("recomputed", [False, True])
def test_every_layer_is_seen_once_as_the_model_itself_says(tiny_model: Path, recomputed: bool) -> None:
    model = load_model(tiny_model)
    if recomputed:
        recompute_layers(model, "full")
    ids_BT = torch.randint(3, 200, (2, 6), generator=torch.Generator().manual_seed(0))
    seen: list[torch.Tensor] = []
    with watching_layers(model, seen.append):
        said = model(ids_BT, output_hidden_states=True).hidden_states
    assert len(seen) == len(decoder_layers(model))
    torch.testing.assert_close(seen[0], said[1])  # what follows the embedding; the last one is after the final norm
    torch.testing.assert_close(model.model.norm(seen[-1]), said[-1])
    model(ids_BT)
    assert len(seen) == len(decoder_layers(model))
