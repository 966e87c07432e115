"""The two kinds of store behind storage.py: a plain directory, and S3."""
