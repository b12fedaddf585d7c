"""What happened, for those who watch: metrics for Prometheus, traces of every round."""
