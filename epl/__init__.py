"""epl: hybrid-parallel training from a single-device PyTorch script and a few annotation lines."""
