#!/usr/bin/env bash
# The same training, data parallel throughout; `epl-launch` runs it once per device. Options of train_dp.py can be added.
exec python "$(dirname "$0")/../train_dp.py" "$@"
