#!/usr/bin/env bash
# ResNet replicated, classification layer split; `epl-launch` runs it once per device. Options of train.py can be added.
exec python "$(dirname "$0")/../train.py" "$@"
