#!/usr/bin/env bash
# Trains on one device; `epl-launch` runs it once per device. Options of train.py can be added.
exec python "$(dirname "$0")/../train.py" "$@"
