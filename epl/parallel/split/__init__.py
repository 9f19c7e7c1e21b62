"""Operator splitting: user modules run unchanged while their parameters are cut over the ranks of a `split`.

value.py      a split value: looks whole, holds this rank's block or addend; the ways in and out of it
functions.py  the autograd functions between whole, cut and partial values
ranks.py      the collectives, over a process group
region.py     what holds while a split part runs
common.py     the random stream that the ranks of a split have in common
rules/        one small rule per kind of torch function: which local call to make, how the result is cut
choose/       runs a part on fake tensors and decides which parameter is cut where
user_rules.py rules that users give for classes and functions of theirs
part.py       a module cut in place; its parameters stay the same objects
boundary.py, rows.py   how values enter it and leave it; where ranks have rows of their own
ownrowsof.py, rowviews.py   what leaves it cut there: logits, in the shapes that a loss wants them
cutparameter.py, expressions.py   a parameter's block outside of split parts; what a loss computes from it
filling.py    random numbers for it: its block of what one device draws
escape.py     what bypasses torch functions, and the way round
"""

from epl.parallel.split import rules  # before any split value is made: without them every function would gather

__all__ = ["rules"]
