"""Operators: one contract each, and one implementation per kind of device.  Imported as `mindspeed_cp.ops`."""
