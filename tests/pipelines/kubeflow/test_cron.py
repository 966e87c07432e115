"""The six fields of a schedule: what they mean, when they fire, what is refused."""

from __future__ import annotations

import zoneinfo
from datetime import datetime
from itertools import islice

import pytest

from reflux.pipelines.kubeflow import cron


def fires(text: str, after: str, number: int = 3) -> list[str]:
    times = cron.coming(cron.parse(text), datetime.fromisoformat(after))
    return [f"{time:%Y-%m-%d %H:%M:%S}" for time in islice(times, number)]


@pytest.mark.parametrize(
    ("text", "words", "times"),
    [
        ("0 0 3 * * 1", "at 03:00 on Monday", ["2026-11-30 03:00:00", "2026-12-07 03:00:00"]),
        ("0 0 3 * * MON", "at 03:00 on Monday", ["2026-11-30 03:00:00", "2026-12-07 03:00:00"]),
        ("30 15 4 1 * ?", "at 04:15:30 on day 1 of the month", ["2026-12-01 04:15:30", "2027-01-01 04:15:30"]),
        ("0 */30 * * * *", "at minute 0, 30 of every hour every day", ["2026-11-29 21:00:00", "2026-11-29 21:30:00"]),
        ("0 0 6,18 * * *", "at 06:00, 18:00 every day", ["2026-11-30 06:00:00", "2026-11-30 18:00:00"]),
        ("0 0 0 1 JAN,JUL *", "at 00:00 on day 1 of the month in January, July", ["2027-01-01 00:00:00"]),
        ("0 0 0 1 * 5", "at 00:00 on day 1 of the month or on Friday", ["2026-12-01 00:00:00", "2026-12-04 00:00:00"]),
        ("0 0 0 1-31 * 5", "at 00:00 every day", ["2026-11-30 00:00:00", "2026-12-01 00:00:00"]),
        ("0 0 0 1,* * 5", "at 00:00 on Friday", ["2026-12-04 00:00:00", "2026-12-11 00:00:00"]),
        ("0 0 0 29 2 *", "at 00:00 on day 29 of the month in February", ["2028-02-29 00:00:00"]),
        ("0 5/20 9-10 * * 0,6", "at minute 5, 25, 45 of hour 9, 10 on Sunday, Saturday", ["2026-12-05 09:05:00"]),
    ],
)
def test_meaning_and_times(text: str, words: str, times: list[str]) -> None:
    assert cron.in_words(cron.parse(text)) == words
    assert fires(text, "2026-11-29 20:45:00", len(times)) == times


def test_a_time_itself_is_not_after_it() -> None:
    assert fires("0 0 3 * * *", "2026-11-29 03:00:00", 1) == ["2026-11-30 03:00:00"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 3 * * 1", 'has 5 fields; KFP wants six fields.*it would be "0 0 3 \\* \\* 1"'),
        ("@daily", "has 1 fields"),
        ("* 0 3 * * *", "second \\* would start several runs a minute; write 0"),
        ("0 60 3 * * *", "minute '60' is not understood; allowed are \\*, 0 to 59"),
        ("0 0 3 * * 7", "day of week '7' is not understood; allowed are \\*, 0 to 6 or SUN to SAT"),
        ("0 0 3 L * *", "day of month 'L'"),
        ("0 0 3 * 0 *", "month '0'"),
        ("0 0 5-3 * * *", "hour '5-3'"),
        ("0 0 */0 * * *", "hour '\\*/0'"),
        ("0 0 3, * * *", "hour '3,'"),
        ("0 0 3 31 2 *", "no such day"),
        ("0 0 \u0663 * * *", "hour '\u0663'"),
        ("0 */1_0 3 * * *", "minute '\\*/1_0'"),
    ],
)
def test_what_kfp_would_misread_or_refuse(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cron.parse(text)


@pytest.mark.parametrize("name", ["CEST/Berlin", "Europe", "", "../etc/passwd", "/usr/share/zoneinfo/UTC", "Europe/\0"])
def test_zones_are_named_by_iana(name: str) -> None:
    with pytest.raises(ValueError, match=r"time_zone .*: no such zone; e\.g\. UTC, Europe/Berlin"):
        cron.zone(name)


def test_zones_of_a_machine_without_a_table_of_them() -> None:
    """As in small containers."""
    zoneinfo.reset_tzpath(to=())
    zoneinfo.ZoneInfo.clear_cache()
    try:
        assert [str(cron.zone(name)) for name in ("UTC", "Europe/Berlin")] == ["UTC", "Europe/Berlin"]
    finally:
        zoneinfo.reset_tzpath()
