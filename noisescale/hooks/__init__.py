"""Everything that touches PyTorch: captures of the gradients, and the monitor they feed."""
