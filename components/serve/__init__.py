"""What runs beside a deployed model, in somebody else's server: vLLM's plugin."""
