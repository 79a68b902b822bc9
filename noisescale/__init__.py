"""Measure the gradient noise scale of a data-parallel training run, live and with an interval."""
