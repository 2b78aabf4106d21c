"""`mindspeed-cp calibrate`: the numbers of a cluster, fitted to kernels and links that are measured here.

What is fitted stands in `mindspeed_cp/cost`. `kernels` and `links` measure, and import torch.
"""
