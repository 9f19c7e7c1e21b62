"""Loaders that are divided over ranks, and lists of files that are.

distribute_loader   the user's own DataLoader, yielding this rank's rows of every global batch
active_share        how the batch that the loop works on is divided, for weighting it
slice_files         this replica's files of a list
"""

from epl.data.active import active_share, disagreeing_shares
from epl.data.exchange import Exchange
from epl.data.files import FilePlace, FileSlice, set_file_place, slice_files
from epl.data.loader import distribute_loader, restore_loader
from epl.data.share import BatchShare, DataShare
from epl.data.watched import watch_loader

__all__ = [
    "BatchShare",
    "DataShare",
    "Exchange",
    "FilePlace",
    "FileSlice",
    "active_share",
    "disagreeing_shares",
    "distribute_loader",
    "restore_loader",
    "set_file_place",
    "slice_files",
    "watch_loader",
]
