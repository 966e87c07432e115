"""The six fields of a schedule's time, as Kubeflow Pipelines reads them: checked, in words, and the next times.

KFP parses them with version 1 of Go's robfig/cron: second, minute, hour, day of month, month, day of week. It takes
five fields too, but as the first five of these, so that the Unix line `0 3 * * 1`, Mondays at three, would start a run
every hour of January; five are refused here. L, W and # do not exist. Sunday is 0, and 7 is nothing.
https://pkg.go.dev/github.com/robfig/cron@v1.2.0
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
DAYS = ("Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday")
DEFAULT_ZONE = "UTC"
"""In which a cluster reads schedules unless its scheduler is set to another."""
FIELDS = {
    "second": (0, 59, ()),
    "minute": (0, 59, ()),
    "hour": (0, 23, ()),
    "day of month": (1, 31, ()),
    "month": (1, 12, MONTHS),
    "day of week": (0, 6, DAYS),
}
_FIELDS_NOTE = "six fields: second minute hour day-of-month month day-of-week, e.g. 0 0 3 * * 1 for Mondays at 03:00"
_HORIZON_DAYS = 5 * 366  # one leap year at least; what does not come in that time never comes


@dataclass(frozen=True, kw_only=True)
class Cron:
    """`values[field]` are the numbers at which a schedule fires; `free` the fields that allow every number."""

    text: str
    values: dict[str, tuple[int, ...]]
    free: frozenset[str]

    def fires_on(self, day: datetime) -> bool:
        """Whether it fires on this date. Where both kinds of day are restricted, one of them is enough."""
        if day.month not in self.values["month"]:
            return False
        of_month = day.day in self.values["day of month"]
        of_week = day.isoweekday() % 7 in self.values["day of week"]
        both_count = self.free & {"day of month", "day of week"}
        return of_month and of_week if both_count else of_month or of_week


def parse(text: str) -> Cron:
    """ValueError names the field, what is in it and what is allowed."""
    parts = text.split()
    if len(parts) != len(FIELDS):
        advice = f'; with seconds in front it would be "0 {text}"' if len(parts) == len(FIELDS) - 1 else ""
        raise ValueError(f"cron {text!r}: has {len(parts)} fields; KFP wants {_FIELDS_NOTE}{advice}")
    written = dict(zip(FIELDS, parts, strict=True))
    values = {field: _numbers(text, field, part) for field, part in written.items()}
    free = frozenset(f for f, part in written.items() if any(p.startswith(("*", "?")) for p in part.split(",")))
    if len(values["second"]) > 1:
        raise ValueError(f"cron {text!r}: second {written['second']} would start several runs a minute; write 0")
    cron = Cron(text=" ".join(parts), values=values, free=free)
    if next(coming(cron, datetime(2027, 1, 1)), None) is None:
        raise ValueError(f"cron {text!r}: there is no such day, so it would never fire")
    return cron


def zone(name: str) -> tzinfo:
    """A time zone by its IANA name. ValueError if there is none of that name, or if it is newer than the table here."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # OSError: a folder of the table, such as Europe
        raise ValueError(f"time_zone {name!r}: no such zone; e.g. UTC, Europe/Berlin") from None


def coming(cron: Cron, after: datetime) -> Iterator[datetime]:
    """The times after `after`, on the clock that `after` is on."""
    midnight = after.replace(hour=0, minute=0, second=0, microsecond=0)
    clock = list(itertools.product(*(cron.values[field] for field in ("hour", "minute", "second"))))
    for days in range(_HORIZON_DAYS):
        day = midnight + timedelta(days=days)
        if cron.fires_on(day):
            for hour, minute, second in clock:
                time = day.replace(hour=hour, minute=minute, second=second)
                if time > after:
                    yield time


def in_words(cron: Cron) -> str:
    """For a person who checks what was meant."""
    return " ".join(filter(None, (_clock(cron), _days(cron), _months(cron))))


def _clock(cron: Cron) -> str:
    seconds, minutes, hours = (cron.values[field] for field in ("second", "minute", "hour"))
    times = [f"{h:02}:{m:02}:{s:02}".removesuffix(":00") for h, m, s in itertools.product(hours, minutes, seconds)]
    if len(times) <= 4:
        return f"at {_listed(times)}"
    minute = "every minute" if "minute" in cron.free and len(minutes) == 60 else f"at minute {_listed(minutes)}"
    return f"{minute} of every hour" if len(hours) == 24 else f"{minute} of hour {_listed(hours)}"


def _days(cron: Cron) -> str:
    numbers, weekdays = cron.values["day of month"], cron.values["day of week"]
    of_month = f"on day {_listed(numbers)} of the month" if len(numbers) < 31 else ""
    of_week = f"on {_listed([DAYS[number] for number in weekdays])}" if len(weekdays) < 7 else ""
    both_count = cron.free & {"day of month", "day of week"}
    if not (of_month and of_week) and not both_count:  # one of them names every day, and one is enough
        return "every day"
    return (" if also " if both_count else " or ").join(filter(None, (of_month, of_week))) or "every day"


def _months(cron: Cron) -> str:
    months = cron.values["month"]
    return f"in {_listed([MONTHS[month - 1] for month in months])}" if len(months) < 12 else ""


def _listed(items: object) -> str:
    return ", ".join(map(str, items))  # type: ignore[call-overload]


def _numbers(text: str, field: str, part: str) -> tuple[int, ...]:
    low, high, names = FIELDS[field]
    wrong = ValueError(f"cron {text!r}: {field} {part!r} is not understood; {_allowed(field)}")
    found: set[int] = set()
    for piece in part.split(","):
        span, slash, step = piece.partition("/")
        first, dash, last = ("*", "", "") if span in ("*", "?") else span.partition("-")
        try:
            begin = low if first == "*" else _number(first, low, names)
            end = high if first == "*" or (slash and not dash) else _number(last, low, names) if dash else begin
            stride = _digits(step) if slash else 1
        except ValueError:
            raise wrong from None
        if not low <= begin <= end <= high or stride < 1:
            raise wrong
        found.update(range(begin, end + 1, stride))
    return tuple(sorted(found))


def _number(text: str, low: int, names: tuple[str, ...]) -> int:
    short = [name[:3].upper() for name in names]
    if text.upper() in short:
        return short.index(text.upper()) + low
    return _digits(text)


def _digits(text: str) -> int:
    """Go reads nothing else: no digits of other scripts, no 1_0."""
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(text)
    return int(text)


def _allowed(field: str) -> str:
    low, high, names = FIELDS[field]
    also = f" or {names[0][:3].upper()} to {names[-1][:3].upper()}" if names else ""
    return f"allowed are *, {low} to {high}{also}, ranges 1-5, lists 1,3 and steps */2"
