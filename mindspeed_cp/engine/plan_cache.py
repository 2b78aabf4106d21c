"""What is computed once for a plan and kept as long as the plan lives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from mindspeed_cp.plan import Plan
from mindspeed_cp.plan.states import StatePlan

Value = TypeVar("Value")

#: Plans, of either kind.
AnyPlan = Plan | StatePlan

_values: WeakKeyDictionary[AnyPlan, dict[Hashable, Any]] = WeakKeyDictionary()
_lock = threading.Lock()


def kept_with_plan(plan: AnyPlan, key: Hashable, compute: Callable[[], Value]) -> Value:
    """Return what `compute` returned at the first call for this plan and key.

    Args:
        plan: a plan; the value must not refer to it, or the plan would live for ever.
        key: names the value among all that are kept with a plan.
        compute: called at most once, unless two threads ask at the same time.
    """
    with _lock:
        values = _values.setdefault(plan, {})
    if key not in values:
        values[key] = compute()
    value: Value = values[key]
    return value
