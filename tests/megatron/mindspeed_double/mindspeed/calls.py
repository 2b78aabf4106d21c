"""Calls of what MindSpeed replaced."""

from collections import Counter

CALLS: Counter[str] = Counter()


def never(what: str) -> None:
    """Fail: planned attention must not get here."""
    raise AssertionError(f"MindSpeed's {what} was used")
