"""The delivered model as files, and how those files become a model again. Most of it travels inside every bundle."""
