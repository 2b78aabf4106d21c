"""`python -m mindspeed_cp`: the command line."""

from mindspeed_cp.cli.main import main

if __name__ == "__main__":
    main()
