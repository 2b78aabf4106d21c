"""Event simulation of a plan on a cluster: kernels, links and memory.  NumPy only; knows no algorithm."""

from mindspeed_cp.simulate.simulator import simulate_plan
from mindspeed_cp.simulate.timeline import Timeline

__all__ = ["Timeline", "simulate_plan"]
