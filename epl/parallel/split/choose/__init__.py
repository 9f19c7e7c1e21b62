"""The chooser: which parameter of a part is cut where.

planner.py  the whole of it: repeated blocks first, each kind once, then the rest
units.py    the repeated blocks, and the inputs they get
hints.py    what Hugging Face's tp_plan says
search.py   the search for one part
tracing.py  one run on rank 0 of a split that is only thought of
open.py     a parameter that nobody has decided about yet
options.py  where it can be cut, as the first operation that reads it sees it
subject.py  a module and its arguments, run without leaving a trace
"""

from epl.parallel.split.choose.planner import choose

__all__ = ["choose"]
