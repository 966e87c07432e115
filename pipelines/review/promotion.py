"""`reflux promote`: which version of a model is the champion. Nothing but a passed gate and better numbers decides.

The ledger in the store is the truth (promotion_ledger.py); MLflow's aliases champion and previous show its last record.
A command that dies between the two leaves aliases that the next one puts right, as it does with aliases set by hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reflux.components import environment, registry
from reflux.components.artifacts import Artifact
from reflux.components.mlflow_connection import answering, twice
from reflux.components.registry import Version
from reflux.components.storage import Store
from reflux.pipelines.review import promotion_ledger, registered_models
from reflux.pipelines.review.promotion_ledger import Record
from reflux.pipelines.store import stores

Summary = dict[str, Any]
"""metrics.json of an evaluation."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number of the evaluation's table that does not depend on the machine."""

    lower_is_better: bool
    measured_on: Callable[[Summary], Any]
    """What has to be the same for two values of it to be comparable."""


METRICS = {
    "perplexity": Metric(lower_is_better=True, measured_on=lambda s: s["text"]),
    "nll_heldout": Metric(lower_is_better=True, measured_on=lambda s: [s["parents"]["traces"], s["heldout"]]),
    "pmr": Metric(
        lower_is_better=False, measured_on=lambda s: [s["parents"]["traces"], s["heldout"], s["sources"]["teacher"]]
    ),
    "effective_bits": Metric(lower_is_better=True, measured_on=lambda s: None),
    "memory_bytes": Metric(lower_is_better=True, measured_on=lambda s: None),
}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a person asked for."""

    model: str
    version: int | None = None
    """None is the candidate."""
    metric: str = "perplexity"
    force: bool = False
    reason: str = ""

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ValueError(f"--metric {self.metric!r}: allowed are {', '.join(METRICS)}")
        if self.force and not self.reason.strip():
            raise ValueError("--force: needs a --reason, which is recorded")


class RefusedError(Exception):
    """The candidate may not become the champion; the message says why."""


@answering()
def promote(asked: Asked, *, data_dir: Path, store: stores.StoreRef | None = None) -> str:
    """Make the version champion; what was done, in words. Nothing is done if it is already.

    RefusedError if it did not pass its gate, is not better, cannot be compared or was rolled back before, unless it is
    forced. ValueError for a version that is not there or not what its tags say.
    """
    client = registered_models.required_client(data_dir)
    wanted = registry.CANDIDATE if asked.version is None else asked.version
    separator = "@" if asked.version is None else "/"
    version = registry.resolve(client, f"models:/{asked.model}{separator}{wanted}")
    with stores.opened(store or registered_models.store_of(version, data_dir)) as (opened, _):
        candidate = _summary(opened, version)
        while True:
            records = promotion_ledger.read(opened, asked.model)
            champion = _champion(client, asked.model, records)
            if champion == version.number:
                _show(client, opened, asked.model)
                return f"{version.name} is the champion already"
            record = _judged(client, opened, asked, version, candidate, champion, records)
            if promotion_ledger.append(opened, asked.model, record):
                _show(client, opened, asked.model)
                return _told(asked.model, record)


@answering()
def roll_back(model: str, reason: str, *, data_dir: Path, store: stores.StoreRef | None = None) -> str:
    """Make the champion before this one the champion again, past all that were rolled back; what was done, in words.

    ValueError if there is none, or if another command changed the champion meanwhile.
    """
    client = registered_models.required_client(data_dir)
    if store is None:  # which a champion that reflux did not register has none of
        store = registered_models.store_of(_champions(client, model), data_dir)
    with stores.opened(store) as (opened, _):
        records = promotion_ledger.read(opened, model)
        champion = _champion(client, model, records)
        previous = _before(records) if records else registry.aliases(client, model).get(registry.PREVIOUS)
        if champion is None or previous is None:
            raise ValueError(f"{model}: there is no previous champion to roll back to")
        if not registry.is_there(client, model, previous):
            raise ValueError(
                f"models:/{model}/{previous}: is the previous champion, and was deleted; promote --version N"
            )
        record = Record(
            number=len(records) + 1, champion=previous, previous=champion, why="rollback", reason=reason,
            at=environment.now(),
        )  # fmt: skip
        if not promotion_ledger.append(opened, model, record):
            raise ValueError(f"{model}: another command changed the champion in this moment; look, and ask again")
        _show(client, opened, model)
    return _told(model, record)


def _champions(client: Any, model: str) -> Version:
    """The champion, for the store that it lies in."""
    try:
        return registry.resolve(client, f"models:/{model}@{registry.CHAMPION}")
    except ValueError as error:
        raise ValueError(f"{error}; if the model has a history of promotions, name its store with --store") from None


def _before(records: list[Record]) -> int | None:
    """The last champion before this one that nobody has rolled back since: a second rollback goes further back."""
    rolled_back: set[int | None] = set()
    for record in records:
        rolled_back.discard(record.champion)
        if record.why == "rollback":
            rolled_back.add(record.previous)
    passed_over = rolled_back | {records[-1].champion}
    before = [*(record.champion for record in reversed(records)), records[0].previous]
    return next((version for version in before if version not in passed_over), None)


def _champion(client: Any, model: str, records: list[Record]) -> int | None:
    """The alias counts only until there is a record."""
    return records[-1].champion if records else registry.aliases(client, model).get(registry.CHAMPION)


def _judged(
    client: Any, store: Store, asked: Asked, version: Version, candidate: Summary, champion: int | None,
    records: list[Record],
) -> Record:  # fmt: skip
    """The record of its promotion. RefusedError if there are objections and nobody forces it."""
    objections = []
    if candidate["verdict"] != registry.PASS:
        objections.append(f"its gate says {candidate['verdict']}")
    for record in records:
        if record.why == "rollback" and record.previous == version.number:
            objections.append(f"it was rolled back at {record.at}" + (f" ({record.reason})" if record.reason else ""))
    value, previous_value = _value(candidate, asked.metric), None
    if champion is not None:
        try:
            present = _summary(store, registry.resolve(client, f"models:/{version.model}/{champion}"))
            previous_value = _value(present, asked.metric)
            objections += _worse(asked.metric, candidate, present, value, previous_value)
        except ValueError as error:  # not of reflux, deleted, or without its evaluation in this store
            objections.append(f"it cannot be compared with the champion ({error})")
    if objections and not asked.force:
        raise RefusedError(f"{version.name} stays what it is: {'; '.join(objections)}")
    return Record(
        number=len(records) + 1, champion=version.number, previous=champion,
        why="forced" if objections else "better" if champion else "first", reason=asked.reason,
        metric=asked.metric, value=value, previous_value=previous_value, at=environment.now(),
    )  # fmt: skip


def _worse(metric: str, candidate: Summary, present: Summary, value: float, champions: float) -> list[str]:
    """Why the candidate is not better on the metric, if it is not."""
    definition = METRICS[metric]
    if definition.measured_on(candidate) != definition.measured_on(present):
        return [f"its {metric} was not measured on what the champion's was, so they cannot be compared"]
    better = value < champions if definition.lower_is_better else value > champions
    return [] if better else [f"its {metric} is {value:g}, the champion's {champions:g}"]


def _summary(store: Store, version: Version) -> Summary:
    """metrics.json of the evaluation behind a version, read and verified. ValueError if it is not the bundle's."""
    scores = Artifact.open(store, version.root_stage, version.root_key)
    if scores.digest != version.root or version.digest not in scores.parents.values():
        raise ValueError(f"{version.name}: its evaluation {scores.place} is not the one that its tags name")
    return json.loads(scores.file("metrics.json"))


def _value(summary: Summary, metric: str) -> float:
    (row,) = (row for row in summary["table"] if row["role"] == "distilled")
    return float(row[metric])


def _show(client: Any, store: Store, model: str) -> None:
    """Set the aliases to the last record. Of several that do so at once, whoever is late sees the later record."""
    shown = None
    while (records := promotion_ledger.read(store, model)) and records[-1] != shown:
        shown = records[-1]
        twice(client.set_registered_model_alias, model, registry.CHAMPION, str(shown.champion))
        if shown.previous is not None and registry.is_there(client, model, shown.previous):
            twice(client.set_registered_model_alias, model, registry.PREVIOUS, str(shown.previous))
        said = f"{shown.number}: {shown.why}" + (f", {shown.reason}" if shown.reason else "")
        twice(client.set_model_version_tag, model, str(shown.champion), "reflux.promotion", said)


def _told(model: str, record: Record) -> str:
    numbers = ""
    if record.metric:
        before = "" if record.previous_value is None else f", the one before {record.previous_value:g}"
        numbers = f" ({record.metric} {record.value:g}{before})"
    return f"models:/{model}/{record.champion} is the champion: {record.why}{numbers}"
