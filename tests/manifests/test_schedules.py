"""The schedules in Git are ones that `reflux schedule apply` takes, and mean what the cluster's overlay makes."""

from __future__ import annotations

from kustomized import MANIFESTS, containers, of_kind, overlay, pods

from reflux.pipelines import recipes
from reflux.pipelines.compile import compile_to_text
from reflux.pipelines.distillation import distillation
from reflux.pipelines.kubeflow import arguments, schedule_file
from reflux.pipelines.kubeflow.package import Package


def test_the_files() -> None:
    schedules = schedule_file.read([MANIFESTS / "schedules"])
    assert schedules
    settings = of_kind(overlay("cluster"), "ConfigMap")["reflux-settings"]["data"]
    (register,) = containers(pods(overlay("cluster"))["Job/reflux-register"])
    for schedule in schedules:
        recipe = recipes.overridden(recipes.named(schedule.recipe), schedule.changes)
        compiled = Package(text=compile_to_text(distillation(recipe, schedule.image, name=schedule.recipe)))
        arguments.check(compiled.parameters, schedule.parameters)
        assert schedule.parameters["store"] == settings["REFLUX_STORE"]
        assert schedule.image == register["image"]
        assert schedule.service_account in of_kind(overlay("cluster"), "ServiceAccount")
        assert not schedule.enabled, "an example must not start runs"
