"""Two commands at once, and pipelines that others run: what a schedule changes is its own, and is there once."""

from __future__ import annotations

from typing import Any

import pytest
from scheduled_tea import reach, states, told, wanted
from servers.kfp_api_contract import Contract

from reflux.pipelines.kubeflow import registration, schedule
from reflux.pipelines.kubeflow.package import Package
from reflux.pipelines.kubeflow.schedule_file import Schedule


@pytest.mark.parametrize("there_before", [False, True])
@pytest.mark.parametrize("other_cron", ["0 0 4 * * 1", "0 0 5 * * 1"], ids=["the same", "another"])
def test_two_that_apply_at_once_leave_one_schedule(contract: Contract, other_cron: str, there_before: bool) -> None:
    """The other one comes between any two requests of the first."""
    serve = contract.state.serve
    apart = 0
    for moment in range(20):
        contract.state.recurring.clear()
        if there_before:
            schedule.apply(reach(contract), wanted())
        left = [moment]

        def interrupted(operation: str, *given: Any, left: list[int] = left) -> dict[str, Any]:
            if operation.startswith("recurring_run_service"):
                left[0] -= 1
                if left[0] == -1:
                    schedule.apply(reach(contract), wanted(cron=other_cron))
            return serve(operation, *given)

        contract.state.serve = interrupted  # type: ignore[method-assign]
        schedule.apply(reach(contract), wanted(cron="0 0 4 * * 1"))
        contract.state.serve = serve  # type: ignore[method-assign]
        ((cron, status),) = states(contract)
        assert status == "ENABLED", moment
        assert cron in ("0 0 4 * * 1", other_cron), moment
        apart += left[0] < 0
    assert 3 <= apart < 20, "it came in the middle, and no longer after the end"


def test_a_recipe_does_not_move_what_others_run(contract: Contract, package: Package) -> None:
    """A pipeline of the schedule's name that somebody registered, and the schedule's own for whoever registers."""
    other = Package(text=package.text.replace("mild", "strong"))
    api = reach(contract)
    with pytest.raises(ValueError, match=r"pipeline 'tea': is there, and no schedule made it, .* by `pipeline: tea`"):
        schedule.apply(api, wanted(other, name="tea"))
    registration.register(api, pipeline="demo", package=package)
    with pytest.raises(ValueError, match="demo: pipeline 'demo': is there, and no schedule made it"):
        schedule.wanted(api, Schedule(name="demo", recipe="demo", cron="0 0 3 * * 1", time_zone="UTC"))
    schedule.apply(api, wanted(package))
    told(contract)
    with pytest.raises(ValueError, match="pipeline 'weekly': belongs to the schedule weekly, which would run the new"):
        registration.prepare(api, pipeline="weekly", package=other, experiment="reflux")
    assert told(contract) == []
    assert {each["display_name"] for each in contract.state.recurring.values()} == {"weekly"}


def test_two_that_upload_at_once_use_what_the_first_made(contract: Contract, package: Package) -> None:
    serve = contract.state.serve
    api = reach(contract)
    for moment in range(20):
        for table in (contract.state.recurring, contract.state.pipelines, contract.state.versions):
            table.clear()
        contract.state.experiments.clear()
        left = [moment]

        def interrupted(operation: str, *given: Any, left: list[int] = left) -> dict[str, Any]:
            left[0] -= 1
            if left[0] == -1:
                schedule.apply(reach(contract), wanted(package))
            return serve(operation, *given)

        contract.state.serve = interrupted  # type: ignore[method-assign]
        schedule.apply(api, wanted(package))
        contract.state.serve = serve  # type: ignore[method-assign]
        counts = [len(getattr(contract.state, each)) for each in ("recurring", "pipelines", "versions", "experiments")]
        assert counts == [1, 1, 1, 1], moment
