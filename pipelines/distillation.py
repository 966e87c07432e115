"""The main pipeline: from a teacher and prompts to a low-bit student, its bundle and its scores."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from kfp import dsl

from reflux.components.calibrate.component import calibrate
from reflux.components.collect_traces.component import collect_traces
from reflux.components.distill.component import distill
from reflux.components.distill.config import OBJECTIVES
from reflux.components.evaluate.component import evaluate
from reflux.components.ingest_labels.component import ingest_labels
from reflux.components.kubeflow.close_run import close_run
from reflux.components.kubeflow.pods import Placement
from reflux.components.kubeflow.prerequisites import prerequisites
from reflux.components.merge_traces.component import merge_traces
from reflux.components.profile_kv.component import profile_kv
from reflux.pipelines.form import with_choices

if TYPE_CHECKING:
    from reflux.pipelines.recipes import Recipe


def distillation(config: "Recipe", image: str = "", *, name: str, attended: bool = False) -> Any:
    """The KFP pipeline of a recipe: its configs are constants, what people change from run to run are parameters.

    `image` is that of every container, "" the one that the stages declare. `name` is the recipe's. `attended`:
    whoever runs it checks the prerequisites before and closes the run after the stages, so there are no tasks for that,
    and it runs on one machine, so nothing is asked of Kubernetes.
    """

    @dsl.pipeline(name="reflux-distillation", description="Distil a teacher into a low-bit student.")
    def pipeline(
        store: str,
        run: str = "",  # "" is the id that KFP gives the run
        recipe: str = name,
        teacher: str = config.teacher,
        student: str = config.student,
        prompts_uri: str = config.prompts_uri,
        labels_uri: str = config.labels_uri,
        eval_text_uri: str = config.eval_text_uri,
        entity_model: str = config.entity_model,
        start_uri: str = config.start_uri,
        objective: str = config.distill.objective,
        registered_model: str = config.evaluate.registered_model,
        accelerator: str = "",  # "" is none
        accelerators: str = "1",  # of each pod; text, as KFP's driver wants it
        overrides: dict = {},  # noqa: B006  KFP reads the default and keeps none of it
    ) -> None:
        job = dsl.PIPELINE_JOB_ID_PLACEHOLDER  # a cluster resolves it only where it is a whole value
        pods = Placement(pods=config.kubernetes, accelerator=accelerator, accelerators=accelerators)
        on: dict[str, Any] = {"image": image, "place": None if attended else pods.place}
        at = {"store": store, "run": run, "job": job, "overrides": overrides, **on}
        form = {
            "recipe": recipe, "teacher": teacher, "student": student, "prompts_uri": prompts_uri,
            "labels_uri": labels_uri, "eval_text_uri": eval_text_uri, "entity_model": entity_model,
            "start_uri": start_uri,
            "objective": objective, "registered_model": registered_model, "accelerator": accelerator,
            "accelerators": accelerators,
        }  # fmt: skip
        models = {"teacher": teacher, "student_uri": student}
        asked = {"prompts_uri": prompts_uri, "entity_model": entity_model}

        with nullcontext() if attended else dsl.ExitHandler(close_run(run=run, job=job, **on), name="stages"):
            parts = 1 if attended else config.kubernetes["collect_traces"].pods
            if parts == 1:
                answers = collect_traces(config.collect_traces, teacher=teacher, **asked, **at)
                traces = answers.outputs["traces"]
            else:
                with dsl.ParallelFor([f"{i}/{parts}" for i in range(1, parts + 1)], name="parts") as part:
                    answers = collect_traces(config.collect_traces, teacher=teacher, part=part, **asked, **at)
                traces = merge_traces(parts=dsl.Collected(answers.outputs["traces"]), **at).outputs["traces"]
            if not attended:
                answers.after(prerequisites(config.stages(), **form, **at))
            profile = profile_kv(config.profile_kv, traces=traces, student_uri=student, **at).outputs["profile"]
            labels = ingest_labels(config.ingest_labels, traces=traces, labels_uri=labels_uri, **at).outputs["labels"]
            taught = {"traces": traces, "profile": profile, "labels": labels}
            taught |= {"objective": objective, "start_uri": start_uri}
            job_of_pods = {} if attended else pods.train_job("distill", image)
            learned = distill(config.distill, **taught, **job_of_pods, **models, **at).outputs["student"]
            seen = {"student": learned, "profile": profile, "traces": traces}
            bundle = calibrate(config.calibrate, student_uri=student, **seen, **at).outputs["bundle"]
            judged = {"bundle": bundle, "eval_text_uri": eval_text_uri, "registered_model": registered_model, **seen}
            evaluate(config.evaluate, **judged, **models, **at)

    everywhere = {objective for objective, traits in OBJECTIVES.items() if not traits.only_on}
    objectives = sorted({*everywhere, config.distill.objective})
    return with_choices(pipeline, {"recipe": [name], "objective": objectives})
