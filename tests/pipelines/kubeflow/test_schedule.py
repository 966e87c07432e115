"""`reflux schedule` against the contract test's server: idempotent, careful with runs in flight and others' own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from scheduled_tea import VALUES, reach, states, told, wanted
from servers.kfp_api_contract import Contract, serving

from reflux.pipelines.__main__ import cli
from reflux.pipelines.kubeflow import kfp_api, registration, schedule, schedule_found
from reflux.pipelines.kubeflow.package import Package


def invoke(contract: Contract, *arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["schedule", *map(str, arguments), "--host", contract.url])


def test_defaults_are_sane_and_no_version_is_pinned(contract: Contract) -> None:
    schedule.apply(reach(contract), wanted(service_account="reflux-runner", description="Every Monday."))
    (made,) = contract.state.recurring.values()
    (pipeline_id,) = contract.state.pipelines
    assert made["pipeline_version_reference"] == {"pipeline_id": pipeline_id}
    assert (made["no_catchup"], made["max_concurrency"], made["status"]) == (True, "1", "ENABLED")
    assert made["trigger"] == {"cron_schedule": {"cron": "0 0 3 * * 1"}}
    assert made["runtime_config"] == {"parameters": VALUES}
    assert made["description"].startswith("Every Monday.\n[reflux schedule of pipeline tea, times in UTC, sha256:")


def test_applying_the_same_again_changes_nothing(contract: Contract, capsys: pytest.CaptureFixture[str]) -> None:
    schedule.apply(reach(contract), wanted())
    assert told(contract) == ["POST recurringruns"]
    schedule.apply(reach(contract), wanted())
    assert told(contract) == []
    assert capsys.readouterr().out.endswith("schedule weekly: unchanged\n")


def test_a_pipeline_with_spaces_in_its_name_has_one_schedule(contract: Contract, package: Package) -> None:
    """Only what reflux registers has a name as Kubernetes wants it."""
    api = reach(contract)
    body = {"display_name": "[Tutorial] Tea, times in doubt"}
    pipeline = contract.state.serve("pipeline_service_create_pipeline", {}, {}, body)
    query = {"pipelineid": pipeline["pipeline_id"], "name": "v1"}
    contract.state.serve("upload_pipeline_version", {}, query, package.text)
    for _ in range(2):
        schedule.apply(api, wanted(pipeline="[Tutorial] Tea, times in doubt"))
    assert schedule_found.named(api, "weekly").source == "pipeline [Tutorial] Tea, times in doubt"
    assert len(contract.state.recurring) == 1


def test_a_change_replaces_in_an_order_that_loses_nothing(contract: Contract) -> None:
    schedule.apply(reach(contract), wanted())
    (old,) = contract.state.recurring
    told(contract)
    schedule.apply(reach(contract), wanted(cron="0 0 4 * * 1"))
    (new,) = contract.state.recurring
    assert states(contract) == [("0 0 4 * * 1", "ENABLED")]
    body = next(iter(contract.state.recurring.values()))
    assert body["mode"] == "ENABLE"
    assert [each.replace(old, "OLD").replace(new, "NEW") for each in told(contract)] == [
        "POST recurringruns",
        "POST recurringruns/OLD:disable",
        "POST recurringruns/ID:enable",
        "DELETE recurringruns/OLD?propagation_policy=ORPHAN",
    ]


def test_a_run_in_flight_outlives_the_replacement_of_its_schedule(contract: Contract) -> None:
    schedule.apply(reach(contract), wanted())
    (old,) = contract.state.recurring
    run = contract.state.start_scheduled(old, "weekly-1")
    schedule.apply(reach(contract), wanted(cron="0 0 4 * * 1"))
    assert states(contract) == [("0 0 3 * * 1", "DISABLED"), ("0 0 4 * * 1", "ENABLED")]
    assert contract.state.runs[run]["state"] == "PENDING"
    schedule.apply(reach(contract), wanted(cron="0 0 4 * * 1"))
    assert len(contract.state.recurring) == 2, "it still runs"
    contract.state.runs[run]["state"] = "SUCCEEDED"
    schedule.apply(reach(contract), wanted(cron="0 0 4 * * 1"))
    assert states(contract) == [("0 0 4 * * 1", "ENABLED")]


def test_the_contract_ends_runs_of_a_deleted_schedule_unless_they_are_orphaned(contract: Contract) -> None:
    """Without this the test above would prove nothing."""
    schedule.apply(reach(contract), wanted())
    (old,) = contract.state.recurring
    run = contract.state.start_scheduled(old, "weekly-1")
    reach(contract).client.delete_recurring_run(old)
    assert contract.state.runs[run]["state"] == "FAILED"


def test_a_replacement_that_is_refused_leaves_the_old_schedule_on(contract: Contract) -> None:
    schedule.apply(reach(contract), wanted())
    contract.trouble = [(500, "POST")]
    with pytest.raises(OSError, match="does not answer as it should"):
        schedule.apply(reach(contract), wanted(cron="0 0 4 * * 1"))
    assert states(contract) == [("0 0 3 * * 1", "ENABLED")]


@pytest.mark.parametrize("broken_at", [1, 2, 3])
def test_an_interrupted_replacement_is_finished_by_the_next(contract: Contract, broken_at: int) -> None:
    """Whatever request is the last one that came through, applying again ends in one schedule that is on."""
    schedule.apply(reach(contract), wanted())
    serve, left = contract.state.serve, [broken_at]

    def breaks(operation: str, *given: Any) -> dict[str, Any]:
        if operation.startswith("recurring_run_service") and "list" not in operation:
            if not left[0]:
                raise ConnectionAbortedError
            left[0] -= 1
        return serve(operation, *given)

    contract.state.serve = breaks  # type: ignore[method-assign]
    with pytest.raises(OSError, match="cannot be reached"):
        schedule.apply(reach(contract), wanted(cron="0 0 4 * * 1"))
    contract.state.serve = serve  # type: ignore[method-assign]
    schedule.apply(reach(contract), wanted(cron="0 0 4 * * 1"))
    assert states(contract) == [("0 0 4 * * 1", "ENABLED")]


def test_a_recipe_is_uploaded_and_is_the_newest_version_afterwards(contract: Contract, package: Package) -> None:
    other = Package(text=package.text.replace("mild", "strong"))
    schedule.apply(reach(contract), wanted(package))
    (pipeline_id,) = [key for key, each in contract.state.pipelines.items() if each["display_name"] == "weekly"]
    assert told(contract)[-1] == "POST recurringruns"
    schedule.apply(reach(contract), wanted(other))
    assert [each.partition("?")[0] for each in told(contract)] == ["POST pipelines/upload_version"], "no new schedule"
    schedule.apply(reach(contract), wanted(package))  # back to what was there before
    newest = registration.newest_version(reach(contract), pipeline_id)
    assert newest.pipeline_spec["pipeline_spec"] == package.spec
    told(contract)
    schedule.apply(reach(contract), wanted(package))
    assert told(contract) == []


@pytest.mark.parametrize("verb", ["POST", "GET", "DELETE"])
def test_a_login_page_in_the_middle_is_no_success(
    contract: Contract, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The answers to a switch and to a deletion are empty, and so is a list without schedules."""
    api = reach(contract)
    schedule.apply(api, wanted())
    ours = schedule_found.named(api, "weekly")
    contract.trouble = [(200, verb)]
    with pytest.raises(OSError, match="answers, but not as the API"):
        schedule.delete(api, ours)
    assert len(contract.state.recurring) == 1
    assert "delete schedule" not in capsys.readouterr().out


def test_enabled_is_switched_without_a_replacement(contract: Contract) -> None:
    schedule.apply(reach(contract), wanted())
    told(contract)
    schedule.apply(reach(contract), wanted(enabled=False))
    assert told(contract) == ["POST recurringruns/ID:disable"]
    schedule.apply(reach(contract), wanted())
    assert told(contract) == ["POST recurringruns/ID:enable"]
    schedule.apply(reach(contract), wanted(cron="0 0 4 * * 1", enabled=False))
    assert states(contract) == [("0 0 4 * * 1", "DISABLED")]


def test_what_reflux_did_not_make_is_not_touched(contract: Contract, tmp_path: Path) -> None:
    api = reach(contract)
    schedule.apply(api, wanted())
    (ours,) = contract.state.recurring
    theirs = {**contract.state.recurring[ours], "recurring_run_id": "theirs", "description": "by hand"}
    contract.state.recurring["theirs"] = theirs
    schedule.apply(api, wanted(cron="0 0 4 * * 1"))
    schedule.prune(api, [])
    assert list(contract.state.recurring) == ["theirs"]
    done = invoke(contract, "delete", "weekly")
    assert done.exit_code == 2
    assert "reflux has made none of that name here; there are: none" in done.output


def test_dry_run_shows_the_difference_and_changes_nothing(
    contract: Contract, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule.apply(reach(contract), wanted())
    told(contract)
    capsys.readouterr()
    schedule.apply(reach(contract, dry_run=True), wanted(cron="0 0 4 * * 1"))
    schedule.prune(reach(contract, dry_run=True), [])
    assert told(contract) == []
    shown = capsys.readouterr().out
    assert "-    cron: 0 0 3 * * 1\n+    cron: 0 0 4 * * 1\n" in shown
    assert [line.partition(":")[0] for line in shown.splitlines() if line.startswith("would")] == [
        "would create schedule weekly", "would switch off schedule weekly", "would switch on schedule weekly",
        "would delete schedule weekly", "would switch off schedule weekly", "would delete schedule weekly",
    ]  # fmt: skip


def test_files_make_the_cluster_like_them(contract: Contract, tmp_path: Path) -> None:
    text = "{name: NAME, pipeline: tea, cron: 0 0 3 * * 1, time_zone: UTC, parameters: {store: /s, leaves: x, run: r}}"
    path = tmp_path / "schedules.yaml"
    path.write_text(f"schedules: [{text.replace('NAME', 'weekly')}, {text.replace('NAME', 'nightly')}]")
    assert invoke(contract, "apply", tmp_path).exit_code == 0
    assert {each["display_name"] for each in contract.state.recurring.values()} == {"weekly", "nightly"}
    path.write_text(f"schedules: [{text.replace('NAME', 'weekly')}]")
    assert invoke(contract, "apply", tmp_path).exit_code == 0
    assert len(contract.state.recurring) == 2
    assert "delete schedule nightly" in invoke(contract, "apply", path, "--prune").output
    assert [each["display_name"] for each in contract.state.recurring.values()] == ["weekly"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("leaves: x", "leafs: x"), "weekly: argument leafs: no such input; did you mean leaves?"),
        (("leaves: x", "leaves: 3"), "weekly: argument leaves: 3 is not text"),
        (("leaves: x, ", ""), "weekly: no value for leaves"),
        (("pipeline: tea", "pipeline: coffee"), "weekly: pipeline 'coffee': is not registered here"),
        (("pipeline: tea", "recipe: dmeo"), "weekly: recipe 'dmeo': no such recipe; did you mean demo"),
    ],
)
def test_all_files_are_checked_before_the_first_change(
    contract: Contract, tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    good = "name: first, pipeline: tea, cron: 0 0 3 * * 1, time_zone: UTC, parameters: {store: /s, leaves: x, run: r}"
    wrong = good.replace("first", "weekly").replace(*change)
    (tmp_path / "schedules.yaml").write_text(f"schedules: [{{{good}}}, {{{wrong}}}]")
    done = invoke(contract, "apply", tmp_path)
    assert done.exit_code == 2
    assert message in done.output
    assert told(contract) == []


def test_create_replace_pause_resume_list_delete(contract: Contract) -> None:
    declared = ["weekly", "--pipeline", "tea", "--arg", "store=/s", "--arg", "leaves=assam", "--arg", "run=r"]
    assert "none of that name" in invoke(contract, "replace", *declared, "--cron", "0 0 3 * * 1").output
    assert invoke(contract, "create", *declared, "--cron", "0 0 3 * * 1").exit_code == 0
    assert "is there already" in invoke(contract, "create", *declared, "--cron", "0 0 4 * * 1").output
    assert invoke(contract, "replace", *declared, "--cron", "0 0 4 * * 1").exit_code == 0
    assert states(contract) == [("0 0 4 * * 1", "ENABLED")]
    assert invoke(contract, "pause", "weekly").exit_code == 0
    assert states(contract) == [("0 0 4 * * 1", "DISABLED")]
    assert "is off already" in invoke(contract, "pause", "weekly").output
    assert json.loads(invoke(contract, "list", "--json").output)[0]["next"] == []
    assert invoke(contract, "resume", "weekly").exit_code == 0
    (row,) = json.loads(invoke(contract, "list", "--json").output)
    assert (row["state"], row["runs"], row["when"]) == ("on", "pipeline tea", "at 04:00 on Monday")
    assert len(row["next"]) == 3
    assert "at 04:00 on Monday UTC" in invoke(contract, "list").output

    (old,) = contract.state.recurring
    run = contract.state.start_scheduled(old, "weekly-1")
    kept = invoke(contract, "delete", "weekly")
    assert kept.exit_code == 2
    assert "switched off, but not deleted, because that could end its run weekly-1" in kept.output
    assert contract.state.runs[run]["state"] == "PENDING"
    contract.state.runs[run]["state"] = "FAILED"
    assert invoke(contract, "delete", "weekly").exit_code == 0
    assert contract.state.recurring == {}
    assert invoke(contract, "list").output == "no schedules of reflux here\n"


def test_runs_of_others_and_runs_before_its_time_are_not_its_own(contract: Contract) -> None:
    api = reach(contract)
    schedule.apply(api, wanted(name="other"))
    contract.state.start_scheduled(schedule_found.named(api, "other").id, "other-1")
    schedule.apply(api, wanted())
    for number in range(3):
        contract.state.start_scheduled(schedule_found.named(api, "other").id, f"other-{number + 2}")
    contract.state.start_scheduled(schedule_found.named(api, "weekly").id, "weekly-1")
    assert schedule_found.in_flight(api, schedule_found.named(api, "weekly")) == ["weekly-1"]
    assert len(schedule_found.in_flight(api, schedule_found.named(api, "other"))) == 4


def test_a_schedule_without_parameters_is_listed(contract: Contract, package: Package) -> None:
    optional = {"parameterType": "STRING", "isOptional": True}
    package = Package(text=package.text)
    package.spec["root"]["inputDefinitions"]["parameters"] = dict.fromkeys(("store", "leaves", "run"), optional)
    package = Package(text=yaml.safe_dump(package.spec))
    schedule.apply(reach(contract), schedule.Wanted(schedule=wanted(package).schedule, package=package, values={}))
    assert json.loads(invoke(contract, "list", "--json").output)[0]["parameters"] == {}


def test_a_zone_that_is_not_known_here_keeps_nothing_off_the_list(contract: Contract) -> None:
    """Somebody whose table of zones is newer made it."""
    schedule.apply(reach(contract), wanted())
    (made,) = contract.state.recurring.values()
    made["description"] = made["description"].replace("times in UTC", "times in Mars/Base")
    schedule.apply(reach(contract), wanted(name="nightly"))
    nightly, weekly = json.loads(invoke(contract, "list", "--json").output)
    assert (nightly["time_zone"], len(nightly["next"])) == ("UTC", 3)
    assert (weekly["time_zone"], weekly["next"]) == ("Mars/Base", [])
    assert "at 03:00 on Monday Mars/Base" in invoke(contract, "list").output


def test_many_users(package: Package) -> None:
    with serving(multi_user=True) as contract:
        api = kfp_api.connect(kfp_api.Connection(host=contract.url, namespace="team-a"))
        schedule.apply(api, wanted(package))
        assert [each.name for each in schedule_found.found(api)] == ["weekly"]
        run = contract.state.start_scheduled(schedule_found.named(api, "weekly").id, "weekly-1")
        assert schedule_found.in_flight(api, schedule_found.named(api, "weekly")) == ["weekly-1"]
        contract.state.runs[run]["state"] = "SUCCEEDED"
        assert schedule_found.in_flight(api, schedule_found.named(api, "weekly")) == []
