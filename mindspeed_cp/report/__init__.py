"""What a plan looks like: its numbers, tables of them, a map of its tiles.

Reads a Plan.  NumPy only; rich where it prints and matplotlib where it draws, imported there.
"""

from mindspeed_cp.report.summary import PlanSummary, summarize
from mindspeed_cp.report.text import Table, plan_tables

__all__ = ["PlanSummary", "Table", "plan_tables", "summarize"]
