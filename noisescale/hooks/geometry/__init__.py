"""Noise scales of other geometries than the Euclidean: Adam's, sign descent's and spectral descent's.

Functions on tensors, without communication: each module says what is to be summed over samples and ranks,
and finishes from the sums. Nothing here makes the host wait for the device.
"""
