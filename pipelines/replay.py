"""`reflux replay`: a step that distill could not make, made again, and what in it is not finite first."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reflux.components import sources
from reflux.components.checkpoints import Checkpoints
from reflux.components.distill.diagnosis import Found, diagnose
from reflux.components.distill.replay import Replay, read
from reflux.pipelines.store import stores
from reflux.pipelines.store.stores import StoreRef


def again(place: str, ref: StoreRef) -> tuple[Replay, Found]:
    """Make the step at `place`, a folder or what the failed stage named in the store, again.

    ValueError if nothing is kept there, or if a model is no longer the one that it was made with.
    """
    with _fetched(place, ref) as folder:
        replay = read(folder)
    paths = {}
    for field, digest in replay.sources.items():
        source = sources.resolve(field, getattr(replay.config, field))
        if source.digest != digest:
            raise ValueError(f"{field} {source.uri}: is {source.digest}, the step was made with {digest}")
        paths[field] = source.path
    return replay, diagnose(replay, paths["student_uri"], paths["teacher"])


@contextmanager
def _fetched(place: str, ref: StoreRef) -> Iterator[Path]:
    if Path(place, "replay.json").is_file():
        yield Path(place)
        return
    with stores.opened(ref) as (store, _), tempfile.TemporaryDirectory() as scratch:
        if Checkpoints(store, place.strip("/")).latest(Path(scratch)) is None:
            raise ValueError(f"{place}: no step is kept there, in {ref.described()}; name its store with --store")
        yield Path(scratch)


def told(replay: Replay, found: Found) -> Iterator[str]:
    """Lines for people."""
    yield f"step {replay.step}: {replay.message}"
    yield f"made again: {found.loss_nats} nats a token, {len(replay.sequences)} sequences"
    kinds = {
        "parameters that are not finite": found.parameters,
        "first in the forward pass": found.activations[:1],
        "sequences with such a loss": found.losses,
        "first in the backward pass": found.gradients[:1],
    }
    for name, places in kinds.items():
        shown = "; ".join(places[:SHOWN]) + (f" and {len(places) - SHOWN} more" if len(places) > SHOWN else "")
        yield f"{name}: {shown or 'none'}"


SHOWN = 3
"""Places named of each kind."""
