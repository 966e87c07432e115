"""Exceptions: which names they fit, which one counts, and what is refused."""

from __future__ import annotations

import pytest

from reflux.components.algorithms.layer_bits import TERNARY, bits_of, concern_sites, parsed, require_used

NAMES = ["layers.0.self_attn.q_proj", "layers.0.mlp.down_proj", "layers.0.down_in", "layers.10.down_in"]


@pytest.mark.parametrize(
    ("exceptions", "expected"),
    [
        ([], [4, 4, 4, 4]),
        (["down_in=8"], [4, 4, 8, 8]),
        (["down_proj=8"], [4, 8, 4, 4]),
        (["mlp.down_proj=8"], [4, 8, 4, 4]),
        (["down_*=8"], [4, 8, 8, 8]),
        (["layers.0.*=16"], [16, 16, 16, 4]),
        (["layers.1?.*=3"], [4, 4, 4, 3]),
        (["down_in=8", "layers.10.down_in=2"], [4, 4, 8, 2]),
        (["layers.10.down_in=2", "down_in=8"], [4, 4, 8, 8]),
        (["q_proj=2", "q_proj=3"], [3, 4, 4, 4]),
        (["layers.*[02468].*_proj=ternary"], [TERNARY, TERNARY, 4, 4]),
    ],
)
def test_the_last_exception_that_fits_counts(exceptions: list[str], expected: list[int]) -> None:
    assert [bits_of(name, 4, exceptions) for name in NAMES] == expected


@pytest.mark.parametrize("exception", ["down_in", "=8", "down_in=", "down_in=x", "down_in=8.0", "down_in=-8"])
def test_another_form_is_refused(exception: str) -> None:
    with pytest.raises(ValueError, match=f"exceptions '{exception}': must be PATTERN=BITS"):
        parsed(exception)


@pytest.mark.parametrize("bits", [0, 1, 9, 15, 17])
def test_bits_that_there_are_not_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match=f"exceptions 'down_in={bits}': allowed are 2 to 8, ternary, or 16"):
        parsed(f"down_in={bits}")


@pytest.mark.parametrize("pattern", ["down_in", "layers.0.*", "*"])
def test_activations_are_not_ternary(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"ternary is for weights, and .* names activations too"):
        parsed(f"{pattern}=ternary")


def test_an_exception_that_fits_nothing_is_named() -> None:
    require_used(["down_in=8", "q_proj=2"], NAMES)
    with pytest.raises(ValueError, match=r"exceptions 'down=8': fits no layer of the model; it has layers\.0\.self"):
        require_used(["down_in=8", "down=8"], NAMES)


def test_whether_activations_are_concerned_is_known_without_a_model() -> None:
    assert concern_sites(["down_in=8", "layers.3.attn_in=6", "layers.0.*=7", "*_in=5"]) == [8, 6, 7, 5]
    assert concern_sites(["down_proj=8", "layers.0.mlp.*_proj=6", "mlp.*=5", "layers.*.self_attn.*=ternary"]) == []
