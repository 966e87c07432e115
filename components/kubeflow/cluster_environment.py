"""What a container gets from the cluster that runs it: keys and addresses, from the Secret and the ConfigMap that
manifests/ tells of. A pipeline holds their names and never their values.
"""

from __future__ import annotations

from typing import Any

KEYS = "reflux-object-store"
"""The Secret."""
KEYS_GIVE = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")

SETTINGS = "reflux-settings"
"""The ConfigMap."""
SETTINGS_GIVE = ("AWS_ENDPOINT_URL_S3", "AWS_REGION", "MLFLOW_TRACKING_URI")


def given(task: Any) -> Any:
    """KFP's task, whose container has these variables as far as the namespace has the two objects.

    One that is missing does not hold the pod back: clients may find keys elsewhere, as on AWS with a role for the
    service account, and the first task of a pipeline says what it misses.
    """
    from kfp import kubernetes

    kubernetes.use_secret_as_env(task, KEYS, {name: name for name in KEYS_GIVE}, optional=True)
    kubernetes.use_config_map_as_env(task, SETTINGS, {name: name for name in SETTINGS_GIVE}, optional=True)
    return task


def variables() -> list[dict[str, Any]]:
    """The same, as the variables of a container that KFP does not make."""
    sources = [("secretKeyRef", KEYS, name) for name in KEYS_GIVE]
    sources += [("configMapKeyRef", SETTINGS, name) for name in SETTINGS_GIVE]
    return [
        {"name": name, "valueFrom": {kind: {"name": holder, "key": name, "optional": True}}}
        for kind, holder, name in sources
    ]
