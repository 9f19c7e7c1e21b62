#!/usr/bin/env bash
# One rank of the pipeline; `epl-launch` runs it once per device. Options of train.py can be added.
exec python "$(dirname "$0")/../train.py" "$@"
