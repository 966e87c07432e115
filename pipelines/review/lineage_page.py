"""The chain as one page for whoever reviews it: all artifacts, all digests, what each was made from a click away.

It needs nothing else, now or in ten years. Names, URIs and configurations are other people's text, so everything is
escaped, and the page forbids itself every request and every script.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from reflux.pipelines.review.lineage import Chain, megabytes


def render(chain: Chain, *, of: str) -> str:
    """The page; `of` is what a person asked about."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(size=megabytes, value=_value)
    template = environment.from_string(files(__package__).joinpath("lineage_page.html").read_text(encoding="utf-8"))
    return template.render(chain=chain, of=of, artifacts=list(chain.artifacts.values()))


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
