"""What ships with reflux and is named builtin:FILE; a package, so that the wheel has it."""
