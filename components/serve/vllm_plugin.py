"""The door through which vLLM finds reflux: the entry point `reflux` of the group `vllm.general_plugins`.

vLLM calls `register` in every process, before it reads a model's configuration. After that `--quantization reflux`
serves a bundle with its activations rounded; without that option vLLM's own W4A16 path of the same weights is served,
with or without this plugin.
"""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


def register() -> None:
    """Make the quantization method known; may be called again. A vLLM without what it needs goes on without it, and
    refuses the option.
    """
    try:
        from . import vllm_linear  # registers when it is imported
    except ImportError as error:
        log.warning("--quantization reflux is not known to this vLLM: %s", error)
    else:
        log.debug("--quantization %s", vllm_linear.METHOD)
