#!/usr/bin/env bash
# Trains the translation model with experts; `epl-launch` runs it once per device. Options of train.py can be added.
#   DATA_DIR        where the prepared corpus is, or goes
#   GENERATE_DATA   true prepares it anew, false never; by default it is prepared where there is none
#   SOURCE, TARGET  two aligned text files, such as train.en and train.de; without them the corpus is made up
data_dir="${DATA_DIR:-data}"
if [ -z "$GENERATE_DATA" ] && [ ! -e "$data_dir/vocabulary.json" ]; then
    GENERATE_DATA=true
fi
if [ "$GENERATE_DATA" = true ]; then
    set -- --generate_data ${SOURCE:+--source "$SOURCE"} ${TARGET:+--target "$TARGET"} "$@"
elif [ -z "$GENERATE_DATA" ] && [ -n "$SOURCE$TARGET" ]; then
    echo "$data_dir has a prepared corpus: SOURCE and TARGET are not read again; GENERATE_DATA=true prepares it anew" >&2
fi
exec python "$(dirname "$0")/../train.py" --data_dir "$data_dir" "$@"
