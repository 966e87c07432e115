"""The toy pipeline with its stages in containers, under a lock as a run is: `in_containers.py ROOT IMAGE FAULT`."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path
from typing import Any

from reflux.pipelines.machine.container_mounts import view
from reflux.pipelines.machine.docker_runner import Containers, in_containers
from reflux.pipelines.machine.local_session import StageResult
from reflux.pipelines.store.stores import StoreRef
from toy_stages.pipeline import party

RUN = "r1"


def contained_party(root: Path, image: str, *, memory: str = "", **brew: Any) -> dict[str, StageResult]:
    """`party` below `root`, which is all that the containers see. One that is killed is started again once."""
    leaves = root / "python3 leaves.txt"
    leaves.write_text("assam")
    store = StoreRef(kind="directory", uri=str(root / "store"))
    with (root / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        seen = view({"leaves": str(leaves)}, store, {"REFLUX_CACHE": str(root / "cache")}, network="host")
        runner = in_containers(Containers(image=image, memory=memory), seen, run=RUN, lock=root / "lock")
        return party(root, runner=runner, image=image, **brew)


if __name__ == "__main__":
    contained_party(Path(sys.argv[1]), sys.argv[2], fault=sys.argv[3])
