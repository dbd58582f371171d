"""Schedules: versions, staleness and stash sizes follow from the order of actions and equal the closed forms."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impl.errors import ConfigError
from impl.rotation.rules import asynchronous, build, gpipe, two_bw
from impl.rotation.schedule import Action, peak_versions, staleness, validate

stages = st.integers(1, 5)
segments = st.lists(st.integers(1, 9), min_size=1, max_size=3)


def segment_of(numbers: list[int], update: int) -> tuple[int, int]:
    """Return where the segment of ``update`` begins, and the update's place in it."""
    begin = 0
    for n in numbers:
        if update < begin + n:
            return begin, update - begin
        begin += n
    raise AssertionError


def versions(actions: tuple[Action, ...], kind: str) -> dict[int, int]:
    return {a.number: a.version for a in actions if a.kind == kind}


@settings(deadline=None)
@given(stages, segments)
def test_stash_versions_are_the_closed_form(p: int, numbers: list[int]):
    schedule = asynchronous(p, numbers)
    validate(schedule)
    for k, actions in enumerate(schedule.actions):
        tau = p - 1 - k
        for j in range(sum(numbers)):
            begin, t = segment_of(numbers, j)
            assert versions(actions, "F")[j] == begin + max(0, t - tau)
            assert versions(actions, "B")[j] == begin + max(0, t - tau)
            assert versions(actions, "U")[j] == j
        assert peak_versions(schedule)[k] <= tau + 1
    longest = max(numbers)
    assert staleness(schedule) == tuple(min(p - 1 - k, longest - 1) for k in range(p))
    if longest >= 2 * p:
        assert peak_versions(schedule) == tuple(range(p, 0, -1))


@settings(deadline=None)
@given(stages, segments)
def test_other_modes(p: int, numbers: list[int]):
    no_stash = asynchronous(p, numbers, "no-stash-recompute")
    vertical = asynchronous(p, numbers, "vertical-sync")
    for schedule in (no_stash, vertical):
        validate(schedule)
    for k in range(p):
        for j in range(sum(numbers)):
            begin, t = segment_of(numbers, j)
            assert versions(no_stash.actions[k], "F")[j] == begin + max(0, t - (p - 1 - k))
            assert versions(no_stash.actions[k], "B")[j] == j
            assert versions(vertical.actions[k], "F")[j] == begin + max(0, t - (p - 1))
    assert set(peak_versions(no_stash)) == {1}
    assert max(peak_versions(vertical)) <= p
    assert len(set(staleness(vertical))) == 1


@settings(deadline=None)
@given(stages, st.integers(0, 3), segments)
def test_2bw_is_one_update_late_with_two_versions(p: int, extra: int, numbers: list[int]):
    schedule = two_bw(p, p + extra, numbers)
    validate(schedule)
    late = min(p - 1, 1)
    for actions in schedule.actions:
        for j, version in versions(actions, "F").items():
            begin, t = segment_of(numbers, j // schedule.per_update)
            assert version == begin + max(0, t - late)
    assert max(peak_versions(schedule)) <= 1 + late
    assert set(staleness(schedule)) == {late if max(numbers) > 1 else 0}


@settings(deadline=None)
@given(st.sampled_from(["gpipe", "1f1b-flush"]), stages, st.integers(1, 6), st.integers(1, 4))
def test_synchronous_schedules_are_never_stale(name: str, p: int, microbatches: int, updates: int):
    schedule = build(name, p, updates, per_update=microbatches)
    assert set(staleness(schedule)) == {0}
    assert set(peak_versions(schedule)) == {1}
    assert schedule.updates == updates
    assert schedule.microbatches == updates * microbatches


def test_flush_holds_fewer_activations_than_gpipe():
    def most_in_flight(actions):
        now = peak = 0
        for a in actions:
            now += {"F": 1, "B": -1, "U": 0}[a.kind]
            peak = max(peak, now)
        return peak

    assert most_in_flight(gpipe(4, 8, 1).actions[0]) == 8
    assert most_in_flight(build("1f1b-flush", 4, 1, per_update=8).actions[0]) == 4


def test_accumulation_delays_in_updates_and_the_last_stage_keeps_a_version():
    """bug_cases A21: two stages, two microbatches in an update."""
    schedule = build("1f1b-async", 2, 5, per_update=2)
    assert staleness(schedule) == (1, 0)
    assert peak_versions(schedule) == (2, 1)


def test_staleness_is_a_profile_not_one_number():
    """bug_cases A23."""
    assert staleness(asynchronous(4, 20)) == (3, 2, 1, 0)


def shifted(schedule, stage: int, kind: str, by: int):
    """Return ``schedule`` with other versions of one kind of action on one stage."""
    actions = tuple(
        dataclasses.replace(a, version=max(0, a.version + by)) if a.kind == kind else a for a in schedule.actions[stage]
    )
    every = (*schedule.actions[:stage], actions, *schedule.actions[stage + 1 :])
    return dataclasses.replace(schedule, actions=every)


@pytest.mark.parametrize(("stage", "kind", "by"), [(0, "F", 1), (0, "B", 1), (1, "B", -1), (2, "F", 1), (1, "U", -1)])
def test_validate_notices_a_delay_off_by_one(stage: int, kind: str, by: int):
    schedule = asynchronous(3, 8)
    with pytest.raises(ValueError, match=rf"stage {stage}: "):
        validate(shifted(schedule, stage, kind, by))


def test_validate_notices_what_cannot_run():
    schedule = asynchronous(2, 3)
    swapped = (schedule.actions[0], tuple(reversed(schedule.actions[1])))
    with pytest.raises(ValueError, match="stage 1"):
        validate(dataclasses.replace(schedule, actions=swapped))
    # stage 1 needs both forwards before its backward, stage 0 gives the second only after the first backward
    first = asynchronous(1, 2).actions[0]
    flow = [("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("U", 0, 0), ("B", 1, 0), ("U", 1, 1)]
    second = tuple(Action(*action) for action in flow)
    with pytest.raises(ValueError, match="deadlock"):
        validate(dataclasses.replace(schedule, actions=(first, second)))
    missing = (schedule.actions[0][:-2], schedule.actions[1][:-2])
    with pytest.raises(ValueError, match="do not come back"):
        validate(dataclasses.replace(schedule, actions=missing))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b-asnc", 2, 3), "1f1b-async"),
        (("1f1b-async", 0, 3), "stages"),
        (("1f1b-async", 2, 0), "at least 1 update"),
        (("1f1b-async", 2, []), "segments"),
        (("gpipe", 2, [3, 0]), "at least 1 update"),
    ],
)
def test_bad_numbers_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build(*arguments)


def test_bad_modes_are_refused():
    with pytest.raises(ConfigError, match="at least as many microbatches"):
        build("1f1b-async", 4, 3, mode="2bw", per_update=3)
    with pytest.raises(ConfigError, match="stash"):
        build("1f1b-async", 4, 3, mode="stsh")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no stale weights"):
        build("gpipe", 4, 3, mode="stash")
