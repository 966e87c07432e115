"""The main pipeline: from a teacher and prompts to a low-bit student, its bundle and its scores."""

from typing import TYPE_CHECKING, Any

from kfp import dsl

from reflux.components.calibrate.component import calibrate
from reflux.components.collect_traces.component import collect_traces
from reflux.components.distill.component import distill
from reflux.components.evaluate.component import evaluate
from reflux.components.ingest_labels.component import ingest_labels
from reflux.components.profile_kv.component import profile_kv

if TYPE_CHECKING:
    from reflux.pipelines.recipes import Recipe


def distillation(recipe: "Recipe", image: str = "") -> Any:
    """The KFP pipeline of a recipe: its configs are constants, what people change from run to run are parameters.

    `image` is that of every container, "" the one that the stages declare.
    """

    @dsl.pipeline(name="reflux-distillation", description="Distil a teacher into a low-bit student.")
    def pipeline(
        store: str,
        run: str,
        teacher: str = recipe.teacher,
        student: str = recipe.student,
        prompts_uri: str = recipe.prompts_uri,
        labels_uri: str = recipe.labels_uri,
        eval_text_uri: str = recipe.eval_text_uri,
        entity_model: str = recipe.entity_model,
    ) -> None:
        at = {"store": store, "run": run, "image": image}
        models = {"teacher": teacher, "student_uri": student}
        asked = {"prompts_uri": prompts_uri, "entity_model": entity_model}
        traces = collect_traces(recipe.collect_traces, teacher=teacher, **asked, **at).outputs["traces"]
        profile = profile_kv(recipe.profile_kv, traces=traces, student_uri=student, **at).outputs["profile"]
        labels = ingest_labels(recipe.ingest_labels, traces=traces, labels_uri=labels_uri, **at).outputs["labels"]
        learned = distill(recipe.distill, traces=traces, profile=profile, labels=labels, **models, **at).outputs[
            "student"
        ]
        seen = {"student": learned, "profile": profile, "traces": traces}
        bundle = calibrate(recipe.calibrate, student_uri=student, **seen, **at).outputs["bundle"]
        evaluate(recipe.evaluate, bundle=bundle, eval_text_uri=eval_text_uri, **seen, **models, **at)

    return pipeline
