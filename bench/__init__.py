"""Measurements: workloads, models made for measuring, and tables. Installed as `gguf_mtp.bench`."""
