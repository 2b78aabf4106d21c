"""mindspeed-cp over the stand-in: `python -m tests.npu.command train CONFIG ...`, on one rank or as one of several."""

from __future__ import annotations

from tests.npu import preload  # noqa: F401  (before torch_npu)


def main() -> None:
    """The command line, with the stand-in loaded."""
    from mindspeed_cp.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
