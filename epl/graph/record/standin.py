"""What the user finds in a model's outputs in the place of an object whose contents stay on the stages."""

from __future__ import annotations

from typing import NoReturn

from epl.errors import RecordingError


class StaysOnStages:
    """Says what it stands for when printed, and equals its like; any other use raises."""

    def __init__(self, title: str) -> None:
        object.__setattr__(self, "_title", title)

    def __repr__(self) -> str:
        return f"<{object.__getattribute__(self, '_title')}: its contents stay on the stages that made them>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StaysOnStages) and repr(other) == repr(self)

    def __hash__(self) -> int:
        return hash(repr(self))

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        title = object.__getattribute__(self, "_title")
        raise RecordingError(
            f"the {title} among the model's outputs was filled stage by stage and cannot be used outside the model: its "
            "values stay where they were made. Call the model with use_cache=False to be rid of it (Hugging Face), or return "
            "the tensors that you need"
        )

    __getattr__ = __iter__ = __len__ = __bool__ = __getitem__ = __contains__ = __call__ = _refuse
    __reduce_ex__ = __enter__ = _refuse
    __setattr__ = __delattr__ = __setitem__ = __delitem__ = _refuse
