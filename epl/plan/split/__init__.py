"""How tensors are cut over the ranks of a `split`: arithmetic on plain numbers.

cut.py       granules dealt to ranks, and a dim made of sections of granules
layout.py    where a parameter is cut, and what this rank holds of it
decisions.py what the chooser has decided so far
splitplan.py all of it, settled: printed with reasons, sent to other ranks
"""

from epl.plan.split.cut import Axis, Cut
from epl.plan.split.layout import ParameterLayout

__all__ = ["Axis", "Cut", "ParameterLayout"]
