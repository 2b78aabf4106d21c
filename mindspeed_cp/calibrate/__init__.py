"""`mindspeed-cp calibrate`: measures kernels and links of this machine, and fits a cluster preset to them.

`kernels` and `links` measure, and import torch. The fits are in `mindspeed_cp/cluster`.
"""
