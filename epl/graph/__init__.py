"""What the user wrote: strategies become TaskGraphs, and TaskGraphs know their modules, parameters and buffers."""

from __future__ import annotations

from epl.graph.resolve import Members, SharedParameter, TaskGraphs, taskgraphs_of
from epl.graph.state import Registry, registry
from epl.graph.taskgraph import Annotation, Tag, TaskGraph

__all__ = [
    "Annotation",
    "Members",
    "Registry",
    "SharedParameter",
    "Tag",
    "TaskGraph",
    "TaskGraphs",
    "registry",
    "taskgraphs_of",
]
