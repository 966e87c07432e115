"""A bundle of the tiny model without the stages before it: weights and table as they come, thresholds made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_tiny_bundle(folder: Path, model: Path, **options: Any) -> Path:
    """`options` are those of the scheme."""
    import torch

    from reflux.components import models
    from reflux.components.algorithms.low_bit import Scheme, apply_scheme, bits_of_sites, frozen_weights, site_modules
    from reflux.components.algorithms.policies import KNOTS, PositionTable
    from reflux.components.calibrate.card import model_card
    from reflux.components.calibrate.export import write_bundle
    from reflux.components.content_digest import digest

    scheme = Scheme(**options)
    student = models.load_model(model)
    sites = list(site_modules(student))
    generator = torch.Generator().manual_seed(0)
    table = PositionTable(sites, torch.rand(len(sites), len(KNOTS), 2, generator=generator) * 0.2 + 0.1)
    student = apply_scheme(student, scheme, table if scheme.needs_policy else None)
    folder.mkdir(parents=True)
    with frozen_weights(student):
        write_bundle(
            folder,
            student,
            models.load_tokenizer(model),
            scheme,
            thresholds={site: 3.0 for site, bits in bits_of_sites(student, scheme).items() if bits < 16},
            fallback_share=0.05,
            base_digest=digest(model),
            card=model_card("tiny", student, scheme, {"student": "sha256:ab"}),
        )
    return folder
