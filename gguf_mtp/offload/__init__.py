"""Placement (filled in below)."""
