"""What is sent to a Kubeflow cluster, and what comes back from it."""
