"""Parameters of collect_traces."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from reflux.components.declare import check_choices, choice, later, setting, source

STAGE_VERSION = "4"
LOCAL = "local"
"""Name of the teacher that runs in this process."""
SERVER_APIS = ("completions", "chat")

TRACE_STORES = ("topk", "sampled")


@dataclass(frozen=True, kw_only=True)
class CollectTracesConfig:
    """Let the teacher answer every prompt and keep, for each token of its answer, what it would have said instead."""

    teacher: str = source()
    """Model folder, .gguf file, s3:// prefix, package:<module> or hub id of the teacher. Tokenizer, chat template and
    context are its own even where only servers answer, and then it needs no weights here."""
    prompts_uri: str = source()
    """JSONL, CSV or Parquet file (or a folder of them) with prompt, and optionally prompt_id and dimension."""
    prompts_per_dimension: int = 0
    """Prompts asked of each dimension, chosen by a hash of their ids; 0 asks all. 200 is the published number."""
    trivial_share: float = 0.1
    """Share of trivial prompts among those asked, in [0, 1), where prompts_per_dimension chooses."""
    entity_model: str = source()
    """Token classification model by which named entities in prompts are counted, folder or hub id; empty: no count."""
    part: str = later("")
    """I/N: only the I-th of N parts of the prompts is answered here, whole batches dealt in turn. All parts choose the
    same prompts, and merge_traces makes one artifact of them. Empty is everything."""
    answered_by: list[str] = field(default_factory=lambda: [LOCAL])
    """Who answers every prompt: local (the model in `teacher`, in this process), or the names under which servers offer
    models of the same tokenizer and template. A name enters the ids of its traces: let it carry the revision."""
    heldout_fraction: float = 0.2
    """Share of the prompts kept from training, in (0, 1); a prompt's side depends on a hash of its id alone."""
    trace_store: str = choice("topk", TRACE_STORES)
    """Form in which distributions are stored: topk (k log-probabilities and the mass of the tail, for any objective) or
    sampled (k counted draws, unbiased, in far fewer bytes, for the forward KL alone).
    """
    top_k: int = 32
    """Log-probabilities kept per token (topk), at most the vocabulary, or draws per token (sampled), at most 65,535.
    The first 32 hold nearly all mass of a chat model.
    """
    temperature: float = 0.7
    """Temperature of sampling; 0 is greedy. Stored distributions are those at temperature 1 whatever this is."""
    top_p: float = 0.9
    """Nucleus of sampling in (0, 1]. Below 1, answers are not an unbiased sample of the stored distributions."""
    max_new_tokens: int = 256
    """Longest answer, tokens; a longer one is cut and marked with the stop reason length."""
    max_prompt_tokens: int = 1024
    """Longest prompt, tokens after the chat template; longer ones are rejected, never cut."""
    batch_size: int = 32
    """Prompts answered at once, and rows per shard. Part of the key: padding changes the last bits of the logits."""
    dtype: str = choice("float32", ("float32", "bfloat16"))
    """Precision in which the teacher runs."""
    seed: int = 0
    """Seed of all sampling; each prompt's draws come from this and its id."""
    key_token_strategies: list[str] = field(default_factory=lambda: ["confidence", "entropy"])
    """Views that make up the key-token score: confidence, entropy."""
    key_token_weights: list[float] = field(default_factory=lambda: [0.5, 0.5])
    """Weight of each strategy, >= 0."""
    key_token_temperature: float = 1.5
    """Divides the logits before confidence is read, > 0; above 1 because models are over-confident."""
    key_token_threshold: float = 0.7
    """Score in [0, 1] from which a token counts as key; stored with the traces."""
    state_layers: list[int] = field(default_factory=list)
    """Decoder layers, from 0, whose KV states at decisions are kept; a third of the depth is the published choice."""
    state_steps: int = 5
    """Decisions per answer with a state: the first tokens of its first so many reasoning steps."""
    state_window: int = 64
    """Tokens before a decision that its state covers."""
    state_pooling: str = choice("head", ("head", "full"))
    """head: one vector per KV head, the mean over the window; full: every token of the window."""
    attention_layers: list[int] = field(default_factory=list)
    """Decoder layers, from 0, whose attention is kept, sparsely, for each token of the answer."""
    attention_top: int = 16
    """Positions kept per token and layer, those of the largest weight."""
    capture_max_tokens: int = 2048
    """Prompt and answer are cut to this before states and attention are read off them."""
    device: str = setting("auto", ("cpu", "cuda", "auto"))
    """auto is cuda where there is one."""
    server_urls: list[str] = setting([])
    """Base URLs of OpenAI-compatible servers, e.g. http://host:8000/v1: one for all served teachers, or one each."""
    server_key_variables: list[str] = setting([])
    """Environment variables that hold the servers' API keys, one for all or one each; containers get REFLUX_… alone."""
    server_api: str = setting("completions", SERVER_APIS)
    """completions (the prompt goes as token ids) or chat (the server's template, whose ids must be ours)."""
    server_concurrency: int = setting(16)
    """Requests under way at once to each server; as many answers again may wait to be written."""
    server_requests_per_minute: float = setting(0.0)
    """Most requests per minute to each server, spread evenly; 0 is no limit."""
    server_tokens_per_minute: float = setting(0.0)
    """Most tokens per minute, prompts and answers, from each server; 0 is no limit."""
    server_retries: int = setting(8)
    """Repetitions of a request that a busy or absent server did not answer; 8 last about a minute."""
    server_timeout_s: float = setting(600.0)
    """Longest wait for the next byte of an answer, seconds; answers come whole, so for the answer."""

    @property
    def served(self) -> list[str]:
        """The teachers behind servers."""
        return [name for name in self.answered_by if name != LOCAL]

    def __post_init__(self) -> None:
        for name in ("teacher", "prompts_uri"):
            if not getattr(self, name):
                raise ValueError(f"collect_traces.{name}: is empty; name what the teacher is and what it is asked")
        check_choices(self)
        _, parts = part_of(self.part)
        if self.part and parts < 2:
            raise ValueError(
                f"collect_traces.part {self.part!r}: one part is everything, and is written as an empty text"
            )
        for name in ("state_layers", "attention_layers"):
            layers = getattr(self, name)
            if any(layer < 0 for layer in layers) or len(set(layers)) < len(layers):
                raise ValueError(f"collect_traces.{name} {layers}: must be different layers, counted from 0")
        captured = ("state_steps", "state_window", "attention_top", "capture_max_tokens")
        for name in ("top_k", "max_new_tokens", "max_prompt_tokens", "batch_size", *captured):
            if getattr(self, name) < 1:
                raise ValueError(f"collect_traces.{name} {getattr(self, name)}: must be at least 1")
        if self.prompts_per_dimension < 0:
            raise ValueError(f"collect_traces.prompts_per_dimension {self.prompts_per_dimension}: must be 0 or more")
        if not 0 <= self.trivial_share < 1:
            raise ValueError(f"collect_traces.trivial_share {self.trivial_share}: must be in [0, 1)")
        if not 0 < self.heldout_fraction < 1:
            raise ValueError(f"collect_traces.heldout_fraction {self.heldout_fraction}: must lie between 0 and 1")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"collect_traces.top_p {self.top_p}: must be in (0, 1]")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"collect_traces.temperature {self.temperature}: must be 0 or positive")
        if not 0 < self.key_token_temperature < float("inf"):
            raise ValueError(f"collect_traces.key_token_temperature {self.key_token_temperature}: must be positive")
        if not 0 <= self.key_token_threshold <= 1:
            raise ValueError(f"collect_traces.key_token_threshold {self.key_token_threshold}: must be in [0, 1]")
        _check_servers(self)


def part_of(text: str) -> tuple[int, int]:
    """Which part this is, from 0, and of how many: "2/3" is (1, 3), "" is (0, 1)."""
    if not text:
        return 0, 1
    match = re.fullmatch(r"([1-9]\d{0,3})/([1-9]\d{0,3})", text)
    if not match or int(match[1]) > int(match[2]):
        raise ValueError(f"collect_traces.part {text!r}: I/N is expected, I from 1 to N")
    return int(match[1]) - 1, int(match[2])


def _check_servers(config: CollectTracesConfig) -> None:
    names = config.answered_by
    if not names or not all(name.strip() == name != "" for name in names) or len(set(names)) < len(names):
        raise ValueError(f"collect_traces.answered_by {names}: name {LOCAL} or served models, each once")
    if config.server_concurrency < 1 or config.server_retries < 0 or not config.server_timeout_s > 0:
        raise ValueError(
            f"collect_traces.server_concurrency {config.server_concurrency}, server_retries {config.server_retries}, "
            f"server_timeout_s {config.server_timeout_s}: must be at least 1, at least 0, and positive"
        )
    for name in ("server_requests_per_minute", "server_tokens_per_minute"):
        if not 0 <= getattr(config, name) < float("inf"):
            raise ValueError(f"collect_traces.{name} {getattr(config, name)}: must be 0 (no limit) or positive")
    _check_addresses(config)
    if config.served:
        _check_what_servers_give(config)


def _check_what_servers_give(config: CollectTracesConfig) -> None:
    """A server gives the likeliest tokens of each step and nothing else of its model."""
    asked = {
        "trace_store": (config.trace_store, "topk"),
        "state_layers": (config.state_layers, []),
        "attention_layers": (config.attention_layers, []),
        "key_token_strategies": (config.key_token_strategies, ["confidence"]),
        "key_token_temperature": (config.key_token_temperature, 1.0),
    }
    for name, (value, allowed) in asked.items():
        if value != allowed:
            raise ValueError(
                f"collect_traces.{name} {value!r}: a server does not give the states, attention or whole distribution "
                f"that this takes; with {config.served[0]!r} in answered_by, allowed is {allowed!r}"
            )


def _check_addresses(config: CollectTracesConfig) -> None:
    served, urls, variables = config.served, config.server_urls, config.server_key_variables
    if len(urls) not in ({1, len(served)} if served else {0}):
        raise ValueError(
            f"collect_traces.server_urls: {len(urls)} are given for {len(served)} served teachers in answered_by; one "
            "for all or one each is needed"
        )
    if len(variables) not in {0, 1, len(served)}:
        raise ValueError(
            f"collect_traces.server_key_variables: {len(variables)} are given for {len(served)} served teachers; none, "
            "one for all or one each is needed"
        )
    for url in urls:  # a key in a URL would end up in manifests and logs, so the URL is not shown either
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or "@" in url:
            raise ValueError(
                f"collect_traces.server_urls: the one at {parts.hostname or 'no host'} must be http(s)://host[:port]/path"
                " without user, query or fragment; a key goes into a variable named in server_key_variables"
            )
    for variable in variables:
        if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*|", variable):
            raise ValueError(
                "collect_traces.server_key_variables: holds something that is no name of an environment variable; the "
                "key itself must not stand in a configuration"
            )
