"""What a reviewer asks of a finished run: its table, its lineage, whether it becomes the champion."""
