"""The data contract: every column of every Parquet table that one stage writes and another reads.

A reader follows one record by `trace_id`: collect_traces writes it, every later table carries it. Arrays are
`list<...>` columns whose shape stands in the column's description; T is the number of response tokens, P of prompt
tokens, K the entries kept per token, S the number of steps.
"""

from __future__ import annotations

import pyarrow as pa


def column(name: str, dtype: pa.DataType, meaning: str, *, nullable: bool = False, encoding: str = "") -> pa.Field:
    """`encoding` is that of Parquet for the column's numbers; "" leaves it to the writer."""
    metadata = {"meaning": meaning} | ({"encoding": encoding} if encoding else {})
    return pa.field(name, dtype, nullable=nullable, metadata=metadata)


def _list(dtype: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", dtype, nullable=False))


def _rows(dtype: pa.DataType, width: int) -> pa.DataType:
    return _list(pa.list_(pa.field("element", dtype, nullable=False), width))


TRACE_ID = column(
    "trace_id", pa.string(), "sha256 over prompt, teacher, sampling contract and seed; the key of every join"
)
PROMPT_ID = column("prompt_id", pa.string(), "stable id of the prompt: the user's own, or sha256 of its text")

_TRACE = [
    TRACE_ID,
    PROMPT_ID,
    column("teacher_id", pa.string(), "who answered: the model's content digest, or its name on a server"),
    column("dimension", pa.string(), "what the prompt tests, e.g. multi_hop, tool_use, trivial"),
    column("split", pa.string(), "train or heldout, by a hash of prompt_id"),
    column("prompt", pa.string(), "the user's text before the chat template"),
    column("language", pa.string(), "ISO 639 code of the prompt's language; zxx: none; und: it cannot be told"),
    column("language_confidence", pa.float32(), "in [0, 1]: the detector's own, low for a few words"),
    column("entity_count", pa.int32(), "named entities in the prompt; null without entity_model", nullable=True),
    column("prompt_token_ids", _list(pa.int32()), "[P] after the chat template"),
    column("anchor_spans", _rows(pa.int32(), 2), "[A, 2] first prompt token and one past the last of each marked span"),
    column("response", pa.string(), "the teacher's sampled answer, decoded"),
    column("response_token_ids", _list(pa.int32()), "[T] with the closing EOS where the teacher wrote one"),
    column("response_char_ends", _list(pa.int32()), "[T] characters of the response up to the end of each token"),
    column(
        "entropy_nats",
        _list(pa.float32()),
        "[T] entropy of the teacher's next-token distribution, nats; of the K + 1 buckets alone where the schema's "
        "metadata, entropy_of, says buckets",
    ),
    column("key_token_score", _list(pa.float32()), "[T] in [0, 1]: how much the token carries the decision"),
    column("step_starts", _list(pa.int32()), "[S] index into the response where each reasoning step (sentence) begins"),
    column("stop_reason", pa.string(), "eos, length, or stop: a server ended the answer for a reason of its own"),
    column("ends_in_loop", pa.bool_(), "the answer's last tokens are one phrase of at most 16, three times over"),
]


SPLIT_BYTES = "BYTE_STREAM_SPLIT"
"""First bytes of all numbers, then second bytes, …: what ids and log-probabilities have in common stands together."""


def _token_id(vocab_size: int) -> pa.DataType:
    """The smallest type that holds every id of the tokenizer."""
    return pa.uint16() if vocab_size <= 1 << 16 else pa.uint32()


def traces_topk(k: int, vocab_size: int) -> pa.Schema:
    """Teacher traces with the `topk` store: k log-probabilities of the full softmax at T = 1 and the tail's mass as
    one bucket. float16 keeps a log-probability above -8 to 0.002 nats, above -16 to 0.004, above -32 to 0.008.
    """
    ids, logprobs = _rows(_token_id(vocab_size), k), _rows(pa.float16(), k)
    return pa.schema(
        [
            *_TRACE,
            column("topk_token_ids", ids, "[T, K] in falling order of probability", encoding=SPLIT_BYTES),
            column(
                "topk_logprobs",
                logprobs,
                "[T, K] log-probabilities of the full softmax, nats, falling",
                encoding=SPLIT_BYTES,
            ),
            column(
                "tail_logmass",
                _list(pa.float16()),
                "[T] log of the probability outside the top K, nats; -inf where nothing is left",
                encoding=SPLIT_BYTES,
            ),
        ]
    )


def traces_sampled(k: int, vocab_size: int) -> pa.Schema:
    """Teacher traces with the `sampled` store (arXiv 2503.16870): k draws from the full distribution at T = 1, counted.
    A token's count / k is an unbiased estimate of its probability.
    """
    return pa.schema(
        [
            *_TRACE,
            column(
                "sampled_token_ids",
                _list(_list(_token_id(vocab_size))),
                "[T, U] tokens that were drawn, ascending; U differs from token to token",
                encoding=SPLIT_BYTES,
            ),
            column("sampled_counts", _list(_list(pa.uint16())), f"[T, U] how often each was drawn; they sum to {k}"),
        ]
    )


TRACE_STORES = {"topk": traces_topk, "sampled": traces_sampled}


PROMPT_COMPOSITION = pa.schema(
    [
        column("dimension", pa.string(), "what the prompts test"),
        column("usable", pa.int64(), "prompts in the source that can be asked"),
        column("asked", pa.int64(), "those of them that were chosen"),
        column("heldout", pa.int64(), "those of the asked that are kept from training"),
        column("share", pa.float64(), "asked, as a share of all asked prompts"),
    ]
)

REJECTED = pa.schema(
    [
        column("source", pa.string(), "the file's base name"),
        column("row", pa.int64(), "line or row number in the source, from 1"),
        column("record", pa.string(), "the record as read, cut at 2,000 characters"),
        column("reason", pa.string(), "why it was refused: field, value, what is allowed"),
    ]
)

LABELS = pa.schema(
    [
        TRACE_ID,
        PROMPT_ID,
        column("step", pa.int32(), "reasoning step of the trace, from 0"),
        column("annotator", pa.string(), "who rated"),
        column("rating", pa.int32(), "1 (wrong) to 5 (exemplary)"),
        column("overload", pa.bool_(), "the annotator saw cognitive overload"),
        column("guardrail", pa.bool_(), "a guard-rail was triggered"),
        column("comment", pa.string(), "free text", nullable=True),
        column("submitted_at", pa.timestamp("ms", "UTC"), "when the annotator last changed it", nullable=True),
        column(
            "matched_by",
            pa.string(),
            "what shows that this answer was rated: trace_id; text, the same up to the rated step; prompt_id, only "
            "that it is the one answer to the prompt",
        ),
        column(
            "carried_from",
            pa.string(),
            "trace_id under which it was rated, where that answer was collected again",
            nullable=True,
        ),
    ]
)

KEY_TOKENS = pa.schema(
    [
        TRACE_ID,
        PROMPT_ID,
        column("annotator", pa.string(), "who marked"),
        column("mark", pa.string(), "the label they gave, key unless the project has several"),
        column("position", pa.int32(), "index of a marked token in the response, from 0"),
    ]
)

HARD_SAMPLES = pa.schema(
    [
        TRACE_ID,
        PROMPT_ID,
        column("ratings", pa.int32(), "number of ratings"),
        column("rating_mean", pa.float32(), "mean rating"),
        column("rating_min", pa.int32(), "lowest rating of any step"),
        column("hard", pa.bool_(), "a step rated <= 2, an overload or a guard-rail"),
        column("reasons", _list(pa.string()), "which of low_rating, overload, guardrail hold"),
    ]
)

AGREEMENT = pa.schema(
    [
        column("dimension", pa.string(), "of the prompts; null for all of them together", nullable=True),
        column("steps", pa.int32(), "rated by at least two annotators"),
        column("ratings", pa.int32(), "of these steps"),
        column("annotators", pa.int32(), "who gave them"),
        column("alpha", pa.float64(), "Krippendorff's alpha, ordinal; null where it is undefined", nullable=True),
        column("alpha_low", pa.float64(), "lower end of its 95 % bootstrap interval over answers", nullable=True),
        column("alpha_high", pa.float64(), "upper end of the same", nullable=True),
    ]
)

COMPOSITION = pa.schema(
    [
        column("sample_set", pa.string(), "hard, labelled, or all traces"),
        column(
            "property",
            pa.string(),
            "dimension NAME; hesitant and long: mean entropy and tokens in the highest quarter of all traces; cut off; "
            "loops; low_rating, overload, guardrail",
        ),
        column("traces", pa.int64(), "of the set that have it"),
        column("of", pa.int64(), "traces of the set"),
        column("share", pa.float64(), "of the set"),
    ]
)

TRAINING = pa.schema(
    [
        column("step", pa.int32(), "optimizer step, from 1"),
        column("phase", pa.string(), "warmup, joint or finetune"),
        column("metric", pa.string(), "e.g. loss_nats, kl_forward_nats, response_tokens"),
        column("value", pa.float64(), "its value at this step"),
    ]
)

TRAINING_TIMES = pa.schema(
    [
        column("step", pa.int32(), "optimizer step, from 1"),
        column("time_ms", pa.int64(), "wall clock at its end, milliseconds since the epoch"),
        column("seconds", pa.float64(), "duration of the step"),
    ]
)

TRAINING_GENERATIONS = pa.schema(
    [
        column("step", pa.int32(), "optimizer step after which the student was asked"),
        column("trace_id", pa.string(), "trace whose prompt it is"),
        column("prompt", pa.string(), "the prompt after the chat template, without special tokens"),
        column("answer", pa.string(), "the student's greedy answer, without special tokens"),
        column("answer_tokens", pa.int32(), "tokens of the answer, the closing EOS included"),
        column("ended", pa.bool_(), "whether it ended by itself"),
    ]
)

SCORES = pa.schema(
    [
        column("scheme", pa.string(), "fp32, w4a16_rtn, w4a4_plain, w4a4_dual or w4a4_distilled"),
        column("perplexity", pa.float64(), "exp of the mean nats per token on the evaluation text"),
        column("nll_text", pa.float64(), "nats per token on the evaluation text"),
        column("nll_heldout", pa.float64(), "nats per token of the teacher's answers to held-out prompts"),
        column(
            "pmr", pa.float64(), "policy match rate on held-out decisions: 1 - mean Jensen-Shannon divergence in bits"
        ),
        column("effective_bits", pa.float64(), "bits per quantised weight, scales and zero points included"),
        column("effective_bits_activation", pa.float64(), "bits per quantised activation, flags and scales included"),
        column("memory_bytes", pa.int64(), "bytes of the parameters in the form that would be deployed"),
        column("kv_cache_bytes", pa.int64(), "bytes of cached keys and values of a window of the text, so deployed"),
        column("quantizer_digest", pa.string(), "sha256 of the scheme's quantiser configuration"),
        column(
            "outlier_capture",
            pa.float64(),
            "share of the largest 1 % of each token's values that are on the outlier grid; null without two grids",
            nullable=True,
        ),
    ]
)

LATENCIES = pa.schema(
    [
        column("scheme", pa.string(), "as in the scores"),
        column("latency_p50_ms", pa.float64(), "median milliseconds per decoded token, batch 1"),
        column("latency_p95_ms", pa.float64(), "95th percentile of the same"),
        column("latency_of", pa.string(), "deployed, or simulated where low-bit arithmetic is imitated in fp32"),
    ]
)

TRACE_SCORES = pa.schema(
    [
        TRACE_ID,
        column("scheme", pa.string(), "as in the scores"),
        column("tokens", pa.int32(), "response tokens scored"),
        column("nll_nats", pa.float64(), "sum over the response of -log p(token), nats"),
        column("jsd_bits", pa.float64(), "sum over the response of the Jensen-Shannon divergence to the teacher, bits"),
    ]
)

LAYER_ERRORS = pa.schema(
    [
        column("scheme", pa.string(), "as in the scores"),
        column("layer", pa.int32(), "decoder layer, from 0"),
        column("relative_error", pa.float64(), "|h_S - h_T| / |h_T| of the layer's output, mean over held-out tokens"),
    ]
)

POSITION_ERRORS = pa.schema(
    [
        column("scheme", pa.string(), "as in the scores"),
        column("first_position", pa.int32(), "first of the response tokens 0, 1, 2 to 3, 4 to 7, 8 to 15, …"),
        column("tokens", pa.int32(), "held-out tokens there"),
        column("relative_error", pa.float64(), "|h_S - h_T| / |h_T| of what the output head reads, mean over them"),
    ]
)

GENERATIONS = pa.schema(
    [
        PROMPT_ID,
        column("scheme", pa.string(), "as in the scores"),
        column("prompt", pa.string(), "the user's text"),
        column("text", pa.string(), "greedy continuation"),
    ]
)
