"""Every error epl raises on purpose.

    EplError
    ├── ConfigError          (ValueError)           a key, an EPL_* variable or a value that cannot be
    ├── NotBuiltError        (NotImplementedError)  a real capability that this version does not have yet
    ├── NotInitializedError  (RuntimeError)         something that communicates was used before epl.init()
    ├── ClusterError         (ValueError)           what this process found around it does not fit together
    ├── TopologyError        (ValueError)           axes that do not multiply to the world size, an unknown axis
    ├── StrategyError        (ValueError)           annotations: nested scopes, a scope in the wrong place
    ├── PlanError            (ValueError)           the annotations, the devices and the settings contradict each other
    │   └── SplitError                              a part that cannot be split over so many ranks, or an operation on split values
    ├── RecordingError       (RuntimeError)         a forward that cannot be written down and cut into stages as it is
    ├── UsageError           (TypeError)            a call with the wrong kind of thing
    ├── DataError            (ValueError)           a loader or a list of files that cannot be divided
    ├── StateError           (ValueError)           a state dict that does not fit the model
    ├── LaunchError          (ValueError)           what epl-launch was asked to do cannot be done
    ├── LazyValueError       (RuntimeError)         a value of a cut model was used in a way that cannot be followed
    ├── NonFiniteNormError   (RuntimeError)         gradients are infinite or not a number, and clipping was to say so
    └── CommunicationError   (RuntimeError)         while ranks talked to each other
        ├── RanksDisagreeError                      ranks are at different places of the program, or saw different things
        ├── PeerLostError                           another rank raised or died
        └── DeadlineError                           nobody answered within communication.timeout

A message says what was expected, what was found, and what to change. Several problems are reported together: `list_problems`.
"""

from __future__ import annotations

from collections.abc import Sequence


class EplError(Exception):
    """The root: `except epl.errors.EplError` catches everything epl raises on purpose."""


class ConfigError(EplError, ValueError):
    """A configuration key, an environment variable or a value that cannot be."""


class NotBuiltError(EplError, NotImplementedError):
    """A capability that is planned, named and refused: this version does not have it yet."""


class NotInitializedError(EplError, RuntimeError):
    """Something that communicates was used before `epl.init()`."""


class ClusterError(EplError, ValueError):
    """What this process found around it (variables, devices, ranks) does not fit together."""


class TopologyError(EplError, ValueError):
    """Axes that do not multiply to the world size, or an axis that does not exist."""


class StrategyError(EplError, ValueError):
    """An annotation in a place or combination where it has no meaning."""


class PlanError(EplError, ValueError):
    """Annotations, devices and settings that contradict each other."""


class SplitError(PlanError):
    """A part that cannot be split over so many ranks, or an operation on split values that would be wrong."""


class RecordingError(EplError, RuntimeError):
    """A forward that cannot be written down and cut into stages as it is; the message names the line."""


class UsageError(EplError, TypeError):
    """A call with the wrong kind of argument."""


class DataError(EplError, ValueError):
    """A loader, or a list of files, that cannot be divided over the replicas."""


class StateError(EplError, ValueError):
    """A state dict that does not fit the model."""


class LaunchError(EplError, ValueError):
    """`epl-launch` was asked for something that cannot be done."""


class LazyValueError(EplError, RuntimeError):
    """A value of a cut model, or a parameter that lives on another rank, was used in a way that cannot be followed."""


class NonFiniteNormError(EplError, RuntimeError):
    """The total norm of the gradients is infinite or not a number, and the caller asked for an error then."""


class CommunicationError(EplError, RuntimeError):
    """Something went wrong while ranks talked to each other."""


class RanksDisagreeError(CommunicationError):
    """Ranks are at different places of the program, or hold different things where they must hold the same."""


class PeerLostError(CommunicationError):
    """Another rank raised or died; its own error is quoted where it could be had."""


class DeadlineError(CommunicationError):
    """Nobody answered within `communication.timeout`."""


def list_problems(title: str, problems: Sequence[str]) -> str:
    """One message for one or several problems, so that a user can mend all of them in one go."""
    if len(problems) == 1:
        return f"{title}: {problems[0]}"
    return "\n".join([f"{title}: {len(problems)} problems", *(f"  {n}. {p}" for n, p in enumerate(problems, 1))])
