"""What benchmarks share: ranks, interleaved measurement, ratios with an interval, bars, tables and plots."""
