"""Does a recorded loss separate over the batch? Pure functions on code, shapes and row counts; `analyse` is the way in."""

from __future__ import annotations

from epl.train.separate import elementwise, indexing, layout, losses, products, reductions
from epl.train.separate.analysis import Verdict, analyse
from epl.train.separate.program import Entry, Given, Output, Program, Ref

RULE_BOOKS = (elementwise, reductions, layout, indexing, products, losses)
"""Importing them fills the table of rules."""

__all__ = ["RULE_BOOKS", "Entry", "Given", "Output", "Program", "Ref", "Verdict", "analyse"]
