"""The command line `mindspeed-cp`: one file per command."""
