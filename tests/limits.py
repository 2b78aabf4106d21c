"""The limit of every wait in the tests."""

#: Seconds that only a hang reaches, on the slowest and busiest machine: no test passes or fails by the clock.
HANG = 1200
