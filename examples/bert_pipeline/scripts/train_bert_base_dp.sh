#!/usr/bin/env bash
# The run of EPL's manual: BERT base fine-tuned on SQuAD v1.1 in two stages, further devices being further replicas.
# `epl-launch` runs it once per device. Options of train.py can be added.
#   BERT_BASE_DIR   a Hugging Face directory: config.json, weights, vocabulary
#   SQUAD_DIR       train-v1.1.json and dev-v1.1.json
#   OUTPUT_DIR      where the trained model and predictions.json go
if [ -n "$BERT_BASE_DIR$SQUAD_DIR" ]; then
    : "${BERT_BASE_DIR:?is not set: expected a Hugging Face directory of BERT base}"
    : "${SQUAD_DIR:?is not set: expected the directory of train-v1.1.json and dev-v1.1.json}"
    set -- --model "$BERT_BASE_DIR" --train_file "$SQUAD_DIR/train-v1.1.json" --predict_file "$SQUAD_DIR/dev-v1.1.json" \
        --output_dir "${OUTPUT_DIR:-experiments/bert_base_squad}" \
        --epochs 2 --lr 3e-5 --batch_size 3 --micro_batches 4 --max_length 384 --doc_stride 128 "$@"
else
    echo "BERT_BASE_DIR and SQUAD_DIR are not set: a small new model learns the sample" >&2
fi
exec "$(dirname "$0")/train_pipeline.sh" "$@"
