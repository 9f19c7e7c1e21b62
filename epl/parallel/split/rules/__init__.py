"""One small rule per kind of torch function; importing this registers them all."""

from epl.parallel.split.rules import (
    attention,
    attributes,
    classes,
    dropout,
    indexing,
    layers,
    losses,
    norms,
    pointwise,
    products,
    reductions,
    registry,
    shapes,
)

__all__ = [
    "attention",
    "attributes",
    "classes",
    "dropout",
    "indexing",
    "layers",
    "losses",
    "norms",
    "pointwise",
    "products",
    "reductions",
    "registry",
    "shapes",
]
