"""`reflux doctor`: what hinders a run, on this machine (machine.py) or in what it left (run.py)."""
