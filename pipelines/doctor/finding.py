"""What a check says, and how one is made so that a check which breaks is a finding and not the end of the list."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a check found. `status` is ok, warn (it runs, but read this), fail (it cannot run, or what ran is wrong) or
    skip (there is nothing to look at).
    """

    check: str
    status: str
    found: str
    fix: str = ""


class NothingToSeeError(ValueError):
    """What a check would look at is not there, and need not be."""


def attempted(name: str, check: Callable[[], Finding]) -> Finding:
    """The check's finding; its error, if it raises one, is that."""
    try:
        return check()
    except NothingToSeeError as error:
        return Finding(check=name, status="skip", found=str(error))
    except (ValueError, OSError) as error:  # written for people
        return Finding(check=name, status="fail", found=str(error))
    except Exception as error:  # whatever a broken installation raises, it is this check's finding
        return Finding(check=name, status="fail", found=f"{type(error).__name__}: {error}")
