"""The data contract of profile_kv, which is long: every column of its tables, as schemas.py has them for the others.

P is the number of prompt tokens of a trace, T of response tokens, both within max_sequence_tokens.
"""

from __future__ import annotations

import pyarrow as pa

from reflux.components.schemas import TRACE_ID, column


def _list(dtype: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", dtype, nullable=False))


ACTIVATIONS = pa.schema(
    [
        column("site", pa.string(), "input of a group of linear layers, e.g. layers.3.mlp_in"),
        column("layer", pa.int32(), "decoder layer, from 0"),
        column("position_from", pa.int32(), "first position of the bucket"),
        column("position_to", pa.int32(), "one past its last position"),
        column("tokens", pa.int64(), "tokens observed in the bucket"),
        column("absmax", pa.float32(), "largest |x|"),
        column("rms", pa.float32(), "root mean square of x"),
        column("main_absmax", pa.float32(), "|x| at the main quantile: what the main scale has to hold"),
        column("outlier_share", pa.float32(), "share of values beyond main_absmax of the position table"),
        column("kurtosis", pa.float32(), "fourth standardised moment of x (3 for a Gaussian)"),
        column("bimodality", pa.float32(), "Sarle's coefficient of log|x|, above 5/9 suggests two modes"),
    ]
)

K_NORMS = pa.schema(
    [
        column("layer", pa.int32(), "decoder layer, from 0"),
        column("position", pa.int32(), "token position in the sequence"),
        column("sequences", pa.int64(), "sequences observed at this position"),
        column("k_norm_mean", pa.float32(), "mean over heads and sequences of the L2 norm of K after rotation"),
        column("k_norm_std", pa.float32(), "standard deviation of the same"),
    ]
)

LAYERS = pa.schema(
    [
        column("layer", pa.int32(), "decoder layer, from 0"),
        column("absmax", pa.float32(), "largest |x| at any of its sites"),
        column("outlier_share", pa.float32(), "share of values beyond main_absmax, mean over sites by tokens"),
        column("kurtosis", pa.float32(), "fourth standardised moment, mean over sites and stretches by tokens"),
        column("bimodality", pa.float32(), "Sarle's coefficient of log|x|, mean over the same"),
        column("bimodal_share", pa.float32(), "share of what its two norms give out with a coefficient above 5/9"),
        column("k_norm_mean", pa.float32(), "mean over positions of the norm of K, by sequences"),
    ]
)

EQUALIZATION = pa.schema(
    [
        column("site", pa.string(), "input of a group of linear layers, e.g. layers.3.mlp_in"),
        column("rms", _list(pa.float32()), "root mean square of each channel as the model came"),
        column("scale", _list(pa.float32()), "what each channel is divided by, and the weights that read it times"),
    ]
)
"""Only where profile_kv.equalization_power is not 0. Of values that several heads read, a scale for all of them."""

KV_COST = pa.schema(
    [
        TRACE_ID,
        column("position", pa.int32(), "position of the decoded token in the sequence"),
        column("kv_bytes", pa.int64(), "bytes of K and V held for all layers when this token attends"),
        column("update_us", pa.float32(), "microseconds in the cache's update, all layers, median over rounds"),
        column("read_us", pa.float32(), "microseconds in the attention that reads the cache, all layers, median"),
        column("token_us", pa.float32(), "microseconds of the whole token without the profiler, median over rounds"),
    ]
)

KV_COST_BUCKETS = pa.schema(
    [
        column("position_from", pa.int32(), "first position of the bucket of 100"),
        column("position_to", pa.int32(), "one past its last position"),
        column("tokens", pa.int64(), "different tokens decoded there"),
        column("timings", pa.int64(), "times that they were timed, all rounds: what mean and variance are over"),
        column("access_us_mean", pa.float64(), "c_t: microseconds of update and read of a token, all layers"),
        column("access_us_variance", pa.float64(), "its variance, microseconds squared"),
        column("update_us_mean", pa.float64(), "the update's part"),
        column("read_us_mean", pa.float64(), "the read's part"),
        column("token_us_mean", pa.float64(), "microseconds of the whole token without the profiler"),
        column("token_us_variance", pa.float64(), "its variance, microseconds squared"),
    ]
)

PROFILER_OVERHEAD = pa.schema(
    [
        column("round", pa.int32(), "from 0; even rounds decode bare first, odd ones profiled first"),
        column("tokens", pa.int64(), "decoded in each of the two"),
        column("bare_us_p50", pa.float64(), "median microseconds of a token without the profiler"),
        column("profiled_us_p50", pa.float64(), "median microseconds of a token with every cache access timed"),
    ]
)

POWER_FEATURES = pa.schema(
    [
        TRACE_ID,
        column("attention", _list(pa.float32()), "[P + T] largest attention weight, mean over chosen layers and heads"),
        column("ffn_norm", _list(pa.float32()), "[P + T] L2 norm of the FFN's output, mean over layers"),
    ]
)

POWER = pa.schema(
    [
        TRACE_ID,
        column("cost_us", _list(pa.float32()), "[P + T] c_t: as measured, else the mean of the position's bucket"),
        column("cost_measured", _list(pa.bool_()), "[P + T] whether this very token was decoded"),
        column("power", _list(pa.float64()), "[P + T] P, sum 1; 0 before the first token that counts"),
    ]
)

POWER_WINDOWS = pa.schema(
    [
        TRACE_ID,
        column("position_from", pa.int32(), "position of the window's first token"),
        column("tokens", pa.int32(), "32, or what remains at the end"),
        column("std", pa.float32(), "standard deviation of P, relative to the largest of the sequence"),
        column("entropy_nats", pa.float32(), "of P normalised within the window, nats; ln(tokens) where it is even"),
    ]
)

POWER_COEFFICIENTS = pa.schema(
    [
        column("alpha", pa.float64(), "weight of attention"),
        column("beta", pa.float64(), "weight of the FFN's norm"),
        column("gamma", pa.float64(), "weight of the cache's cost"),
        column("latency_correlation", pa.float64(), "Spearman, P with the measured time of a token, mean over answers"),
        column("importance_correlation", pa.float64(), "Spearman, P with the teacher's entropy, mean over answers"),
        column("on_front", pa.bool_(), "no other candidate is as good in both and better in one"),
        column("chosen", pa.bool_(), "the front's knee, or what the configuration gave"),
    ]
)

TABLES = {
    "activations": ACTIVATIONS,
    "k_norms": K_NORMS,
    "layers": LAYERS,
    "kv_cost": KV_COST,
    "kv_cost_buckets": KV_COST_BUCKETS,
    "profiler_overhead": PROFILER_OVERHEAD,
    "power_features": POWER_FEATURES,
    "power": POWER,
    "power_windows": POWER_WINDOWS,
    "power_coefficients": POWER_COEFFICIENTS,
}
