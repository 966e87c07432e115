"""Scripts that travel in every bundle, next to runtime/. They are copied as they are."""
