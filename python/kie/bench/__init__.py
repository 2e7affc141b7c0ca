"""Measuring kie: `latency` and `sweep` run requests, `report` counts, `compare` judges."""
