"""A model's forward, written down: whole modules and the glue between them, as torch.fx graphs that can be replayed."""

from __future__ import annotations

from epl.graph.record.call import RecordedCall
from epl.graph.record.modules import MIXED, Mixed
from epl.graph.record.recorder import ROWS_OF_RANKS
from epl.graph.record.recording import Recording
from epl.graph.record.recordings import Recordings

__all__ = ["MIXED", "ROWS_OF_RANKS", "Mixed", "RecordedCall", "Recording", "Recordings"]
