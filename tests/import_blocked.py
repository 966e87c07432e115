"""reflux in a process of its own, in which importing some packages fails: for those who did not install them."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "triton", "pyarrow", "mlflow", "transformers", "boto3", "kfp")
BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Block())
from reflux.pipelines.__main__ import cli
cli({arguments!r})
"""


def without(blocked: tuple[str, ...], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in its own process, where importing those packages fails."""
    code = BLOCKED.format(blocked=set(blocked), arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
