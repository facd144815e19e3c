"""Networks with published weights: where the weights are, and how to copy them to a cluster."""
