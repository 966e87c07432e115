"""The models that are compared, from the teacher to the exported student, each loaded only when its turn comes.

The low-bit baselines take their quantiser from the bundle, so that what differs between `w4a4_dual` and
`w4a4_distilled` is training alone. The distilled row is the bundle as it would be deployed, not distill's checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from reflux.components.algorithms.effective_bits import Bits, costs_of_weights
from reflux.components.algorithms.low_bit import FULL_PRECISION, Scheme, apply_scheme
from reflux.components.algorithms.policies import PositionTable
from reflux.components.bundles.bundle import load_bundle, read_scheme
from reflux.components.bundles.stored_scheme import StoredWeights, stored_weights
from reflux.components.bundles.transformers_bundle import load_deployed, require_kernels
from reflux.components.models import load_model

UNQUANTISED = Scheme(weight_bits=FULL_PRECISION, activation_bits=FULL_PRECISION)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    name: str
    role: str
    """One of row.ROLES."""
    scheme: Scheme
    load: Callable[[], Any]
    stored: StoredWeights | None = None
    """Of somebody else's checkpoint, whose weights no scheme of ours describes."""

    @property
    def latency_of(self) -> str:
        """Where low-bit arithmetic is imitated in floating point, its time is not that of a deployed kernel."""
        unquantised = self.scheme == UNQUANTISED and self.stored is None
        return "deployed" if unquantised or self.on_kernels else "simulated"

    @property
    def digest(self) -> str:
        """Of the quantiser."""
        return self.scheme.digest() if self.stored is None else self.stored.digest

    def costs_of_weights(self, model: Any) -> dict[str, Bits]:
        """Linear layer -> what a weight of it costs, where that is less than full precision or the decoder's."""
        return costs_of_weights(model, self.scheme) if self.stored is None else self.stored.costs

    @property
    def on_kernels(self) -> bool:
        return self.role == "deployed"


def candidates(
    *,
    teacher: Path | None,
    student: Path,
    bundle: Path,
    scheme: Scheme,
    policy: PositionTable,
    begun: Callable[[], Any],
    rotated: bool = False,
) -> list[Candidate]:
    """In the order of the table. `scheme` is the bundle's; `policy` is the table from before training, and `begun`
    loads what was trained, as it stood then: `student`, or its equalised form.

    `teacher` is None when it is the student's base; otherwise it comes first, with a row of its own. A baseline that
    the bundle's scheme already is (weights only, plain) is left out.
    """

    load_student = partial(load_model, student)

    def baseline(role: str, scheme: Scheme, load: Callable[[], Any] = load_student) -> Candidate:
        table = policy if scheme.needs_policy else None
        return Candidate(
            name=scheme_name(scheme), role=role, scheme=scheme, load=lambda: apply_scheme(load(), scheme, table)
        )

    full = Candidate(name="fp32", role="full", scheme=UNQUANTISED, load=load_student)
    baselines = [baseline("weights_only", scheme.weights_only())]
    if scheme.quantizes_activations:
        baselines.append(baseline("plain", replace(scheme, activation="plain")))
    if rotated:
        baselines.append(baseline("rotated", replace(scheme, activation="plain", rotation="hadamard")))
    others = [] if teacher is None else [teacher]
    return [
        *(replace(full, name="teacher", role="teacher", load=partial(load_model, path)) for path in others),
        full,
        *(candidate for candidate in baselines if candidate.scheme not in (scheme, UNQUANTISED)),
        baseline("undistilled", scheme, begun),
        Candidate(
            name=f"w{scheme.weight_bits}a{scheme.activation_bits}_distilled",
            role="distilled",
            scheme=scheme,
            load=partial(load_bundle, bundle),
        ),
    ]


def given(path: Path, base: Path) -> list[Candidate]:
    """Anybody's model beside `base`, which it was made from: a bundle with its quantiser without training and, where
    there are kernels for it, on these; or a checkpoint in Hugging Face layout. ValueError for one of a kind that is not
    known.
    """
    full = Candidate(name="fp32", role="full", scheme=UNQUANTISED, load=partial(load_model, base))
    if not (path / "quant_config.json").is_file():
        load_path = partial(load_model, path)
        return [
            full,
            Candidate(name="given", role="given", scheme=UNQUANTISED, load=load_path, stored=stored_weights(path)),
        ]
    scheme = read_scheme(path)
    bits = f"w{scheme.weight_bits}a{scheme.activation_bits}"
    weights_only = scheme.weights_only()
    rows = [full]
    if weights_only not in (scheme, UNQUANTISED):
        load = lambda: apply_scheme(load_model(base), weights_only)  # noqa: E731
        rows.append(Candidate(name=scheme_name(weights_only), role="weights_only", scheme=weights_only, load=load))
    rows.append(Candidate(name=f"{bits}_given", role="given", scheme=scheme, load=partial(load_bundle, path)))
    return rows if lacks_kernels(path) else [*rows, on_kernels(path)]


def on_kernels(bundle: Path) -> Candidate:
    """The bundle on low-bit kernels, so that its time and memory are measured. ValueError if there are none for it."""
    require_kernels(bundle)
    scheme = read_scheme(bundle)
    name = f"w{scheme.weight_bits}a{scheme.activation_bits}_deployed"
    return Candidate(name=name, role="deployed", scheme=scheme, load=partial(load_deployed, bundle))


def lacks_kernels(bundle: Path) -> str | None:
    """Why a bundle has no row on low-bit kernels; None if it has one."""
    try:
        require_kernels(bundle)
    except ValueError as error:
        return str(error)
    return None


def scheme_name(scheme: Scheme) -> str:
    """w4a16_rtn (round to nearest), w4a4_plain, w4a4_dual, w4a4_hadamard."""
    bits = f"w{scheme.weight_bits}a{scheme.activation_bits}"
    if scheme.rotates:
        return f"{bits}_{scheme.rotation}"
    return f"{bits}_{scheme.activation}" if scheme.quantizes_activations else f"{bits}_rtn"
