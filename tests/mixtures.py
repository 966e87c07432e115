"""The divergences on which chunked_jsd is tested, on its reference and on its kernel: limits, middles, both skews."""

from __future__ import annotations

import pytest

from reflux.kernels.divergences import FORWARD_KL, REVERSE_KL, Mixture, jsd

MIXTURES = {
    "forward": FORWARD_KL,
    "reverse": REVERSE_KL,
    "jsd 0.1": jsd(0.1),
    "jsd 0.5": jsd(0.5),
    "skew forward": Mixture(share=0.1, of_teacher=1.0),
    "skew reverse": Mixture(share=0.9, of_student=1.0),
}
EVERY = pytest.mark.parametrize("mixture", MIXTURES.values(), ids=MIXTURES)
