"""Lazy values: what `model(x)` gives under a cut model, and how the loop's code on them is carried out."""
