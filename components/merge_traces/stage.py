"""Parts of traces in, one artifact out whose manifest lists the parts' shards where they lie."""

from __future__ import annotations

from collections.abc import Callable

from reflux.components.artifacts import Artifact, Writer
from reflux.components.merge_traces.config import MergeTracesConfig

SUMS = ("answers", "tokens", "tokens_per_second")
PER_ANSWER = ("eos_share", "length_share", "loop_share", "tokens_per_answer")
PER_TOKEN = ("entropy_mean_nats", "key_token_share", "tail_mass_mean", "distinct_tokens_mean")
PER_WATCHED = ("attention_coverage_mean",)
"""Metrics that differ from part to part, by what they are sums or means of. All others tell of the prompts, which every
part chose alike."""


def run(config: MergeTracesConfig, *, parts: list[Artifact], traces: Writer) -> dict[str, float]:
    """List the shards of all parts, and work out the metrics of the whole. ArtifactError unless they are all the parts
    of one whole.
    """
    _require_whole(parts)
    for part in parts:
        for shard in part.shards():
            traces.inherit(part, shard)
    return merged_metrics(parts)


def merged_metrics(parts: list[Artifact]) -> dict[str, float]:
    """Those that one artifact of all answers would have; what only some parts measured (a speed, where the others were
    found made) is left out.
    """
    weights: dict[str, Callable[[Artifact], float]] = {
        **dict.fromkeys(PER_ANSWER, lambda part: part.metrics["answers"]),
        **dict.fromkeys(PER_TOKEN, lambda part: part.metrics["tokens"]),
        **dict.fromkeys(PER_WATCHED, lambda part: float(sum(shard.rows or 0 for shard in part.shards("attention")))),
    }
    merged = {}
    for name in parts[0].metrics:
        if not all(name in part.metrics for part in parts):
            continue
        values = [part.metrics[name] for part in parts]
        if name in SUMS:
            merged[name] = sum(values)
        elif name in weights:
            weight = [weights[name](part) for part in parts]
            merged[name] = sum(v * w for v, w in zip(values, weight, strict=True)) / max(sum(weight), 1.0)
        else:
            merged[name] = values[0]
    return merged


def _require_whole(parts: list[Artifact]) -> None:
    given = sorted(str(part.config.get("part", "")) for part in parts)
    expected = sorted(f"{number}/{len(parts)}" for number in range(1, len(parts) + 1))
    if given != expected:
        raise ValueError(
            f"input parts: {len(parts)} were given, which are {', '.join(given)}; each of {', '.join(expected)} once"
        )
    first = _of_the_whole(parts[0])
    for part in parts[1:]:
        if _of_the_whole(part) != first:
            raise ValueError(
                f"input parts: {part.place} and {parts[0].place} were made from other prompts or configurations"
            )


def _of_the_whole(part: Artifact) -> object:
    """What parts of one whole have in common."""
    fields = {name: value for name, value in part.record.key_fields.items() if name != "part"}
    return (
        part.stage,
        part.record.version,
        fields,
        {name: source.digest for name, source in part.record.sources.items()},
    )
