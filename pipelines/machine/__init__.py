"""One run on this machine: stages as processes or as containers, through kfp.local."""
