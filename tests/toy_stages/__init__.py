"""Two tiny stages, declared as real ones are, on which the platform is tested: brew reads a file, pour reads brew."""
