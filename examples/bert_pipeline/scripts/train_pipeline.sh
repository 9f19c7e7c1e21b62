#!/usr/bin/env bash
# One rank of a pipeline of two stages; `epl-launch` runs it once per device. Options of train.py can be added.
exec python "$(dirname "$0")/../train.py" --stages 2 "$@"
