"""A few answers as rows of the table `traces`, with words as tokens, for tests of labels that need no model."""

from __future__ import annotations

import re
from itertools import accumulate
from pathlib import Path
from typing import Any

import pyarrow as pa
from stage_writers import writer_for

from reflux.components.artifacts import Artifact
from reflux.components.collect_traces.config import CollectTracesConfig
from reflux.components.collect_traces.steps import step_starts
from reflux.components.schemas import traces_topk

SCHEMA = traces_topk(1, 1000)
BLANK: dict[str, Any] = {"string": "", "bool": False, "int32": 0, "float": 0.0}
"""What a column holds that is not about labels, by its type."""
EXPORTS = Path(__file__).parent / "data" / "labels"
"""The same judgements on ANSWERS as several tools export them; see its README."""
ANSWERS = {
    "p1": "First 3 plus 4 is 7. Then 7 times 2 is 15. So it is 15.",
    "p2": "Yes \U0001f600 it is blue. I think.",
}


def trace_row(prompt_id: str, response: str, **columns: Any) -> dict[str, Any]:
    """A whole row; trace_id is trace-of-PROMPT_ID unless given."""
    pieces = re.findall(r"\s*\S+", response)
    empty = {field.name: [] if pa.types.is_nested(field.type) else BLANK[str(field.type)] for field in SCHEMA}
    row = {
        "trace_id": f"trace-of-{prompt_id}",
        "prompt_id": prompt_id,
        "dimension": "multi_hop",
        "prompt": f"A question called {prompt_id}",
        "response": response,
        "response_token_ids": list(range(len(pieces))),
        "response_char_ends": list(accumulate(map(len, pieces))),
        "entropy_nats": [0.5] * len(pieces),
        "step_starts": step_starts(pieces),
        "stop_reason": "eos",
    }
    return empty | row | columns


def traces_artifact(folder: Path, rows: list[dict[str, Any]]) -> Artifact:
    """The rows as collect_traces would have committed them."""
    (folder / "asked.jsonl").write_text("{}\n")
    config = CollectTracesConfig(teacher=str(folder / "asked.jsonl"), prompts_uri=str(folder / "asked.jsonl"))
    writer = writer_for(folder / "store", "collect_traces", config)
    writer.write_table("traces/00000", pa.Table.from_pylist(rows, schema=SCHEMA), SCHEMA)
    return writer.commit({})
