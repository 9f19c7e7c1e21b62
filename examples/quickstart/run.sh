#!/usr/bin/env bash
cd "$(dirname "$0")" && python local_model.py
