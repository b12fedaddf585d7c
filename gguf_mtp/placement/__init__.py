"""Placement on this machine: what is asked of llama.cpp and of the operating system.

`offload` plans from plain values; this package finds the values and checks the plan.
"""
