"""Which layer has which bits: a default, and exceptions as data.

An exception is `PATTERN=BITS`. It names activation sites ('down_in', 'layers.3.mlp_in'), linear layers ('down_proj',
'layers.0.self_attn.q_proj') or both ('layers.0.*'), with the wildcards of file names; where several fit, the last one
counts. down_proj and its input at 8 bits in a 4-bit model are `down_proj=8` and `down_in=8`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache

FULL_PRECISION = 16
"""`bits` from here on mean: not quantised."""

TERNARY = 1
"""`bits` of weights that are minus one, zero or one scale; in an exception, the word ternary."""
TERNARY_STORED_BITS = 2

MOST_LAYERS = 512
"""No model has more."""

SITES = {"attn_in": "self_attn", "o_in": "self_attn.o_proj", "mlp_in": "mlp", "down_in": "mlp.down_proj"}
"""Where activations are rounded: the name of the site and the module whose input it is."""


def parsed(exception: str) -> tuple[str, int]:
    """(pattern, bits). ValueError if it is not of the form PATTERN=BITS, or the bits are not allowed."""
    pattern, separator, bits = exception.rpartition("=")
    if pattern and bits == "ternary":
        if _names_site(pattern):
            raise ValueError(f"exceptions {exception!r}: ternary is for weights, and {pattern!r} names activations too")
        return pattern, TERNARY
    if not separator or not pattern or not bits.isdecimal():
        raise ValueError(f"exceptions {exception!r}: must be PATTERN=BITS, like down_proj=8")
    if int(bits) not in (*range(2, 9), FULL_PRECISION):
        raise ValueError(
            f"exceptions {exception!r}: allowed are 2 to 8, ternary, or {FULL_PRECISION} for not quantised"
        )
    return pattern, int(bits)


def bits_of(name: str, default: int, exceptions: Sequence[str]) -> int:
    """Bits of the site or linear layer `name`, as 'layers.3.mlp.down_proj'."""
    for exception in reversed(exceptions):
        pattern, bits = parsed(exception)
        if _fits(name, pattern):
            return bits
    return default


def require_used(exceptions: Iterable[str], names: Sequence[str]) -> None:
    """ValueError for an exception that fits none of a model's sites and linear layers."""
    for exception in exceptions:
        pattern, _ = parsed(exception)
        if not any(_fits(name, pattern) for name in names):
            raise ValueError(f"exceptions {exception!r}: fits no layer of the model; it has {names[0]}, {names[-1]}, …")


def concern_sites(exceptions: Iterable[str]) -> list[int]:
    """Bits of those exceptions that name a site of some model, so that its activations are not at the default."""
    pairs = [parsed(exception) for exception in exceptions]
    return [bits for pattern, bits in pairs if _names_site(pattern)]


def stored_bits(bits: int) -> int:
    """Bits that a code takes in a file."""
    return TERNARY_STORED_BITS if bits == TERNARY else bits


@cache
def _names_site(pattern: str) -> bool:
    return any(_fits(f"layers.{layer}.{site}", pattern) for layer in range(MOST_LAYERS) for site in SITES)


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")
