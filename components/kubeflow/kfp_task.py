"""A program of our images as a KFP container component: `python -m reflux.components NAME` with KFP's executor input.

KFP is imported only when a component is made, so that a container and `--help` start without it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from reflux.components import environment
from reflux.components.kubeflow import cluster_environment

REQUIRED = inspect.Parameter.empty


def component(name: str, parameters: Iterable[tuple[str, Any, Any]], *, doc: str, image: str) -> Any:
    """The component of a program that takes these parameters: name, KFP's type, default or REQUIRED."""
    from kfp import dsl

    def program(*_: Any) -> Any:
        return dsl.ContainerSpec(
            image=image,
            command=["python3", "-m", "reflux.components", name],
            args=["--executor-input", dsl.PIPELINE_TASK_EXECUTOR_INPUT_PLACEHOLDER],
        )

    program.__name__ = name.rpartition(".")[2]
    program.__doc__ = doc
    program.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
            for each, kind, default in parameters
        ]
    )
    return dsl.container_component(program)


def started(kfp: Any, image: str, place: Callable[[str, Any], None] | None, arguments: dict[str, Any]) -> Any:
    """The task, inside a pipeline. `image` is the container's, "" the declared one; `place` gives the task of a name
    what it asks of Kubernetes (pods.py).

    KFP's cache is off: it compares URI strings and would hide a file that changed behind the same URI. The store's own
    reuse compares content.
    """
    task = cluster_environment.given(kfp(**arguments).set_caching_options(enable_caching=False))
    task.set_env_variable(environment.COMPILED_BY, environment.version())
    if place is not None:
        place(kfp.name.replace("-", "_"), task)
    return task.set_container_image(image) if image else task
