"""`reflux label-tasks`: the answers of a run as a labelling project, so that what experts say can come back to it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from reflux.components.artifacts import Artifact
from reflux.components.ingest_labels.tasks import COLUMNS, LABELLING_CONFIG, tasks
from reflux.pipelines import runs
from reflux.pipelines.store import stores


def write(folder: Path, output: Path, ref: stores.StoreRef | None = None, limit: int | None = None) -> tuple[int, Path]:
    """Write the tasks of the run in `folder` to `output` and the labelling configuration beside it, as .xml.

    Returns the number of tasks and the configuration's path. The run need not be finished, only its teacher. ValueError
    if it is not, or if the files cannot be written. `ref` replaces the store that the run records.
    """
    if output.suffix != ".json":
        raise ValueError(f"--output {output}: must end in .json; the labelling configuration is written beside it")
    record = runs.read(folder)
    if "collect_traces" not in record.artifacts:
        raise ValueError(f"run {record.run}: its teacher has not answered yet, so there is nothing to label")
    with stores.opened(ref or record.store) as (store, _):
        traces = Artifact.open(store, "collect_traces", record.artifacts["collect_traces"]["key"])
        rows = (row for batch in traces.batches("traces", columns=COLUMNS) for row in batch.to_pylist())
        made = tasks(rows, limit)
    config = output.with_suffix(".xml")
    try:
        output.write_text(json.dumps(made, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        shutil.copyfile(LABELLING_CONFIG, config)
    except OSError as error:
        raise ValueError(f"--output {output}: cannot be written ({error.strerror})") from None
    return len(made), config
