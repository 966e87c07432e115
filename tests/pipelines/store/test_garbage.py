"""What is planned to go: nothing that anybody can still reach, whatever the store looks like."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reflux.components.artifact_writer import ATTEMPT, REMOVING
from reflux.components.storage import Entry
from reflux.pipelines.store.garbage import MANIFEST, Inventory, Item, Place, Unfinished, plan

NOW_S, GRACE_S = 1_000_000.0, 86_400.0


def entry(age_h: float = 100.0) -> Entry:
    return Entry(bytes=10, modified_s=NOW_S - age_h * 3600, version="v")


def item(n: int, *, parents: set[int] | None = frozenset(), age_h: float = 100.0, **more: Entry) -> Item:  # type: ignore[assignment]
    """Artifact n, committed, with one shard, and other objects under names in which _ stands for a dot or slash."""
    others = {name.replace("_", "/"): value for name, value in more.items()}
    return Item(
        place=place(n), entries={MANIFEST: entry(age_h), "s.parquet": entry(age_h), **others}, digest=f"sha256:{n}",
        parents=None if parents is None else frozenset(map(place, parents)), listed=frozenset({"s.parquet"}),
    )  # fmt: skip


def attempt(n: int, *, parents: set[int] | None, age_h: float = 100.0) -> Item:
    known = None if parents is None else frozenset(map(place, parents))
    return Item(place=place(n), entries={ATTEMPT: entry(age_h), "pending/a.json": entry(age_h)}, parents=known)


def place(n: int) -> Place:
    return f"stage{n}", f"{n:064x}"


def inventory(*items: Item, **more: dict[str, Entry]) -> Inventory:
    return Inventory(now_s=NOW_S, items={each.place: each for each in items}, **more)  # type: ignore[arg-type]


def going(held: Inventory, roots: dict[str, list[Place]], unfinished: list[Unfinished] | None = None) -> set[Place]:
    """Places of which anything goes."""
    return {fate.item.place for fate in plan(held, roots, unfinished or [], GRACE_S).fates if fate.goes}


ages = st.sampled_from([0.5, 23.9, 24.1, 500.0])


@st.composite
def stores(draw: st.DrawFn) -> tuple[Inventory, list[Place]]:
    """Artifacts and attempts, each made from earlier ones, and some of them as roots."""
    items = []
    for n in range(draw(st.integers(1, 12))):
        parents = set(draw(st.lists(st.integers(0, n - 1), max_size=3))) if n else set()
        make = draw(st.sampled_from([item, item, attempt]))
        items.append(make(n, parents=parents, age_h=draw(ages)))
    return inventory(*items), draw(st.lists(st.sampled_from([each.place for each in items]), max_size=3))


def reachable(held: Inventory, places: set[Place]) -> set[Place]:
    """By definition: grow the set until nothing is added."""
    while True:
        more = {parent for p in places for parent in held.items[p].parents or ()} | places
        if more == places:
            return places
        places = more


@given(stores())
def test_nothing_that_can_be_reached_loses_a_listed_object(drawn: tuple[Inventory, list[Place]]) -> None:
    held, roots = drawn
    young = {place for place, each in held.items.items() if NOW_S - each.touched_s < GRACE_S}
    wanted = reachable(held, set(roots) | young)
    made = plan(held, {"run r": roots}, [], GRACE_S)
    assert {fate.item.place for fate in made.fates} == set(held.items)
    for fate in made.fates:
        if fate.item.place in wanted:
            assert fate.kept_for
            assert not set(fate.goes) & ({MANIFEST} | fate.item.listed)
        else:
            assert set(fate.goes) == set(fate.item.entries), "and all else goes"
        if fate.item.place in young:
            assert fate.goes == ()


@given(stores())
def test_a_manifest_goes_first_and_children_before_parents_of_equal_or_older_age(
    drawn: tuple[Inventory, list[Place]],
) -> None:
    fates = plan(drawn[0], {}, [], GRACE_S).fates
    assert all(fate.goes[0] == MANIFEST for fate in fates if fate.goes and fate.item.committed)
    touched = [fate.item.touched_s for fate in fates]
    assert touched == sorted(touched, reverse=True)


def test_leftovers_in_a_kept_artifact_go_and_its_shards_stay() -> None:
    kept = item(1, checkpoints_1=entry(), pending_a=entry(), stray=entry())
    (fate,) = plan(inventory(kept), {"run r": [kept.place]}, [], GRACE_S).fates
    assert fate.goes == ("checkpoints/1", "pending/a", "stray")
    assert fate.goes_bytes == 30
    assert fate.kept_for == ("run r",)
    in_use = item(1, checkpoints_1=entry(), stray=entry(1.0))
    assert going(inventory(in_use), {"run r": [in_use.place]}) == set(), "somebody may be at work in it"


def test_work_of_an_unfinished_run_stays_and_abandoned_work_goes() -> None:
    traces, of_run, abandoned, unknown = (
        item(0),
        attempt(1, parents={0}),
        attempt(2, parents={7}),
        attempt(3, parents=None),
    )
    held = inventory(traces, of_run, abandoned, unknown)
    run = Unfinished(run="r", artifacts=dict([traces.place]))
    assert going(held, {"run r": [traces.place]}, [run]) == {abandoned.place}
    assert going(held, {"run r": [traces.place]}) == {of_run.place, abandoned.place, unknown.place}


def test_inputs_of_running_work_stay_though_no_run_names_them() -> None:
    traces, running = item(0), attempt(1, parents={0}, age_h=2.0)
    assert going(inventory(traces, running), {}) == set()
    reused = item(1, parents={0}, attempt=entry(1.0))
    assert going(inventory(traces, reused), {}) == set(), "asked for an hour ago"


def test_a_dead_removal_does_not_make_a_folder_look_used() -> None:
    half = Item(place=place(1), entries={REMOVING: entry(0.1), "s.parquet": entry()}, parents=None)
    assert going(inventory(half), {}) == {half.place}


def test_a_damaged_artifact_that_is_kept_stops_everything() -> None:
    damaged = Item(place=place(1), entries={MANIFEST: entry()}, parents=None, damage="manifest.json: changed")
    assert going(inventory(damaged), {}) == {damaged.place}
    with pytest.raises(ValueError, match=r"manifest.json: changed; it is kept \(run r\), so what it was made from"):
        plan(inventory(damaged), {"run r": [damaged.place]}, [], GRACE_S)


def test_what_a_run_names_and_the_store_lacks_is_said() -> None:
    child = item(1, parents={0})
    made = plan(inventory(child), {"run r": [child.place, place(5)]}, [], GRACE_S)
    assert [remark.partition(" is")[0] for remark in made.remarks] == [
        f"run r: stage5 {place(5)[1][:12]}…", f"run r: stage0 {place(0)[1][:12]}…",
    ]  # fmt: skip


def test_leftovers_outside_artifacts_go_when_they_are_old_and_ours() -> None:
    probe = "probe-" + "a" * 32
    held = inventory(
        unfinished={"a": entry(), "b": entry(1.0)},
        others={probe: entry(), "probe-mine": entry(), "somebody/else": entry(), "probe-" + "b" * 32: entry(1.0)},
    )
    made = plan(held, {}, [], GRACE_S)
    assert (made.discarded, made.removed) == (("a",), (probe,))
