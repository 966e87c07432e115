"""Profile the student-to-be on the teacher's traces, and initialise its quantiser from what is seen."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pyarrow as pa
import torch

from reflux.components import models, profile_schemas, progress
from reflux.components.algorithms.low_bit import decoder_layers, site_modules, watching_sites
from reflux.components.algorithms.policies import knots_of
from reflux.components.algorithms.slot_cache import cache_argument
from reflux.components.artifacts import Artifact, Writer
from reflux.components.bundles import policy_table

from . import page, plots
from .activations import ActivationWatch, activation_rows, position_table
from .config import ProfileKvConfig
from .cost_tables import bucket_rows, cost_metrics, cost_rows, overhead_rows
from .decode_cost import DecodeCost, decode_cost
from .equalizing import equalize_channels
from .k_norms import KNorms
from .layers import bimodal_share, layer_rows
from .power_choice import choose, chosen_of
from .power_features import PowerWatch
from .power_profiles import PROFILES, token_classes
from .power_tables import coefficient_rows, feature_rows, power_data, power_metrics, power_rows, window_rows
from .readings import Rows, readings, token_ids

COLUMNS = ["trace_id", "split", "prompt_token_ids", "response_token_ids", "entropy_nats", "anchor_spans"]
MEASURED = (
    "kv_cost", "kv_cost_buckets", "profiler_overhead", "power", "power_windows", "power_coefficients",
)  # fmt: skip
"""Tables that a clock has a part in, so that they are never the same twice."""


def run(config: ProfileKvConfig, *, traces: Artifact, profile: Writer) -> dict[str, float]:
    """Write the position table, what is seen in the forwards, what is measured in decodes, and a page with plots."""
    if config.cost_device == "cuda" and not torch.cuda.is_available():
        raise ValueError("profile_kv.cost_device cuda: there is no GPU that torch can use here; cpu is allowed")
    rows = _training_rows(traces, config)
    path = profile.source("student_uri")
    tokenizer, model = models.load_tokenizer(path), models.load_model(path)

    if config.equalization_power:
        scaled = equalize_channels(model, tokenizer, rows, config)
        profile.write_table("equalization", scaled, profile_schemas.EQUALIZATION)
    watch, norms, features = _forwards(model, tokenizer, rows, config)
    policy = position_table(watch, list(site_modules(model)), config.activation_bits)
    tables = {"activations": activation_rows(watch, policy, config.activation_bits), "k_norms": norms.rows()}
    tables["layers"] = layer_rows(tables["activations"], tables["k_norms"])
    tables["power_features"] = feature_rows(rows, features)
    metrics = _summary(tables) | {"template_share": template_share(rows)}

    costs = _costs(model.to(config.cost_device), rows, config)
    tables["kv_cost"], tables["kv_cost_buckets"] = cost_rows(costs), bucket_rows(costs)
    tables["profiler_overhead"] = overhead_rows(costs)
    metrics |= cost_metrics(costs)
    if costs:
        classes = [
            token_classes([tokenizer.decode([token]) for token in token_ids(row)], row["anchor_spans"]) for row in rows
        ]
        data = power_data(rows, features, classes, costs, tables["kv_cost_buckets"], config.power_first_token)
        candidates = choose(data, PROFILES[config.power_profile], config.power_coefficients)
        power_BN = data.power(chosen_of(candidates).coefficients, PROFILES[config.power_profile])
        tables["power"], tables["power_windows"] = power_rows(data, power_BN, rows), window_rows(data, power_BN, rows)
        tables["power_coefficients"] = coefficient_rows(candidates)
        metrics |= power_metrics(candidates, data, power_BN, tables["power_windows"])

    profile.write_file("policy_table.bin", policy_table.encode(policy))
    for name, schema in profile_schemas.TABLES.items():
        told = schema.with_metadata(_notes(config)) if name == "power_coefficients" else schema
        profile.write_table(name, pa.Table.from_pylist(tables.get(name, []), told), told, measured=name in MEASURED)
    _write_page(profile, tables, metrics, config, rows)
    return metrics


def _forwards(
    model: Any, tokenizer: Any, rows: Rows, config: ProfileKvConfig
) -> tuple[ActivationWatch, KNorms, list[torch.Tensor]]:
    """Read every sequence once; the last are each one's [N, 2] features of compute power."""
    lengths = [len(token_ids(row)) for row in rows]
    watch = ActivationWatch(config.sample_tokens, len(rows), config.seed, knots_of(config.knots_per_doubling))
    norms = KNorms(len(decoder_layers(model)), max(lengths))
    power_watch = PowerWatch(model, config.power_attention_layers)
    features: list[torch.Tensor] = []
    with torch.no_grad(), watching_sites(model, watch.see), power_watch.watching():
        for reading in readings(model, tokenizer, rows, config.batch_traces, "traces"):
            watch.begin(reading.mask_BT)
            output = reading.output()
            norms.update(getattr(output, cache_argument(model)), reading.mask_BT)
            own = zip(power_watch.features(), lengths[len(features) :], strict=False)
            features += [of_T2[:length] for of_T2, length in own]
    return watch, norms, features


def _training_rows(traces: Artifact, config: ProfileKvConfig) -> Rows:
    """The first by trace_id, cut to the tokens that are profiled. ValueError if there is none."""
    rows = [row for row in traces.table("traces", COLUMNS).to_pylist() if row["split"] == "train"]
    if not rows:
        raise ValueError("profile_kv: the traces hold no training trace, and nothing else may be profiled")
    rows = sorted(rows, key=lambda row: row["trace_id"])[: config.profiled_traces]
    for row in rows:
        row["prompt_token_ids"] = row["prompt_token_ids"][: config.max_sequence_tokens]
        room = config.max_sequence_tokens - len(row["prompt_token_ids"])
        row["response_token_ids"] = row["response_token_ids"][:room]
    return rows


def _costs(model: Any, rows: Rows, config: ProfileKvConfig) -> list[DecodeCost]:
    answered = [row for row in rows if row["response_token_ids"]][: config.cost_traces] if config.cost_tokens else []
    costs: list[DecodeCost] = []
    for row in answered:
        prompt, response = row["prompt_token_ids"], row["response_token_ids"][: config.cost_tokens]
        rounds, warm_up = config.cost_rounds, not costs
        costs.append(decode_cost(model, row["trace_id"], prompt, response, rounds=rounds, warm_up=warm_up))
        progress.report(len(costs), len(answered), "traces decoded")
    return costs


def template_share(rows: Rows) -> float:
    """Share of the profiled tokens that every prompt has in common, at its beginning or end: the chat template's. 0 for
    fewer than two prompts.
    """
    prompts = {tuple(row["prompt_token_ids"]) for row in rows}
    if len(prompts) < 2:
        return 0.0
    first = _in_common(prompts)
    last = _in_common([prompt[first:][::-1] for prompt in prompts])
    return (first + last) * len(rows) / sum(len(token_ids(row)) for row in rows)


def _in_common(prompts: Collection[tuple[int, ...]]) -> int:
    """How many of their first tokens are the same."""
    places = enumerate(zip(*prompts, strict=False))
    return next((place for place, ids in places if len(set(ids)) > 1), min(map(len, prompts)))


def _notes(config: ProfileKvConfig) -> dict[str, str]:
    """What a reader of the coefficients has to know besides."""
    return {
        "power_profile": config.power_profile,
        "target_entropy_nats": str(PROFILES[config.power_profile].target_entropy_nats),
        "chosen_by": "configuration" if config.power_coefficients else "knee",
        "importance": "teacher_entropy",
    }


def _summary(tables: dict[str, Rows]) -> dict[str, float]:
    activations, layers = tables["activations"], tables["layers"]
    tokens = sum(row["tokens"] for row in activations)
    return {
        "outlier_share": sum(row["outlier_share"] * row["tokens"] for row in activations) / tokens,
        "bimodal_share": bimodal_share(activations),
        "bimodal_norm_share": sum(row["bimodal_share"] for row in layers) / len(layers),
        "absmax": max(row["absmax"] for row in activations),
    }


def _write_page(profile: Writer, tables: dict[str, Rows], metrics: dict[str, float], config: Any, rows: Rows) -> None:
    """Plots depend on the version of what draws them, so they too stay outside the digest."""
    figures = {
        "activations": plots.largest_activations(tables["activations"]),
        "k_norms": plots.k_norms(tables["k_norms"]),
    }
    if tables["kv_cost"]:
        figures["cost"] = plots.cost_by_bucket(tables["kv_cost_buckets"])
        figures["front"] = plots.coefficient_front(tables["power_coefficients"])
        figures["power"] = plots.power_of_a_trace(
            tables["power"][0]["power"], config.power_first_token, len(rows[0]["prompt_token_ids"])
        )
    tokens = sum(len(token_ids(row)) for row in rows)
    text = page.render(figures, metrics, traces=len(rows), tokens=tokens)
    profile.write_file("profile.html", text.encode(), measured=True)
    for name, svg in page.figure_files(figures).items():
        profile.write_file(name, svg, measured=True)
